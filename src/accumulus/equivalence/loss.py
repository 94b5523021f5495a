"""Whether the loss lets samples meet: it is taken as a function of the model's outputs, and one sample is changed.

A loss that is a weighted mean over samples pulls each sample's output by that sample alone, up to one factor that all
share. Where the pull on one sample depends on another's output, or changes differently with another's data, no
accumulation of micro-batches can give the whole batch's gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumulus import pytree
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.mixing import moved_row, varying, with_one_changed
from accumulus.equivalence.trace import Call, Trace, run_traced
from accumulus.terms import as_terms

__all__ = ["LossView", "Meeting", "find_meeting"]

MAX_DEPTH = 4
NUM_DIRECTIONS = 64
NUM_IN_HALVES = 40
"""Samples of which one half is seen to act on the other; more tell statistics from comparisons better."""


@dataclass(frozen=True)
class Slot:
    """One tensor that goes from the model into the loss, and where its samples lie."""

    call: int
    place: int
    shown: str
    dimension: int
    num_samples: int
    value: Tensor

    def by_sample(self, tensor: Tensor) -> Tensor:
        """The tensor with samples first."""
        moved = tensor.movedim(self.dimension, 0)
        return moved.reshape(self.num_samples, -1, *moved.shape[1:])

    def moved(self, value: Tensor, row: int) -> Tensor:
        """A value with one sample changed."""
        rows = self.by_sample(value).clone()
        rows[row] = moved_row(rows, row, (row + 1) % self.num_samples)
        shape = value.movedim(self.dimension, 0).shape
        return rows.reshape(shape).movedim(0, self.dimension)

    def spread(self, generator: torch.Generator) -> Tensor:
        """The value with every sample changed, so that none are alike."""
        size = self.value.std() if self.value.numel() > 1 else self.value.abs().mean()
        noise = torch.randn(self.value.shape, generator=generator, dtype=torch.float64).to(self.value)
        return self.value + torch.where(size > 0, size, self.value.abs().mean() + 1e-2) * noise

    def wide(self, generator: torch.Generator) -> Tensor:
        """Values so far apart that margins are crossed."""
        noise = torch.randn(self.value.shape, generator=generator, dtype=torch.float64).to(self.value)
        return self.value + 2.0 * noise


@dataclass(frozen=True)
class Meeting:
    """How samples meet in a loss term.

    Args:
        through: what they meet through: "outputs" of the model, or "data" of the batch.
        is_comparison: single samples are compared with single samples; else all go into a few shared numbers.
        where: the tensors that they meet in.
        share: how many of all ordered pairs of samples feel each other.
    """

    through: str
    is_comparison: bool
    where: tuple[str, ...]
    share: float


class LossView:
    """A loss function seen from the model's outputs.

    Args:
        lab: where to run.
        rows: the samples.
        depth: how many levels of modules to look below those that return samples.
    """

    def __init__(self, lab: Lab, rows: Sequence[int], depth: int = 0) -> None:
        self._lab = lab
        self.part, self.num_samples = lab.part(rows), len(rows)
        self.variants = with_one_changed(lab, rows) or []
        base = self._trace(self.part, {})
        grown = varying(base, self._trace(lab.part([*rows, rows[0]]), {}, len(rows) + 1))
        self.base = base
        self.slots = _slots(base, grown, depth, self.num_samples)
        self._calls = {slot.call for slot in self.slots}
        self._held = {index: [t.detach() for _, t in base.calls[index].outputs] for index in self._calls}

    def _trace(self, part: Any, overrides: Any, _: int = 0) -> Trace:
        return run_traced(self._lab, self._lab.fresh(), self._lab.cast(part), overrides=overrides, with_graph=True)

    def terms(self, values: Sequence[Tensor], part: Any) -> dict[str, Tensor]:
        """The mean of every loss term, with a graph to the values.

        Args:
            values: of the slots.
            part: the micro-batch.
        """
        given = {(slot.call, slot.place): value for slot, value in zip(self.slots, values, strict=True)}

        def override(index: int) -> Any:
            def change(returned: Any) -> Any:
                places = itertools.count()
                held = self._held[index]
                return pytree.map_tensors(lambda _: given.get((index, place := next(places)), held[place]), returned)

            return change

        trace = self._trace(part, {index: override(index) for index in self._calls})
        return {name: loss.sum / loss.weight for name, loss in as_terms(trace.returned, self.num_samples)}

    def pulls(self, term: str, values: Sequence[Tensor] | None = None, part: Any = None) -> list[Tensor] | None:
        """The gradient of a term by every slot, samples first; None where there is none.

        Args:
            term: its name.
            values: of the slots; None for what the model returned.
            part: the micro-batch; None for its own.
        """
        leaves = [value.detach().requires_grad_() for value in values or [slot.value for slot in self.slots]]
        root = self.terms(leaves, self.part if part is None else part).get(term)
        if root is None or not root.requires_grad:
            return None
        found = torch.autograd.grad(root, leaves, allow_unused=True)
        pulls = [
            slot.by_sample(torch.zeros_like(leaf) if gradient is None else gradient)
            for slot, leaf, gradient in zip(self.slots, leaves, found, strict=True)
        ]
        return pulls if all(bool(pull.isfinite().all()) for pull in pulls) else None


def _slots(base: Trace, grown: Mapping[tuple[int, int], tuple[int, ...]], depth: int, count: int) -> list[Slot]:
    frontier = [call for call in base.calls if call.parent == -1]
    while True:
        opened = [call for call in frontier if _reduces(call, grown) and _children(base, call)]
        if not opened and depth > 0:
            depth -= 1
            opened = [call for call in frontier if _children(base, call)]
        if not opened:
            break
        frontier = [inner for call in frontier for inner in (_children(base, call) if call in opened else [call])]
    slots = []
    for call in frontier:
        for place, (label, value) in enumerate(call.outputs):
            dimensions = grown.get((call.index, place), ())
            if dimensions and value.is_floating_point() and value.shape[dimensions[0]] % count == 0:
                shown = f"{call.shown}{'.' if label else ''}{label}"
                slots.append(Slot(call.index, place, shown, dimensions[0], count, value.detach()))
    return slots


def _children(base: Trace, call: Call) -> list[Call]:
    return [inner for inner in base.calls if inner.parent == call.index]


def _reduces(call: Call, grown: Mapping[tuple[int, int], tuple[int, ...]]) -> bool:
    """Whether a module returns something that is trained and is no longer by sample: a loss, say."""
    return any(
        tensor.requires_grad and not grown.get((call.index, place)) for place, (_, tensor) in enumerate(call.outputs)
    )


def find_meeting(lab: Lab, rows: Sequence[int], term: str) -> Meeting | None:
    """Whether and how samples meet in a loss term.

    Args:
        lab: where to run.
        rows: the samples to look at, at least two.
        term: the loss term.

    Returns:
        None where each sample is by itself, as far as can be seen.

    Cost:
        A few dozen passes over these samples.
    """
    exact = 1e-9 if lab.dtype is torch.float64 else 1e-4
    seen: tuple[Any, ...] = ()
    for depth in range(MAX_DEPTH):
        view = LossView(lab, rows, depth)
        calls = tuple((slot.call, slot.place) for slot in view.slots)
        if calls == seen or not calls:
            continue
        seen = calls
        base = view.pulls(term)
        if base is None:
            continue
        met = _through_outputs(lab, view, term, base, exact=exact, depth=depth)
        met = met or _through_data(view, term, base, exact)
        if met is not None:
            return met
    return None


def _through_outputs(
    lab: Lab, view: LossView, term: str, base: list[Tensor], *, exact: float, depth: int
) -> Meeting | None:
    """At what the model returned; and far apart, where margins are crossed."""
    generator = torch.Generator().manual_seed(1)
    start = [slot.value for slot in view.slots]
    felt, pulled = _felt_through_outputs(view, term, base, start, exact=exact)
    if not felt.any():
        start = [slot.wide(generator) for slot in view.slots]
        far = view.pulls(term, start)
        if far is None:
            return None
        base = far
        felt, pulled = _felt_through_outputs(view, term, far, start, exact=exact)
        if not felt.any():
            return None
    where = [
        slot.shown
        for place, slot in enumerate(view.slots)
        if _felt_through_outputs(view, term, base, start, exact=exact, only=place)[0].any()
    ]
    more = [row % lab.num_samples for row in range(NUM_IN_HALVES)]  # their outputs will be spread
    is_comparison = _is_partial(felt, pulled) or not _has_few_statistics(LossView(lab, more, depth), term)
    return Meeting("outputs", is_comparison, tuple(dict.fromkeys(where)), _share_of(felt))


def _through_data(view: LossView, term: str, base: list[Tensor], exact: float) -> Meeting | None:
    felt = _felt_through_data(view, term, base, exact)
    return Meeting("data", False, (), _share_of(felt)) if felt.any() else None


def _is_partial(felt: Tensor, pulled: Tensor) -> bool:
    """Whether a sample acts on some others and not on all: they are compared. What has no pull does not count."""
    for column in range(len(felt)):
        others = pulled.clone()
        others[column] = False
        if 0 < int(felt[others, column].sum()) < int(others.sum()):
            return True
    return False


def _share_of(felt: Tensor) -> float:
    count = len(felt)
    return float(felt.sum()) / max(1, count * (count - 1))


def _felt_through_outputs(
    view: LossView, term: str, base: list[Tensor], start: Sequence[Tensor], *, exact: float, only: int | None = None
) -> tuple[Tensor, Tensor]:
    """Which sample's pull (row) changes when another's output (column) does; and which samples are ever pulled."""
    pulled = _flat(base).norm(dim=1) > 0
    felt = torch.zeros(view.num_samples, view.num_samples, dtype=torch.bool)
    for row in range(view.num_samples):
        values = [
            slot.moved(value, row) if only is None or only == place else value
            for place, (slot, value) in enumerate(zip(view.slots, start, strict=True))
        ]
        pulls = view.pulls(term, values)
        if pulls is not None:
            felt[:, row] = _unlike(base, pulls, row, exact, scaled=False)
            pulled |= _flat(pulls).norm(dim=1) > 0
    return felt, pulled


def _felt_through_data(view: LossView, term: str, base: list[Tensor], exact: float) -> Tensor:
    """The same where another sample's data changes, its output not; one factor for all is but another weight."""
    felt = torch.zeros(view.num_samples, view.num_samples, dtype=torch.bool)
    for row, part in enumerate(view.variants):
        pulls = view.pulls(term, part=part)
        if pulls is not None and all(one.shape == two.shape for one, two in zip(base, pulls, strict=True)):
            felt[:, row] = _unlike(base, pulls, row, exact, scaled=True)
    return felt


def _unlike(base: list[Tensor], pulls: list[Tensor], row: int, exact: float, *, scaled: bool) -> Tensor:
    before, after = _flat(base), _flat(pulls)
    others = torch.arange(len(before)) != row
    factor = 1.0
    if scaled:
        size = float(before[others].square().sum())
        factor = float((before[others] * after[others]).sum()) / size if size else 1.0
    bound = exact * max(float(before.norm()), float(after.norm()), 1e-300)
    unlike: Tensor = (after - factor * before).norm(dim=1) > bound
    return unlike & others


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(len(tensor), -1).double().cpu() for tensor in tensors], dim=1)


def _has_few_statistics(view: LossView, term: str) -> bool:
    """Whether half of the samples act on the other half through a few numbers only: the rank of the mixed derivative.

    A function of sums over the batch has at most as many independent actions as there are sums; one that compares
    samples with samples has nearly as many as there are outputs.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = [slot.spread(generator).requires_grad_() for slot in view.slots]
    root = view.terms(leaves, view.part)[term]
    first = torch.autograd.grad(root, leaves, create_graph=True, allow_unused=True)
    half = view.num_samples // 2
    kept = [
        (slot.by_sample(gradient)[:half], slot, leaf)
        for slot, leaf, gradient in zip(view.slots, leaves, first, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not kept:
        return True  # nothing bends: samples meet in counts
    size = sum(pull.numel() for pull, _, _ in kept)
    rows = []
    for _ in range(min(NUM_DIRECTIONS, size)):
        noise = [torch.randn(pull.shape, generator=generator, dtype=torch.float64).to(pull) for pull, _, _ in kept]
        along = sum((pull * direction).sum() for (pull, _, _), direction in zip(kept, noise, strict=True))
        found = torch.autograd.grad(along, [leaf for _, _, leaf in kept], retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        acted = [
            slot.by_sample(g)[half:].flatten() for (_, slot, _), g in zip(kept, found, strict=True) if g is not None
        ]
        if acted:
            rows.append(torch.cat(acted).double().cpu())
    size = sum(int((pull != 0).sum()) for pull, _, _ in kept)
    return _is_low_rank(rows, size, is_wide=all(leaf.dtype == torch.float64 for leaf in leaves))


def _is_low_rank(rows: list[Tensor], size: int, *, is_wide: bool) -> bool:
    """Whether singular values fall off a cliff: a few that matter, then rounding. Those of comparisons only decay."""
    if not rows:
        return True
    table = torch.stack(rows)
    sizes = torch.linalg.svdvals(table)
    if not bool(sizes[0] > 0):
        return True
    noise, smallest = (1e-13, 1e-8) if is_wide else (1e-5, 1e-3)
    kept = sizes[sizes > noise * sizes[0]]
    largest = min(len(rows), size, int((table.abs().amax(0) > 0).sum()))
    return bool(kept[-1] > smallest * sizes[0]) and len(kept) <= max(1, largest // 2)
