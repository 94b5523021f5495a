"""What a diagnosis found, as plain values: the text, the page and the JSON are all made from this."""

from __future__ import annotations

from dataclasses import dataclass

from accumulus.numerics.evidence import Finding
from accumulus.numerics.payoff import Payoff
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.scales import Scales
from accumulus.numerics.trace import TraceTable
from accumulus.origin import Origin

__all__ = ["Diagnosis"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """The fields of a `NumericsReport`, which says what each is."""

    precision: str
    device: str
    num_steps: int
    loss_scale: float
    rows: tuple[RangeRow, ...]
    scales: Scales | None
    origin: Origin | None
    only_above: float | None
    trace: TraceTable
    payoff: Payoff | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def steps(self) -> str:
        """How many steps there were, in words."""
        return f"{self.num_steps} step{'s' if self.num_steps > 1 else ''}"
