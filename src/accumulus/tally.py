"""Sums and weights of one loss term or metric over a window, added up without making the host wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.host import Flag, Scalar
from accumulus.types import Weight

__all__ = ["Tally", "is_zero", "power_of_two"]


@dataclass(slots=True)
class Tally:
    """The sums of one loss term or metric; lists, because one stack at the end is cheaper than many sums."""

    sums: list[Scalar] = field(default_factory=list)  # of the micro-batches whose weight is not known to be zero
    weights: list[Weight] = field(default_factory=list)  # of the same micro-batches
    seed: Tensor | None = None  # of a loss term: what its sums run backward from
    share: Scalar = 1.0  # of a loss term: W_base / W_term, by which its seed is multiplied

    def add(self, value: Scalar, weight: Weight) -> None:
        """Adds one micro-batch."""
        self.sums.append(value)
        self.weights.append(weight)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and CPU tensors for what lay on a device; the seed is made anew."""
        lists = {name: [host.to_cpu(value) for value in getattr(self, name)] for name in ("sums", "weights")}
        return {**lists, "share": host.to_cpu(self.share)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Tally:
        """The tally that was saved."""
        sums, weights = ([host.to_device(value, device) for value in state[name]] for name in ("sums", "weights"))
        return cls(sums, weights, share=host.to_device(state["share"], device))

    def total_weight(self) -> Weight:
        """The sum of the weights: a number if all of them are."""
        return _stack(self.weights).sum() if _any_on_device(self.weights) else sum(self.weights)

    def total(self) -> Scalar:
        """The sum of the sums, in float64 where the device has it. What has weight zero counts for nothing."""
        if not _any_on_device(self.sums):
            return sum(self.sums)
        sums = _stack(self.sums)
        if _any_on_device(self.weights):
            sums = torch.where(_stack(self.weights) == 0, 0, sums)
        return sums.sum()

    def mean(self) -> Scalar:
        """The weighted mean; NaN where no weight is known to be above zero."""
        return self.total() / self.total_weight() if self.sums else math.nan

    def is_valid(self) -> Flag:
        """Whether no weight is negative, NaN or infinite; those on the host were checked when they came."""
        if not _any_on_device(self.weights):
            return True
        weights = _stack(self.weights)
        return ((weights >= 0) & weights.isfinite()).all()


def power_of_two(weight: Weight) -> Scalar:
    """The largest power of two that is not above a weight; 1 for what has none. A tensor stays on its device."""
    if isinstance(weight, Tensor):
        weight = _stack([weight])
        if weight.device.type == "mps":  # has no frexp
            floor = torch.exp2(torch.floor(torch.log2(weight)))
        else:  # frexp's mantissa is exact, so the quotient is an exact power of two
            floor = weight / torch.frexp(weight).mantissa / 2
        return torch.where((weight > 0) & weight.isfinite(), floor, 1.0).reshape(())
    mantissa, exponent = math.frexp(weight)
    return math.ldexp(1.0, exponent - 1) if mantissa else 1.0


def is_zero(weight: Weight) -> bool:
    """Whether a weight is known on the host to be zero."""
    return not isinstance(weight, Tensor) and weight == 0


def _any_on_device(values: list[Scalar]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _stack(values: list[Scalar]) -> Tensor:
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.stack([host.as_wide(value, like) for value in values])
