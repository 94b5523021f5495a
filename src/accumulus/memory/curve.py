"""`MemoryEstimate` and `MemoryCurve`: peak bytes by part, for one micro-batch size and for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from accumulus.errors import MemoryLimitError, SplitError
from accumulus.memory.live import PARTS, PHASES, Timeline
from accumulus.types import describe

__all__ = ["MemoryCurve", "MemoryEstimate", "Method"]

Method: TypeAlias = Literal["fake", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The most memory that a step takes at a time, and what for.

    Args:
        peak_bytes: on the device where the model lies.
        parts: the bytes of "parameters" (with buffers), "gradients", "optimizer state", "cast weights" (autocast's
            low-precision copies), "activations" (made in the forward pass) and "temporary" (made in the backward pass
            or the update, and none of the others) at the peak; they sum to `peak_bytes`.
        phase: where the peak lies: "forward", "backward" or "update".
        microbatch: samples per micro-batch.
        precision: its name; for "auto" the one that was chosen.
        method: "fake": from a run on fake tensors. "measured": from real ones, because fake ones would not do.
        note: empty, or a sentence that says why it had to be measured, or what the estimate leaves open.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    phase: str
    microbatch: int
    precision: str
    method: Method
    note: str = ""


class MemoryCurve:
    """Peak memory as a function of the micro-batch size, from runs of a few sizes. Made by `curve`.

    Each moment of a step holds bytes that grow with the micro-batch, as a rule in proportion; the peak is the highest
    of these lines, so it is piecewise linear. Where a model makes tensors of (samples x samples), as contrastive losses
    do, three runs give their parabolas just as exactly.

    Args:
        timelines: live bytes over a step, by micro-batch size.
        precision: name of the precision they were taken in.
        method: "fake" or "measured".
        note: empty, or a sentence on how they were taken.
    """

    def __init__(self, timelines: Mapping[int, Timeline], *, precision: str, method: Method, note: str = "") -> None:
        self._sizes = sorted(timelines)
        runs = [timelines[size] for size in self._sizes]
        self._is_aligned = all(np.array_equal(run.events, runs[0].events) for run in runs)
        self._moments, self._phases = _highest(runs) if self._is_aligned else _peaks_by_phase(runs)
        self.precision = precision
        self.method: Method = method
        self.note = note

    def __repr__(self) -> str:
        return f"MemoryCurve(sizes={self._sizes}, precision={self.precision!r}, method={self.method!r})"

    def at(self, microbatch: int) -> MemoryEstimate:
        """The estimate for one size.

        Args:
            microbatch: samples per micro-batch, at least 1.

        Returns:
            As `estimate` would give.

        Raises:
            SplitError: `microbatch` is not an integer of at least 1.

        Cost:
            About a millisecond.
        """
        size = positive(microbatch, "microbatch")
        table = self._table(size)
        moment = int(table.sum(axis=1).argmax())
        parts = dict(zip(PARTS, table[moment].tolist(), strict=True))
        return MemoryEstimate(
            peak_bytes=sum(parts.values()),
            parts=parts,
            phase=PHASES[self._phases[moment]],
            microbatch=size,
            precision=self.precision,
            method=self.method,
            note=self.note,
        )

    def largest(self, limit_bytes: int, at_most: int) -> int:
        """The largest micro-batch that fits.

        Args:
            limit_bytes: memory that the whole step may take.
            at_most: the size of the batch, say.

        Returns:
            Samples per micro-batch, at most `at_most`; 0 where not even one sample fits.

        Raises:
            MemoryLimitError: `limit_bytes` is negative or no number.
            SplitError: `at_most` is not an integer of at least 1.
        """
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, (int, float)) or not limit_bytes >= 0:
            raise MemoryLimitError(f"limit_bytes must be a number of bytes, at least 0, not {describe(limit_bytes)}")
        fits, fails = 0, positive(at_most, "at_most") + 1
        while fails - fits > 1:  # the peak does not fall when the micro-batch grows
            middle = (fits + fails) // 2
            if int(self._table(middle).sum(axis=1).max()) <= limit_bytes:
                fits = middle
            else:
                fails = middle
        return fits

    def _table(self, size: int) -> NDArray[np.int64]:
        """Bytes by moment and part, for one size."""
        weights = _polynomial(self._sizes, size) if self._is_aligned else _between(self._sizes, size)
        table = np.tensordot(weights, self._moments, axes=1)
        return np.maximum(np.rint(table), 0).astype(np.int64)


def positive(number: Any, name: str) -> int:
    """The number, if it is an integer of at least 1.

    Raises:
        SplitError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SplitError(f"{name} must be an integer of at least 1, not {describe(number)}")
    return number


def _highest(runs: list[Timeline]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """The moments after which something is freed: the others are never higher than the next one."""
    is_free = runs[0].events < 0
    is_high = ~is_free & np.append(is_free[1:], True)
    return np.stack([run.part_bytes[is_high] for run in runs]).astype(np.float64), runs[0].phases[is_high]


def _peaks_by_phase(runs: list[Timeline]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Of runs whose operators differ, only the highest moment of each phase can be compared."""
    phases = [phase for phase in range(len(PHASES)) if all((run.phases == phase).any() for run in runs)]
    peaks = []
    for run in runs:
        totals = run.part_bytes.sum(axis=1)
        peaks.append([run.part_bytes[np.where(run.phases == phase, totals, -1).argmax()] for phase in phases])
    return np.array(peaks, dtype=np.float64), np.array(phases, dtype=np.int8)


def _polynomial(sizes: list[int], size: int) -> NDArray[np.float64]:
    """How much each run counts (Lagrange): exact where bytes are a polynomial in the size of as low a degree."""
    return np.array(
        [np.prod([(size - other) / (own - other) for other in sizes if other != own]) for own in sizes], dtype=float
    )


def _between(sizes: list[int], size: int) -> NDArray[np.float64]:
    """How much each run counts on straight lines between neighbours, and beyond the ends on the last ones."""
    weights = np.zeros(len(sizes))
    if len(sizes) == 1:
        weights[0] = size / sizes[0]
        return weights
    right = min(max(int(np.searchsorted(sizes, size)), 1), len(sizes) - 1)
    share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    weights[right - 1], weights[right] = 1 - share, share
    return weights
