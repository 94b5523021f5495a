"""What 16 and 8 bits can hold: where each format ends, where it loses bits, and where it has nothing left."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

import torch

__all__ = ["BF16", "E4M3", "E5M2", "FORMATS", "FP16", "Format", "format_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A floating-point format, by the limits that rounding to nearest gives it.

    Args:
        name: as shown.
        largest: the largest finite number.
        overflow_from: what is at least this becomes infinite; NaN, or the largest number, where there is no infinity.
        smallest_normal: below it, numbers have fewer bits.
        zero_below: what is smaller becomes zero: half of the smallest subnormal.
        num_bits: of a normal number's fraction.
        dtype: torch's.
    """

    name: str
    largest: float
    overflow_from: float
    smallest_normal: float
    zero_below: float
    num_bits: int
    dtype: torch.dtype

    def spacing_at(self, value: float) -> float:
        """The distance between two neighbouring numbers of the format around a value."""
        return float(2.0 ** (frexp(max(abs(value), self.smallest_normal))[1] - 1 - self.num_bits))


FP16 = Format(
    name="fp16",
    largest=65504.0,
    overflow_from=65520.0,
    smallest_normal=2.0**-14,
    zero_below=2.0**-25,
    num_bits=10,
    dtype=torch.float16,
)
BF16 = Format(
    name="bf16",
    largest=(2 - 2**-7) * 2.0**127,
    overflow_from=(2 - 2**-8) * 2.0**127,
    smallest_normal=2.0**-126,
    zero_below=2.0**-134,
    num_bits=7,
    dtype=torch.bfloat16,
)
E4M3 = Format(
    name="e4m3",
    largest=448.0,
    overflow_from=464.0,
    smallest_normal=2.0**-6,
    zero_below=2.0**-10,
    num_bits=3,
    dtype=torch.float8_e4m3fn,
)
E5M2 = Format(
    name="e5m2",
    largest=57344.0,
    overflow_from=61440.0,
    smallest_normal=2.0**-14,
    zero_below=2.0**-17,
    num_bits=2,
    dtype=torch.float8_e5m2,
)

FORMATS = (FP16, BF16, E4M3, E5M2)
"""Source: IEEE 754-2019, and Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1."""


def format_of(dtype: torch.dtype) -> Format | None:
    """The format that a dtype is; None for one of 32 bits or more."""
    return next((known for known in FORMATS if known.dtype == dtype), None)
