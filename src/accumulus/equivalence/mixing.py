"""Which modules let one sample see another: each sample is changed alone, and what changes elsewhere is looked at."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from accumulus import pytree
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.trace import LOSS_FUNCTION, Call, Trace, changed, fits, labelled, run_traced
from accumulus.errors import BatchError

__all__ = ["Mixing", "find_mixing", "perturbed", "probe_rows", "varying"]

NUM_PROBES = (5, 4, 3, 2)


@dataclass(frozen=True)
class Mixing:
    """What was found about one forward pass of a few samples.

    Args:
        modules: paths of the modules that mix, in the order in which they ran.
        shown: the same for people; holds the loss function too where it mixes before it calls the model.
        shares: of each, how much of its output depends on more than one sample.
        comparing: modules that return a table of samples against samples.
    """

    modules: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    comparing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shown)


def probe_rows(lab: Lab) -> list[int]:
    """A few samples of the batch: enough to tell them apart, and few enough to be cheap."""
    return spaced(lab.num_samples, next((n for n in NUM_PROBES if n <= lab.num_samples), 1))


def spaced(num_samples: int, count: int) -> list[int]:
    """Some places of a batch, as far from each other as can be: neighbours are often alike."""
    return [index * num_samples // count for index in range(count)]


def with_one_changed(lab: Lab, rows: Sequence[int]) -> list[Any] | None:
    """The micro-batch of some samples, once for each of them with that one changed.

    Args:
        lab: whose batch it is.
        rows: the samples, at least two.

    Returns:
        Micro-batches; None where samples can be changed neither in the micro-batch nor before it is collated.
    """
    part = lab.part(rows)
    try:
        if pytree.sliceable(part).length == len(rows):
            return [perturbed(part, row) for row in range(len(rows))]
    except BatchError:
        pass
    if lab.collate is None:
        return None
    found = []
    for place in range(len(rows)):
        samples = [lab.batch[row] for row in rows]
        samples[place] = pytree.map_tensors(_other_values, samples[place])
        with lab.conditions():
            found.append(lab.collated(samples))
    return found


def _other_values(value: Tensor) -> Tensor:
    """A sample's tensor with other values, its size as before: collations of graphs lay samples end to end."""
    if not value.is_floating_point():
        return value.flip(0) if value.ndim else value
    generator = torch.Generator().manual_seed(0)
    return value + 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)


def perturbed(part: Any, row: int) -> Any:
    """A micro-batch in which one sample is another: the next one, and a little noise where it holds real numbers.

    Args:
        part: a micro-batch of several samples.
        row: the sample.

    Raises:
        BatchError: the micro-batch is no tree that has rows.
    """
    tree = pytree.sliceable(part)
    other = (row + 1) % tree.length
    return tree.rebuild(
        iter([_other_row(leaf.value, row, other) if leaf.rows == tree.length else leaf.value for leaf in tree.leaves])
    )


def _other_row(value: Any, row: int, other: int) -> Any:
    if isinstance(value, Tensor):
        made = value.clone()
        made[row] = moved_row(value, row, other)
        return made
    if isinstance(value, np.ndarray):
        made_array = value.copy()
        made_array[row] = value[other]
        return made_array
    items = list(value)
    items[row] = items[other]
    return type(value)(items)


def moved_row(value: Tensor, row: int, other: int) -> Tensor:
    """Values for one sample that are likely, and not its own."""
    if not value.is_floating_point() or bool(((value == 0) | (value == 1)).all()):
        return value[other].clone()
    generator = torch.Generator().manual_seed(row)
    noise = torch.rand(value[row].shape, generator=generator, dtype=torch.float64) - 0.5
    size = value.std() if value.numel() > 1 and bool(value.std() > 0) else value.abs().mean() + 1e-3
    return value[other] + 0.2 * size * noise.to(value)


def find_mixing(lab: Lab, rows: Sequence[int]) -> Mixing | None:
    """Which modules mix samples.

    Args:
        lab: where to run.
        rows: the samples to look at, at least two.

    Returns:
        The modules; None where the experiment cannot be made: the micro-batch has no rows, or the model takes another
        way for every sample.

    Cost:
        As many forward passes of these samples as there are, and two.
    """
    variants = with_one_changed(lab, rows)
    if variants is None:
        return None
    run = functools.partial(_forward, lab)
    base = run(lab.part(rows))
    larger = run(lab.part([*rows, rows[0]]))
    counts = _Counts(base)
    for variant in variants:
        if not counts.add(run(variant)):
            return None
    return _judge(base, counts, varying(base, larger), _alone(lab, base, larger, counts))


def _forward(lab: Lab, part: Any) -> Trace:
    return run_traced(lab, lab.fresh(), lab.cast(part))


def varying(base: Trace, larger: Trace) -> dict[tuple[int, int], tuple[int, ...]]:
    """Which dimensions of which outputs grow with the number of samples, by call and place in what it returned.

    Args:
        base: a run.
        larger: a run with one sample more.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    if not fits(base, larger):
        return found
    for call, other in zip(base.calls, larger.calls, strict=True):
        for place, ((_, one), (_, two)) in enumerate(zip(call.outputs, other.outputs, strict=False)):
            if one.ndim == two.ndim:
                grown = [d for d in range(one.ndim) if two.shape[d] != one.shape[d]]
                found[call.index, place] = tuple(grown)
    return found


def _alone(lab: Lab, base: Trace, larger: Trace, counts: _Counts) -> dict[int, float]:
    """Mixing of single layers that got mixed samples already: each runs by itself on what it got.

    Returns:
        The share of its output that depends on more than one row of its input, by call.
    """
    if not fits(base, larger):
        return {}
    shares: dict[int, float] = {}
    parents = {call.parent for call in base.calls}
    modules = dict(lab.fresh().model.named_modules())
    for call, other in zip(base.calls, larger.calls, strict=True):
        if _is_packed(call.arguments):  # step by step, not sample by sample: its rows are no samples
            continue
        if call.index in parents or not any(_shared(count) > 0 for count in counts.inputs[call.index]):
            continue
        rows = [_grown(one, two) for one, two in zip(call.inputs, other.inputs, strict=False)]
        with lab.conditions(), torch.no_grad():
            share = _share_alone(modules[call.name], call, rows)
        if share > 0:
            shares[call.index] = share
    return shares


def _is_packed(tree: Any) -> bool:
    if isinstance(tree, PackedSequence):
        return True
    return isinstance(tree, (tuple, list, dict)) and any(
        map(_is_packed, tree.values() if isinstance(tree, dict) else tree)
    )


def _grown(one: Tensor, two: Tensor) -> tuple[int, int] | None:
    """The first dimension that grew with one sample more, and how many entries a sample has there."""
    if one.ndim != two.ndim:
        return None
    pairs = enumerate(zip(one.shape, two.shape, strict=True))
    return next(((d, large - small) for d, (small, large) in pairs if large > small), None)


def _share_alone(module: Any, call: Call, rows: Sequence[tuple[int, int] | None]) -> float:
    def run(row: int | None) -> list[Tensor]:
        places = itertools.count()

        def moved(tensor: Tensor) -> Tensor:
            where = rows[place] if (place := next(places)) < len(rows) else None
            if row is None or where is None or not tensor.is_floating_point():
                return tensor.clone()
            dimension, size = where
            made = tensor.clone()
            piece = made.narrow(dimension, row * size, size)
            piece.copy_(made.narrow(dimension, (row + 1) * size, size) + 0.1)
            return made

        args, words = pytree.map_tensors(moved, call.arguments)
        return [tensor for _, tensor in labelled(copy.deepcopy(module)(*args, **words))]

    before, first, second = run(None), run(0), run(1)
    shared = 0.0
    for one, two, three in zip(before, first, second, strict=True):
        masks = changed(one, two), changed(one, three)
        if one.ndim and masks[0] is not None and masks[1] is not None and one.numel():
            shared = max(shared, float((masks[0] & masks[1]).double().mean()))
    return shared


class _Counts:
    """How many of the samples each element depends on."""

    def __init__(self, base: Trace) -> None:
        self._base = base
        zeros = functools.partial(torch.zeros_like, dtype=torch.uint8)
        self.inputs: list[list[Tensor | None]] = [[zeros(tensor) for tensor in call.inputs] for call in base.calls]
        self.outputs: list[list[Tensor | None]] = [[zeros(t) for _, t in call.outputs] for call in base.calls]

    def add(self, other: Trace) -> bool:
        """Counts what one changed sample changed; False where the calls cannot be compared."""
        if not fits(self._base, other):
            return False
        for call, now in zip(self._base.calls, other.calls, strict=True):
            _count(self.inputs[call.index], call.inputs, now.inputs)
            _count(self.outputs[call.index], [t for _, t in call.outputs], [t for _, t in now.outputs])
        return True


def _count(counts: list[Tensor | None], before: list[Tensor], now: list[Tensor]) -> None:
    for place, one in enumerate(before):
        count = counts[place]
        mask = changed(one, now[place]) if place < len(now) else None
        counts[place] = None if mask is None or count is None else count + mask.to(torch.uint8)


def _shared(count: Tensor | None) -> float:
    """The share of elements that depend on more than one sample."""
    return 0.0 if count is None or not count.numel() else float((count > 1).double().mean())


def _judge(
    base: Trace, counts: _Counts, per_sample: dict[tuple[int, int], tuple[int, ...]], alone: dict[int, float]
) -> Mixing:
    shares: dict[int, float] = {}  # of the calls that return mixed samples and got unmixed ones
    tables: dict[int, float] = {}  # of those that return samples against samples
    taken = [any(_shared(count) > 0 for count in found) for found in counts.inputs]
    for call in base.calls:
        for place, count in enumerate(counts.outputs[call.index]):
            share, grown = _shared(count), per_sample.get((call.index, place), ())
            if share > 0 and grown and not taken[call.index]:
                found = tables if len(grown) > 1 else shares
                found[call.index] = max(share, found.get(call.index, 0.0))
    first_to_mix = _innermost(base, shares, taken)
    before = _mixed_before(base, shares | tables, taken)
    later = {index: share for index, share in alone.items() if per_sample.get((index, 0))}
    shares |= later
    blamed = [call for call in base.calls if call in first_to_mix or call.index in later]
    names = dict.fromkeys((call.name, call.shown) for call in blamed)
    strength = [max(shares[call.index] for call in blamed if call.name == name) for name, _ in names]
    return Mixing(
        tuple(name for name, _ in names),
        ((LOSS_FUNCTION,) if before else ()) + tuple(text for _, text in names),
        ((1.0,) if before else ()) + tuple(strength),
        tuple(dict.fromkeys(call.shown for call in _innermost(base, tables, taken))),
    )


def _innermost(base: Trace, shares: dict[int, float], taken: list[bool]) -> list[Call]:
    return [call for call in base.calls if call.index in shares and not _is_explained(base, call, shares, taken)]


def _is_explained(base: Trace, call: Call, shares: dict[int, float], taken: list[bool]) -> bool:
    """Whether modules inside a module explain its mixing; not where something is mixed before the first of them."""
    inside = list(base.inside(call.index))
    guilty = [inner.index for inner in inside if inner.index in shares]
    first_taken = min((inner.index for inner in inside if taken[inner.index]), default=len(base.calls))
    return bool(guilty) and min(guilty) < first_taken


def _mixed_before(base: Trace, shares: dict[int, float], taken: list[bool]) -> bool:
    """Whether the model got mixed samples before any module mixed."""
    first = next((call.index for call in base.calls if call.parent == -1 and taken[call.index]), None)
    return first is not None and not any(index < first for index in shares)
