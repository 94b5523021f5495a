"""The rows of a plan and which one to choose. Pure arithmetic over curves: no task and no device in here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accumulus.memory import MemoryCurve, MemoryEstimate

SAFE_RATIO = 0.9
"""The share of the memory that a choice may use: allocators round up and fragment, and libraries keep workspaces."""

FITS, TIGHT, TOO_LARGE = "yes", "tight", "no"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The memory to fit into.

    Args:
        limit_bytes: all of it.
        source: where the number comes from, as a clause.
    """

    limit_bytes: int
    source: str

    @property
    def safe_bytes(self) -> int:
        """The share of it that a choice may use."""
        return int(SAFE_RATIO * self.limit_bytes)

    def verdict(self, peak_bytes: int) -> str:
        """`FITS`, `TIGHT` (into the limit, and beyond its safe share) or `TOO_LARGE`."""
        if peak_bytes > self.limit_bytes:
            return TOO_LARGE
        return TIGHT if peak_bytes > self.safe_bytes else FITS


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a precision and a micro-batch size, and what they need."""

    precision: str
    microbatch: int
    num_microbatches: int
    peak_bytes: int
    parts: Mapping[str, int]
    phase: str
    verdict: str
    limit_ratio: float
    method: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON file holds them."""
        names = ("precision", "microbatch", "num_microbatches", "peak_bytes", "phase", "limit_ratio", "method", "note")
        values = {name: getattr(self, name) for name in names}
        return {**values, "parts": dict(self.parts), "fits": self.verdict != TOO_LARGE, "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The row to choose, and why.

    Args:
        row: one of the table's.
        reasons: why this precision, and why this size.
        command: what to type.
    """

    row: Row
    reasons: tuple[str, ...]
    command: str = ""


def make_rows(curves: Mapping[str, MemoryCurve], limit: Limit, *, batch_size: int, asked: int) -> list[Row]:
    """The rows of every precision, smallest micro-batch first.

    Args:
        curves: peak over micro-batch, by precision.
        limit: the memory to fit into.
        batch_size: samples of a batch.
        asked: one more size to list.

    Returns:
        For each precision: powers of two, the whole batch, `asked`, the largest that fits and the one to choose.
    """
    rows = []
    for precision, curve in curves.items():
        chosen = choose_size(curve, limit.safe_bytes, batch_size=batch_size)
        largest = curve.largest(limit.limit_bytes, batch_size)
        rows += [
            make_row(precision, size, curve.at(size), limit, batch_size=batch_size)
            for size in list_sizes(batch_size, also=(asked, largest, chosen))
        ]
    return rows


def worth_drawing(rows: Sequence[Row]) -> list[Row]:
    """One precision's rows up to the first that does not fit: on one scale, the others would all end at the edge."""
    return list(rows[: 1 + sum(row.verdict != TOO_LARGE for row in rows)])


def list_sizes(batch_size: int, *, also: Iterable[int] = ()) -> list[int]:
    """Micro-batch sizes worth a row.

    Args:
        batch_size: samples of a batch; the largest size.
        also: more sizes; 0 stands for none.

    Returns:
        Powers of two up to the batch size, the batch size itself and `also`, each once, in order.

    Example:
        >>> list_sizes(12, also=(0, 5))
        [1, 2, 4, 5, 8, 12]
    """
    powers = {1 << exponent for exponent in range(batch_size.bit_length())}
    return sorted(powers | {batch_size} | {size for size in also if size > 0})


def choose_size(curve: MemoryCurve, fit_bytes: int, *, batch_size: int) -> int:
    """The micro-batch to choose: the whole batch where it fits, else the largest power of two that does.

    Where a smaller size divides the batch evenly into as many micro-batches, that one: it costs as many passes.

    Args:
        curve: peak over micro-batch.
        fit_bytes: what the peak must not exceed.
        batch_size: samples of a batch.

    Returns:
        A size of at least 1; 0 where not one sample fits.
    """
    largest = curve.largest(fit_bytes, batch_size)
    if largest == 0:
        return 0
    size = batch_size if largest >= batch_size else 1 << (largest.bit_length() - 1)
    num_microbatches = math.ceil(batch_size / size)
    return size if batch_size % num_microbatches else batch_size // num_microbatches


def make_row(precision: str, size: int, estimate: MemoryEstimate, limit: Limit, *, batch_size: int) -> Row:
    """One line of the table.

    Args:
        precision: its name.
        size: samples of a micro-batch.
        estimate: what they need.
        limit: the memory to fit into.
        batch_size: samples of a batch.

    Returns:
        The row.
    """
    return Row(
        precision=precision,
        microbatch=size,
        num_microbatches=math.ceil(batch_size / size),
        peak_bytes=estimate.peak_bytes,
        parts=dict(estimate.parts),
        phase=estimate.phase,
        verdict=limit.verdict(estimate.peak_bytes),
        limit_ratio=estimate.peak_bytes / limit.limit_bytes,
        method=estimate.method,
        note=estimate.note,
    )


def choose(
    rows: Sequence[Row],
    curves: Mapping[str, MemoryCurve],
    limit: Limit,
    *,
    fast: str,
    fast_reason: str,
    batch_size: int,
) -> Choice | None:
    """The row to choose.

    Args:
        rows: of `make_rows`.
        curves: peak over micro-batch, by precision, in the order in which they are listed.
        limit: the memory to fit into.
        fast: the precision that the device does fast.
        fast_reason: why that one.
        batch_size: samples of a batch.

    Returns:
        The device's fast precision with the largest size that is safe; another precision where that one does not
        fit or is not listed; a tight fit where nothing is safe. None where not one sample fits.
    """
    order = sorted(curves, key=lambda name: name != fast)  # stable: the others stay as they were listed
    for fit_bytes in (limit.safe_bytes, limit.limit_bytes):
        for precision in order:
            size = choose_size(curves[precision], fit_bytes, batch_size=batch_size)
            row = next((row for row in rows if (row.precision, row.microbatch) == (precision, size)), None)
            if row is not None:
                why = why_precision(precision, fast=fast, fast_reason=fast_reason, listed=order)
                return Choice(row=row, reasons=(why, why_size(row, batch_size=batch_size)))
    return None


def why_precision(precision: str, *, fast: str, fast_reason: str, listed: Sequence[str]) -> str:
    """A sentence that says why this precision."""
    if precision == fast:
        return f"{fast}: {fast_reason}."
    why = "does not fit safely" if fast in listed else "is not among --precisions"
    return f"{precision}: {fast}, the choice for speed ({fast_reason}), {why}."


def why_size(row: Row, *, batch_size: int) -> str:
    """A sentence that says why this size."""
    if row.verdict == TIGHT:
        return f"{row.microbatch}: it fits, but beyond {SAFE_RATIO:.0%} of the memory; free some before you start."
    if row.microbatch == batch_size:
        return f"{row.microbatch}: the whole batch fits at once."
    if row.microbatch & (row.microbatch - 1):
        return (
            f"{row.microbatch}: equal micro-batches, and as few as with the largest power of two within "
            f"{SAFE_RATIO:.0%} of the memory."
        )
    return f"{row.microbatch}: the largest power of two within {SAFE_RATIO:.0%} of the memory."
