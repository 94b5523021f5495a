"""What findings rest on, and what one says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from accumulus.numerics.formats import Format, format_of
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.scales import Scales, layer_of
from accumulus.numerics.subject import Subject
from accumulus.numerics.trace import TraceTable
from accumulus.origin import Origin

__all__ = ["Evidence", "Finding"]

ROUNDING = 2.0**-18
"""A sum this small against its terms is what float32's rounding left of zero."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of advice.

    Args:
        kind: what is wrong, in a word or two.
        module: path of the module or parameter; empty for the loss function or the whole.
        figure: the number it rests on.
        text: what is the matter, as a sentence.
        change: what to do about it, as a sentence.
        sureness: "certain", "likely" or "possible".
        severity: orders the findings.
    """

    kind: str
    module: str
    figure: str
    text: str
    change: str
    sureness: str
    severity: int

    def __str__(self) -> str:
        return f"{self.text} {self.change} ({self.sureness})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "sentence": str(self)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Everything that findings rest on.

    Args:
        subject: what was diagnosed.
        rows: its ranges, at scale 1.
        trace: its dtypes.
        scales: the window in the format that it computes in; None where no gradient flows in one.
        origin: of the first non-finite value; None where all was finite.
        only_above: the present loss scale, where only that is too large.
        infinities: made from finite numbers in the forward pass, whether or not they reach the loss.
    """

    subject: Subject
    rows: Sequence[RangeRow]
    trace: TraceTable
    scales: Scales | None
    origin: Origin | None
    only_above: float | None
    infinities: Sequence[Origin]

    @property
    def form(self) -> Format | None:
        """The 16-bit format that it computes in."""
        dtype = self.subject.narrow_dtype
        return None if dtype is None else format_of(dtype)

    def is_narrow(self, row: RangeRow) -> bool:
        """Whether a row's numbers flow in 16 bits when the model runs in its precision."""
        name = layer_of(row)
        if not self.trace.outputs or self.form is None:  # it could not be run, or is asked about before it is
            return True
        if name not in self.trace.outputs:  # a parameter that belongs to no module with an output of its own
            return row.kind == "weight gradient"
        return self.trace.outputs[name] in ("float16", "bfloat16")

    def counts(self, row: RangeRow) -> bool:
        """Whether a gradient must survive 16 bits: it flows in them, and is more than rounding.

        A bias that changes nothing, as a key's before a softmax, has a gradient of zero, of which float32 leaves some
        rounding of the sum over its layer's gradients.
        """
        if not self.is_narrow(row):
            return False
        of_layer = self._largest_gradients.get(layer_of(row), 0.0)
        is_rounding = row.name.endswith("bias") and row.histogram.largest < ROUNDING * of_layer
        return not (row.kind == "weight gradient" and is_rounding)

    @cached_property
    def _largest_gradients(self) -> dict[str, float]:
        return {row.name: row.histogram.largest for row in self.rows if row.kind == "activation gradient"}
