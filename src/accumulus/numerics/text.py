"""A report as text for a terminal."""

from __future__ import annotations

from accumulus.numerics.result import Diagnosis
from accumulus.numerics.tables import describe_updates

__all__ = ["to_text"]


def to_text(report: Diagnosis) -> str:
    """The findings, the loss scale and the payoff, as lines."""
    head = f"numerics in {report.precision} on {report.device}, {report.steps}: "
    count = len(report.findings)
    lines = [head + (f"{count} finding{'s' if count > 1 else ''}, worst first" if count else "no finding")]
    lines += [f"{number}. {finding}" for number, finding in enumerate(report.findings, 1)]
    if report.scales is not None:
        lines.append(f"loss scale: {report.scales}")
    lines += [text] if (text := describe_updates(report.rows)) else []
    if report.payoff is not None:
        lines.append(str(report.payoff))
    return "\n".join([*lines, *report.notes])
