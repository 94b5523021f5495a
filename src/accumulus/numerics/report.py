"""`NumericsReport`: what was found, as a value that prints, and turns into JSON or a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accumulus.numerics.advice import Finding
from accumulus.numerics.formats import FORMATS
from accumulus.numerics.payoff import Payoff
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.scales import Scales
from accumulus.numerics.trace import TraceTable
from accumulus.origin import Origin

__all__ = ["NumericsReport", "shares_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NumericsReport:
    """What low precision does to a model's numbers. `print(report)` shows the findings, or that there are none.

    Args:
        precision: what was asked about.
        device: where it ran.
        num_steps: steps whose ranges were counted.
        loss_scale: the present one.
        rows: magnitudes by module, at loss scale 1 and without rounding.
        scales: the window of loss scales for fp16 (for bf16, where that is computed in); None without gradients in it.
        origin: of the first non-finite value; None where all was finite.
        only_above: the present loss scale, where everything is finite at the chosen one.
        trace: which operator ran in which dtype.
        payoff: what the precision gains; None where that was not measured.
        findings: at most ten, worst first.
        notes: how it was measured, in sentences.
    """

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

    def __str__(self) -> str:
        from accumulus.numerics.text import to_text

        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain values, which JSON takes.

        Returns:
            Findings, ranges with their histograms and shares, scales, dtypes, payoff and notes.
        """
        return {
            "precision": self.precision,
            "device": self.device,
            "num_steps": self.num_steps,
            "loss_scale": self.loss_scale,
            "findings": [finding.to_dict() for finding in self.findings],
            "ranges": [row_to_dict(row, self.loss_scale) for row in self.rows],
            "scales": None if self.scales is None else self.scales.to_dict(),
            "origin": None if self.origin is None else self.origin.to_dict(),
            "only_above": self.only_above,
            "dtypes": self.trace.to_dict(),
            "payoff": None if self.payoff is None else self.payoff.to_dict(),
            "notes": list(self.notes),
        }

    def to_page(self) -> str:
        """The report as one HTML page that needs nothing from anywhere: pictures, tables and advice.

        Returns:
            HTML.

        Raises:
            UnsupportedError: the drawing packages of the extra "plot" are not installed.
        """
        from accumulus.numerics.page import to_page

        return to_page(self)


def shares_of(row: RangeRow, loss_scale: float) -> dict[str, dict[str, float]]:
    """What each format does to a row's numbers: shares of the nonzero ones.

    Args:
        row: at scale 1.
        loss_scale: applied to gradients that flow backward.

    Returns:
        Format to "zeroed", "subnormal" and "overflow"; for gradients "fp16" is without and "fp16 scaled" with the scale.
    """
    forms = [(form.name, form, 1.0) for form in FORMATS]
    if row.kind.endswith("gradient"):
        forms += [(f"{form.name} scaled", form, loss_scale) for form in FORMATS]
    return {
        name: {
            "zeroed": row.histogram.zeroed_ratio(form, scale),
            "subnormal": row.histogram.subnormal_ratio(form, scale),
            "overflow": row.histogram.overflow_ratio(form, scale),
        }
        for name, form, scale in forms
    }


def row_to_dict(row: RangeRow, loss_scale: float) -> dict[str, Any]:
    """A row as plain values."""
    histogram = row.histogram
    result: dict[str, Any] = {
        "kind": row.kind,
        "name": row.name,
        "largest": histogram.largest if math.isfinite(histogram.largest) else str(histogram.largest),
        "median": histogram.quantile(0.5),
        "num_counted": histogram.num_counted,
        "num_zero": histogram.num_zero,
        "num_nonfinite": histogram.num_nonfinite,
        "exponents": {str(power): count for power, count in histogram.exponents().items()},
        "shares": shares_of(row, loss_scale),
    }
    if row.kind == "update":
        changed = max(histogram.num_nonzero, 1)
        result["still_in_bf16"], result["still_in_fp16"] = (number / changed for number in row.num_still)
    return result
