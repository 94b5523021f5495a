"""Magnitudes counted by binary exponent and the first four bits of the fraction: what a format would do to them.

A float32's sign aside, its upper 12 bits are its exponent and the first four bits of its fraction. They number 4096
buckets, so one shift finds a number's bucket, and the limits of fp16, bf16 and fp8 lie between two of them: a share is
as exact as the sample, but for fp16's and bf16's overflow, whose limits lie inside the last bucket (which is shared out
in proportion), and for numbers exactly on half of the smallest subnormal (which count as kept). Numbers below 2**-130
count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulus.numerics.formats import Format

__all__ = ["EDGES", "NUM_BUCKETS", "Histogram", "buckets_of"]

NUM_BUCKETS = 4096
SHIFT = 19
FIRST_NONFINITE = 255 << 4


def _lower_edges() -> Any:
    bits = (np.arange(FIRST_NONFINITE + 1, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
    bits[FIRST_NONFINITE] = 2.0**128
    return bits


EDGES = _lower_edges()
"""Where each bucket begins; the last edge is the end of float32."""


def buckets_of(values: Tensor) -> Tensor:
    """The bucket of each value.

    Args:
        values: any floating dtype; float64 beyond float32's range counts as infinite.

    Returns:
        int32, of the same shape.
    """
    return (values.float().view(torch.int32) & 0x7FFFFFFF) >> SHIFT


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """How many numbers there are of each magnitude.

    Args:
        counts: 4096 numbers, by bucket.
        largest: the largest magnitude; of all numbers, also where only a sample was counted.

    `num_counted` numbers were counted; `num_zero` and `num_nonfinite` are of them, and shares are of the other
    `num_nonzero`.
    """

    counts: Any
    largest: float

    num_counted: int = field(init=False)
    num_zero: int = field(init=False)
    num_nonfinite: int = field(init=False)
    num_nonzero: int = field(init=False)

    def __post_init__(self) -> None:
        counted, zero, nonfinite = (
            int(self.counts[which].sum()) for which in (slice(None), slice(1), slice(FIRST_NONFINITE, None))
        )
        for name, value in (
            ("num_counted", counted),
            ("num_zero", zero),
            ("num_nonfinite", nonfinite),
            ("num_nonzero", counted - zero - nonfinite),
        ):
            object.__setattr__(self, name, value)

    def overflows(self, form: Format, scale: float = 1.0) -> bool:
        """Whether the largest of all numbers, times the scale, is beyond a format."""
        return self.largest * scale >= form.overflow_from

    def overflow_ratio(self, form: Format, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that, times the scale, are beyond a format."""
        return self._ratio_below(np.inf, 1.0) - self._ratio_below(form.overflow_from, scale)

    def zeroed_ratio(self, form: Format, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that, times the scale, a format rounds to zero."""
        return self._ratio_below(form.zero_below, scale)

    def subnormal_ratio(self, form: Format, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that, times the scale, keep fewer bits in a format than others."""
        rounds_up = form.smallest_normal - form.zero_below
        return self._ratio_below(rounds_up, scale) - self._ratio_below(form.zero_below, scale)

    def lost_ratio(self, form: Format, scale: float = 1.0) -> float:
        """Share of the sum of magnitudes that, times the scale, a format rounds to zero."""
        magnitudes = self.counts[1:FIRST_NONFINITE] * (EDGES[1:-1] + EDGES[2:]) / 2
        total = magnitudes.sum()
        return float((magnitudes * self._parts_below(form.zero_below / scale)).sum() / total) if total else 0.0

    def quantile(self, ratio: float) -> float:
        """The magnitude below which a share of the nonzero numbers lies, to a bucket; 0 where all are zero."""
        if not self.num_nonzero:
            return 0.0
        below = np.cumsum(self.counts[1:FIRST_NONFINITE])
        return float(EDGES[1 + int(np.searchsorted(below, max(ratio * below[-1], 1)))])

    def exponents(self) -> dict[int, int]:
        """Numbers by the power of two at or below their magnitude; those below 2**-126 count as 2**-127."""
        by_power = self.counts[:FIRST_NONFINITE].reshape(-1, 16).sum(1).copy()
        by_power[0] -= self.num_zero
        return {power - 127: int(count) for power, count in enumerate(by_power) if count}

    def _ratio_below(self, bound: float, scale: float) -> float:
        if not self.num_nonzero:
            return 0.0
        counts = self.counts[1:FIRST_NONFINITE]
        return float((counts * self._parts_below(bound / scale)).sum() / self.num_nonzero)

    def _parts_below(self, bound: float) -> Any:
        """The part of each bucket that lies below a bound; in proportion where the bound is inside."""
        low, high = EDGES[1:-1], EDGES[2:]
        return np.clip((min(bound, EDGES[-1]) - low) / (high - low), 0.0, 1.0)
