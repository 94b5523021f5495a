"""How far gradients in a lower precision lie from float64's, whole and in pieces: what the split adds, if anything."""

from __future__ import annotations

from collections.abc import Sequence

from accumulus.equivalence.compare import combined_error, gradient_errors
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.report import PrecisionGap
from accumulus.equivalence.runs import Outcome, accumulated
from accumulus.microbatch import Split, by_count
from accumulus.precision import Precision

__all__ = ["measure_precision"]

NOISE = 2.0**-24
"""Errors below float32's rounding are not told apart."""


def measure_precision(
    lab: Lab, right: Outcome, precision: Precision, rules: Sequence[Split]
) -> tuple[PrecisionGap, list[PrecisionGap]]:
    """Runs the batch whole and split in a precision.

    Args:
        lab: in the model's own dtype, with the draws of the reference.
        right: the whole batch in float64.
        precision: to run in.
        rules: the splits; the worst counts.

    Returns:
        The error of the whole gradient, and of every parameter's, the worst first.
    """
    whole = accumulated(lab, by_count(1), precision=precision.name, weights=right.weights)
    split = max(
        (accumulated(lab, rule, precision=precision.name, weights=right.weights) for rule in rules),
        key=lambda found: combined_error(found, right),
    )
    total = PrecisionGap(
        name="all", whole=combined_error(whole, right), accumulated=max(combined_error(split, right), NOISE)
    )
    before, after = gradient_errors(whole, right), gradient_errors(split, right)
    rows = [PrecisionGap(name=name, whole=before[name], accumulated=after[name]) for name in before]
    return total, sorted(rows, key=lambda row: -row.accumulated)
