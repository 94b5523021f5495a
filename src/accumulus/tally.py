"""Sums and weights of one loss term or metric over a window, added up without making the host wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accumulus.types import Weight

__all__ = ["Tally", "is_zero", "number_like", "power_of_two", "wide"]


@dataclass(slots=True)
class Tally:
    """The running sums of one loss term or metric; lists, because one stack at the end is cheaper than many sums."""

    sums: list[Tensor]  # of the micro-batches whose weight is not known to be zero
    weights: list[Weight]  # of the same micro-batches
    share: float | Tensor = 1.0  # of a loss term: W_base / W_term, by which its seed is multiplied

    def add(self, value: Tensor, weight: Weight) -> None:
        """Adds one micro-batch."""
        self.sums.append(value)
        self.weights.append(weight)

    def total_weight(self) -> Weight:
        """The sum of the weights: a number if all of them are."""
        return self._stacked_weights().sum() if self._on_device() else sum(self.weights)

    def total(self) -> Tensor:
        """The sum of the sums, in float64 where the device has it. What has weight zero counts for nothing."""
        if len(self.sums) == 1:
            return wide(self.sums[0])
        values = wide(torch.stack(self.sums))
        if self._on_device():
            values = torch.where(self._stacked_weights() == 0, 0, values)
        return values.sum()

    def is_valid(self) -> bool | Tensor:
        """Whether no weight on a device is negative, NaN or infinite; those on the host were checked when they came."""
        if not self._on_device():
            return True
        weights = self._stacked_weights()
        return ((weights >= 0) & weights.isfinite()).all()

    def _on_device(self) -> bool:
        return any(isinstance(weight, Tensor) for weight in self.weights)

    def _stacked_weights(self) -> Tensor:
        like = self.sums[0]
        return torch.stack([wide(w) if isinstance(w, Tensor) else number_like(w, like) for w in self.weights])


def power_of_two(weight: Weight) -> float | Tensor:
    """The power of two nearest to a weight from above; 1 for what has none. A tensor stays on its device."""
    if isinstance(weight, Tensor):
        # frexp's mantissa is exact, so the quotient is an exact power of two.
        return torch.where((weight > 0) & weight.isfinite(), weight / torch.frexp(weight).mantissa, 1.0)
    mantissa, exponent = math.frexp(weight)
    return math.ldexp(1.0, exponent) if mantissa else 1.0


def is_zero(weight: Weight) -> bool:
    """Whether a weight is known on the host to be zero."""
    return not isinstance(weight, Tensor) and weight == 0


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64, where its device has that, and without dimensions where it has one element."""
    tensor = tensor.reshape(()) if tensor.numel() == 1 else tensor
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def number_like(number: float, like: Tensor) -> Tensor:
    """A number as a tensor on the other's device, written there without a copy."""
    return torch.full(
        (), number, dtype=torch.float32 if like.device.type == "mps" else torch.float64, device=like.device
    )
