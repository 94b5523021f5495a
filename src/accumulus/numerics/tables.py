"""The cells of a report's tables: the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accumulus.numerics.formats import BF16, E4M3, E5M2, FP16
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.trace import Cast, OperatorUse
from accumulus.units import format_bytes

__all__ = ["DTYPE_HEADS", "RANGE_HEADS", "cast_cells", "describe_updates", "percent", "range_cells", "use_cells"]

RANGE_HEADS = (
    "layer",
    "of",
    "median",
    "largest",
    "fp16: zero",
    "subnormal",
    "beyond",
    "fp16 scaled: zero",
    "beyond",
    "bf16: zero",
    "e4m3: zero",
    "beyond",
    "e5m2: zero",
    "beyond",
    "still in bf16",
)
DTYPE_HEADS = ("module", "pass", "operator", "from", "to", "calls", "bytes")


def percent(ratio: float) -> str:
    """A share in a few letters; nothing at all is empty."""
    if ratio <= 0:
        return ""
    return "<0.1%" if ratio < 0.001 else f"{100 * ratio:.3g}%"


def range_cells(row: RangeRow, loss_scale: float) -> list[str]:
    """A row's cells, as `RANGE_HEADS` names them."""
    histogram = row.histogram
    beyond = {form: "some" if histogram.overflows(form) else "" for form in (FP16, E4M3, E5M2)}
    scaled = ["", ""]
    if row.kind.endswith("gradient"):
        scaled = [
            percent(histogram.zeroed_ratio(FP16, loss_scale)),
            percent(histogram.overflow_ratio(FP16, loss_scale))
            or ("some" if histogram.overflows(FP16, loss_scale) else ""),
        ]
    return [
        row.name,
        row.kind,
        f"{histogram.quantile(0.5):.2g}",
        f"{histogram.largest:.3g}",
        percent(histogram.zeroed_ratio(FP16)),
        percent(histogram.subnormal_ratio(FP16)),
        percent(histogram.overflow_ratio(FP16)) or beyond[FP16],
        *scaled,
        percent(histogram.zeroed_ratio(BF16)),
        percent(histogram.zeroed_ratio(E4M3)),
        percent(histogram.overflow_ratio(E4M3)) or beyond[E4M3],
        percent(histogram.zeroed_ratio(E5M2)),
        percent(histogram.overflow_ratio(E5M2)) or beyond[E5M2],
        percent(row.num_still[0] / max(histogram.num_nonzero, 1)) if row.kind == "update" else "",
    ]


def describe_updates(rows: Sequence[RangeRow]) -> str:
    """How much of the updates 16-bit weights would keep, in a sentence; empty where no update was seen."""
    updates = [row for row in rows if row.kind == "update" and row.histogram.num_nonzero]
    if not updates:
        return ""
    changed = sum(row.histogram.num_nonzero for row in updates)
    still = sum(row.num_still[0] for row in updates) / changed
    worst = max(updates, key=lambda row: row.still_ratio(torch.bfloat16))
    return (
        f"updates: if weights were held in bf16, {percent(still) or 'none'} of the changes would round to nothing"
        + (f", {percent(worst.still_ratio(torch.bfloat16))} of those of {worst.name}" if still else "")
    )


def use_cells(use: OperatorUse) -> list[str]:
    """An operator's cells, as `DTYPE_HEADS` names them."""
    return [
        use.module or "the loss function",
        "backward" if use.is_backward else "forward",
        use.operator,
        ", ".join(use.inputs),
        use.output,
        str(use.count),
        format_bytes(use.num_bytes),
    ]


def cast_cells(cast: Cast) -> list[str]:
    """A cast's cells, as `DTYPE_HEADS` names them."""
    return [
        cast.module or "the loss function",
        "backward" if cast.is_backward else "forward",
        "cast",
        cast.source,
        cast.target,
        str(cast.count),
        format_bytes(cast.num_bytes),
    ]
