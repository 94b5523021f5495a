"""Two outcomes of one batch, quantity by quantity, with the rounding floor beside."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from accumulus.equivalence.lab import Lab
from accumulus.equivalence.report import Difference
from accumulus.equivalence.runs import Outcome, whole

__all__ = ["LARGEST_ALLOWED", "Floor", "combined_error", "gradient_errors", "measure_floor", "relative"]

EXACT = {torch.float64: 1e-12, torch.float32: 5e-6}
"""The law of the split: how far an accumulated gradient may lie from the whole batch's."""

MARGIN = 30.0
"""A single permutation shows some rounding and not the worst."""

LARGEST_ALLOWED = {torch.float64: 5e-6, torch.float32: 1e-4}
"""Whatever a permutation does: a loss that depends on the samples' order is not rounding. In float64 no more than the
law of float32, in which a part may compute that cannot be widened."""

SMALL_SHARE = 1e-4
"""A parameter's error is judged against its own gradient, or this share of the whole one where its own is smaller:
a gradient that is zero but for rounding has no relative error."""


class Floor:
    """How much rounding alone changes each quantity, and what is allowed because of it.

    Args:
        dtype: what is computed in.
        errors: by name of the quantity.
    """

    def __init__(self, dtype: torch.dtype, errors: Mapping[str, float]) -> None:
        self._errors = errors
        self._exact = EXACT.get(dtype, 5e-6)
        self._largest = LARGEST_ALLOWED.get(dtype, 1e-4)

    def of(self, name: str) -> float:
        """The error that rounding makes."""
        return self._errors.get(name, 0.0)

    def allowed(self, name: str) -> float:
        """Up to where an error is rounding."""
        worst = max((error for error in self._errors.values() if math.isfinite(error)), default=0.0)
        return min(max(self._exact, MARGIN * self.of(name), MARGIN / 10 * worst), self._largest)

    @property
    def tolerance(self) -> float:
        """What is allowed of the gradient as a whole, or of anything made from it."""
        return max(self.allowed("loss"), max((self.allowed(name) for name in self._errors), default=self._exact))


def relative(found: Tensor, right: Tensor, scale: float = 0.0) -> float:
    """The 2-norm of the difference, relative to the right one's norm or the scale, whichever is larger.

    Returns:
        0 where both are zero; infinity where the found one is not finite and the right one is, or shapes differ.
    """
    if found.shape != right.shape:
        return math.inf
    if torch.equal(found, right):
        return 0.0
    difference = float((found.double() - right.double()).norm())
    size = max(float(right.double().norm()), scale)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else math.inf


def gradient_errors(found: Outcome, right: Outcome) -> dict[str, float]:
    """Relative error of every parameter's gradient."""
    scale = SMALL_SHARE * _norm(right.gradients.values())
    return {name: relative(found.gradients[name], gradient, scale) for name, gradient in right.gradients.items()}


def combined_error(found: Outcome, right: Outcome) -> float:
    """Relative error of all gradients as one vector."""
    size = _norm(right.gradients.values())
    difference = _norm([found.gradients[name] - gradient for name, gradient in right.gradients.items()])
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def errors(found: Outcome, right: Outcome) -> dict[tuple[str, str], float]:
    """Relative errors by (what, name)."""
    table: dict[tuple[str, str], float] = {("loss", "loss"): _loss_error(found, right)}
    table |= {("gradient", name): error for name, error in gradient_errors(found, right).items()}
    for name, buffer in right.buffers.items():
        other = found.buffers.get(name)
        is_same = other is not None and torch.equal(other, buffer)
        table["buffer", name] = 0.0 if is_same else math.inf if other is None else relative(other, buffer)
    return table


def measure_floor(lab: Lab, right: Outcome, dtype: torch.dtype) -> Floor:
    """Runs the whole batch twice more, its samples in another order.

    Args:
        lab: to run it in.
        right: the whole batch in its own order.
        dtype: what is computed in.
    """
    worst: dict[str, float] = {}
    for seed in (1, 2):
        order = list(range(lab.num_samples))
        random.Random(seed).shuffle(order)
        for (_, name), error in errors(whole(lab, order), right).items():
            worst[name] = max(worst.get(name, 0.0), error)
    return Floor(dtype, worst)


def differences(outcomes: Mapping[str, Outcome], right: Outcome, floor: Floor) -> list[Difference]:
    """Every quantity's worst split.

    Args:
        outcomes: by name of the split.
        right: the whole batch.
        floor: the rounding.

    Returns:
        The worst first: by how many times what is allowed they are off.
    """
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for split, found in outcomes.items():
        for key, error in errors(found, right).items():
            if key not in worst or error > worst[key][0]:
                worst[key] = (error, split)
    rows = [
        Difference(name=name, what=what, error=error, floor=floor.of(name), allowed=floor.allowed(name), split=split)
        for (what, name), (error, split) in worst.items()
    ]
    return sorted(rows, key=lambda row: (row.is_equal, -row.error))


def _loss_error(found: Outcome, right: Outcome) -> float:
    size = max(abs(right.loss), 1e-3 * _norm(right.gradients.values()))
    difference = abs(found.loss - right.loss)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in gradients))
