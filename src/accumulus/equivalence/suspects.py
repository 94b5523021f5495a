"""Experiments on the model alone: does it give the same twice, does it remember, does it look at padding?"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from accumulus import pytree
from accumulus.equivalence.compare import relative
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.runs import Piece, run_piece
from accumulus.equivalence.trace import (
    COLLATION,
    LOSS_FUNCTION,
    Call,
    Trace,
    changed,
    first_differences,
    fits,
    no_trace,
    run_traced,
    watched_draws,
)
from accumulus.errors import BatchError, SplitError
from accumulus.grouping import ByTokens
from accumulus.microbatch import Microbatches, Split
from accumulus.terms import as_terms

__all__ = ["Found", "find_draws", "find_noise", "find_padding", "find_state"]

MAX_LENGTHS = 64
MAX_PAIRS = 4


@dataclass(frozen=True)
class Found:
    """Where a suspect was seen, and by how much the loss or its gradient moved."""

    where: tuple[str, ...]
    error: float


def find_draws(lab: Lab) -> tuple[str, ...]:
    """Who draws random numbers in a forward pass of the whole batch.

    Args:
        lab: with its own draws.
    """
    drawn: list[str] = []
    with watched_draws(lambda: drawn.append(COLLATION)):
        part = lab.part()
    return tuple(drawn[:1] + run_traced(lab, lab.fresh(), part, watch_draws=True).draws)


def find_noise(lab: Lab, rows: Sequence[int], tolerance: float) -> Found | None:
    """Whether two equal runs with equal random states differ.

    Args:
        lab: where to run.
        rows: samples to look at.
        tolerance: up to where it is rounding.
    """
    one, two = (run_traced(lab, lab.fresh(), lab.part(rows)) for _ in range(2))
    return _compare(one, two, len(rows), tolerance)


def find_state(lab: Lab, rows: Sequence[int], tolerance: float) -> Found | None:
    """Whether a second forward pass of the same samples differs from the first: something was carried over.

    Args:
        lab: where to run.
        rows: samples to look at.
        tolerance: up to where it is rounding.
    """
    copied = lab.fresh()
    one = run_traced(lab, copied, lab.part(rows))
    two = run_traced(lab, copied, lab.part(rows))
    return _compare(one, two, len(rows), tolerance)


def changed_buffers(lab: Lab, rows: Sequence[int]) -> tuple[str, ...]:
    """The saved buffers that a forward pass changes.

    Args:
        lab: where to run.
        rows: samples.
    """
    copied = lab.fresh()
    before = {name: buffer.detach().clone() for name, buffer in copied.buffers().items()}
    run_traced(lab, copied, lab.part(rows))
    after = copied.buffers()
    return tuple(name for name, buffer in before.items() if relative(after[name], buffer) > 0)


def _compare(one: Trace, two: Trace, num_samples: int, tolerance: float) -> Found | None:
    error = _loss_change(one, two, num_samples)
    culprits = first_differences(one, two)
    if error <= tolerance and not culprits:
        return None
    where = tuple(dict.fromkeys(call.shown for call in culprits)) or (LOSS_FUNCTION,)
    if not fits(one, two):
        where = ("the order of calls",)
    return Found(where, error)


def _loss_change(one: Trace, two: Trace, num_samples: int) -> float:
    first, second = (
        [float(loss.sum.detach()) / float(loss.weight or 1) for _, loss in as_terms(trace.returned, num_samples)]
        for trace in (one, two)
    )
    if len(first) != len(second):
        return math.inf
    size = max((abs(value) for value in first), default=0.0) or 1.0
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a == a or b == b]  # a mean over nothing is NaN
    changes = [abs(a - b) / size for a, b in pairs]
    return max((math.inf if change != change else change for change in changes), default=0.0)


def find_padding(lab: Lab, rules: Sequence[Split], tolerance: float) -> Found | None:
    """Whether a sample's result depends on how far it is padded.

    Args:
        lab: where to run.
        rules: the splits, among which one may trim padding off.
        tolerance: up to where it is rounding.

    Returns:
        None where it does not, or nothing is padded differently in any split.
    """
    pairs = _collated_pairs(lab) if lab.collate is not None else _trimmed_pairs(lab, rules)
    for short, padded in pairs:
        error = no_trace(functools.partial(_padding_error, lab, short, padded))
        if error is None:  # too short to learn from, or even to run
            continue
        if error <= tolerance:
            return None
        one, two = (run_traced(lab, lab.fresh(), lab.cast(part)) for part in (short, padded))
        culprits = _first_longer(one, two)
        return Found(tuple(dict.fromkeys(call.shown for call in culprits)) or (LOSS_FUNCTION,), error)
    return None


def _padding_error(lab: Lab, short: Any, padded: Any) -> float | None:
    """How far the results of a sample lie apart; None where they are not finite."""
    found = [run_piece(lab, part, 1) for part in (short, padded)]
    if any(not piece.vector().isfinite().all() for pieces in found for piece in pieces.values()):
        return None
    return max(_piece_error(one, two) for one, two in zip(*(pieces.values() for pieces in found), strict=True))


def _piece_error(one: Piece, two: Piece) -> float:
    return relative(one.vector(), two.vector())


def _collated_pairs(lab: Lab) -> Iterator[tuple[Any, Any]]:
    """The shortest samples, each as its own micro-batch, and as it is beside the longest."""
    sizes = [pytree.num_elements(lab.part([row])) for row in range(min(lab.num_samples, MAX_LENGTHS))]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    for row in [row for row in order if sizes[row] < sizes[order[-1]]][:MAX_PAIRS]:
        try:
            padded, _ = pytree.sliceable(lab.part([row, order[-1]])).cut([1, 1])
        except (BatchError, ValueError):
            return
        yield lab.part([row]), lab.cast(padded)


def _trimmed_pairs(lab: Lab, rules: Sequence[Split]) -> Iterator[tuple[Any, Any]]:
    """The shortest samples, each as `by_tokens` trims it, and as it stands in the batch."""
    rule = next((rule for rule in rules if isinstance(rule, ByTokens)), None)
    if rule is None:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that every sample is longer than one token
            parts = Microbatches(lab.cast(lab.batch), replace(rule, max_tokens=1), lab.device, collate=None)
        pieces = [part for part, _ in parts]
    except (SplitError, BatchError):
        return
    for piece, row in list(zip(pieces, parts.order or (), strict=False))[: -MAX_PAIRS - 1 : -1]:
        whole = lab.part([row])
        if pytree.num_elements(piece) < pytree.num_elements(whole):
            yield lab.cast(piece), whole


def _first_longer(one: Trace, two: Trace) -> list[Call]:
    """The innermost modules whose results differ where both have some, though what they got does not."""
    if [call.name for call in one.calls] != [call.name for call in two.calls]:
        return []
    culprits: list[Call] = []
    for call, other in zip(reversed(one.calls), reversed(two.calls), strict=True):
        outputs = [[tensor for _, tensor in found.outputs] for found in (call, other)]
        if _alike(call.inputs, other.inputs) and not _alike(*outputs):
            inside = {inner.index for inner in one.inside(call.index)}
            if not any(found.index in inside for found in culprits):
                culprits.append(call)
    return culprits[::-1]


def _alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    if len(first) != len(second):
        return False
    return all(_agrees(one, two) for one, two in zip(first, second, strict=True))


def _agrees(one: Tensor, two: Tensor) -> bool:
    """Whether the shorter one is the beginning or the end of the longer one, up to rounding."""
    if one.ndim != two.ndim:
        return False
    sizes = [min(pair) for pair in zip(one.shape, two.shape, strict=True)]
    for from_end in (False, True):
        cut = [
            tensor[
                tuple(
                    slice(n - size, n) if from_end else slice(size) for n, size in zip(tensor.shape, sizes, strict=True)
                )
            ]
            for tensor in (one, two)
        ]
        mask = changed(cut[0], cut[1])
        if mask is not None and not bool(mask.any()):
            return True
    return False


def thirds(num_samples: int) -> list[list[int]]:
    """Three uneven groups of samples, fewer where there are fewer samples."""
    cuts = sorted({max(1, num_samples // 2), max(1, num_samples * 5 // 6), num_samples})
    return [list(range(start, stop)) for start, stop in itertools.pairwise([0, *cuts])]


def strides(num_samples: int) -> list[list[int]]:
    """Uneven groups of samples that do not stand beside each other; what thirds hide by chance, these do not."""
    groups = [list(range(0, num_samples, 3)), [row for row in range(num_samples) if row % 3]]
    return [group for group in groups if group]
