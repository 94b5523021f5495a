"""`NumericsReport`: what was found, as a value that prints, and turns into JSON or a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accumulus.numerics.result import Diagnosis
from accumulus.numerics.tables import describe_updates
from accumulus.numerics.text import to_text

__all__ = ["NumericsReport"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NumericsReport(Diagnosis):
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

    def __str__(self) -> str:
        return to_text(self)

    @property
    def updates(self) -> str:
        """How much of the updates bf16 weights would keep, in a sentence; empty where no update was seen."""
        return describe_updates(self.rows)

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
            "ranges": [row.to_dict(self.loss_scale) for row in self.rows],
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
        from accumulus.numerics.page import to_page  # the drawing packages are large

        return to_page(self)
