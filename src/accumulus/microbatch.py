"""How a batch is cut: `by_count`, a plain number of samples, and the micro-batches that come of a rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from accumulus import pytree
from accumulus.errors import BatchError, SplitError
from accumulus.types import describe

__all__ = ["Groups", "Microbatches", "Split", "by_count", "choose_split", "to_device"]


class SizeRule(Protocol):
    """A rule that says how many samples each micro-batch takes."""

    def sizes(self, num_samples: int) -> Sequence[int]:
        """Samples in each micro-batch, in order; at least 1 each, `num_samples` in all."""


class GroupRule(Protocol):
    """A rule that looks at the batch and says which samples run together."""

    def groups(self, batch: Any) -> Groups:
        """The groups of a batch: a `pytree.Sliceable`; with `collate`, the sequence of samples."""


Split: TypeAlias = "SizeRule | GroupRule"
"""What `TrainStep(microbatch=...)` takes beside a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which samples run together, and how much of them.

    Args:
        order: the samples' places in the batch, in the order in which they run.
        sizes: samples in each micro-batch.
        padded_lengths: to what length each micro-batch's samples are padded; empty where a rule does not know.
        columns: what each micro-batch keeps of the other dimensions of padded tensors; None for all.
    """

    order: Sequence[int]
    sizes: Sequence[int]
    padded_lengths: Sequence[int] = ()
    columns: pytree.Columns | None = None

    @property
    def peak_tokens(self) -> int | None:
        """Tokens of the largest micro-batch, padding included; None where a rule does not know."""
        tokens = [size * length for size, length in zip(self.sizes, self.padded_lengths, strict=False)]
        return max(tokens, default=None)


@dataclass(frozen=True, slots=True)
class BySize:
    """Micro-batches of `size` samples; the last one takes what is left."""

    size: int

    def sizes(self, num_samples: int) -> Sequence[int]:
        """As many of `size` as fit, then the rest."""
        whole, rest = divmod(num_samples, self.size)
        return [self.size] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class ByCount:
    """`count` micro-batches whose sizes differ by at most one; fewer where the batch has fewer samples."""

    count: int

    def sizes(self, num_samples: int) -> Sequence[int]:
        """The larger ones first, so that memory peaks in the first micro-batch."""
        count = min(self.count, num_samples)
        size, larger = divmod(num_samples, count)
        return [size + 1] * larger + [size] * (count - larger)


def by_count(count: int) -> ByCount:
    """Cuts every batch into `count` micro-batches of nearly equal size.

    A plain number (`microbatch=8`) is the other way to say it: 8 samples in each micro-batch.

    Args:
        count: number of micro-batches, at least 1. A batch of fewer samples is cut into single ones.

    Returns:
        A rule for `TrainStep(microbatch=...)`.

    Raises:
        SplitError: `count` is not an integer of at least 1.

    Example:
        >>> by_count(3).sizes(10)
        [4, 3, 3]
    """
    return ByCount(_positive(count, "by_count takes a number of micro-batches"))


def choose_split(microbatch: object) -> Split:
    """The rule that the `microbatch` argument names.

    Args:
        microbatch: samples per micro-batch, a rule such as `by_count(8)` or `by_tokens(8192)`, or "auto".

    Returns:
        The rule; for "auto" the one that what chooses sizes begins with.

    Raises:
        SplitError: it is neither, or below 1.
    """
    if microbatch == "auto":
        return BySize(sys.maxsize)  # the whole batch, until a size has been chosen
    if any(callable(getattr(microbatch, name, None)) for name in ("sizes", "groups")):
        return microbatch  # type: ignore[return-value]
    return BySize(_positive(microbatch, "microbatch takes 'auto', a number of samples or a rule such as by_count(8)"))


class Microbatches:
    """The micro-batches of one batch: cut, collated and moved to the device one at a time, as they are used.

    `order` is None where the samples run as they stand in the batch; else, for each position in run order, the
    sample's place in the batch. `peak_tokens` is what a rule that groups by length counts of the largest micro-batch.

    Args:
        batch: a tree of tensors; with `collate`, a sequence of samples.
        split: how many samples each micro-batch takes, or which.
        device: where the model lies.
        collate: makes a micro-batch of a list of samples.

    Raises:
        BatchError: the batch cannot be cut.
        SplitError: the rule cannot group the batch; or one of the user's own does not cover it.
    """

    __slots__ = (
        "_collate",
        "_device",
        "_groups",
        "_tree",
        "batch",
        "look",
        "num_samples",
        "order",
        "peak_tokens",
        "sizes",
    )

    def __init__(
        self,
        batch: Any,
        split: Split,
        device: torch.device,
        *,
        collate: Callable[[Any], Any] | None,
    ) -> None:
        if collate is not None and not callable(collate):
            raise BatchError(f"collate must be a function of a list of samples, not {describe(collate)}")
        self.batch = batch
        self._tree = tree = pytree.sliceable(batch) if collate is None else None
        self.num_samples = tree.length if tree is not None else _sample_count(batch)
        self.order: list[int] | None = None
        self.peak_tokens: int | None = None
        self._groups: Groups | None = None
        look = getattr(split, "groups", None)
        if look is None:
            self.sizes = list(split.sizes(self.num_samples))  # type: ignore[union-attr]
        else:
            self._follow(look(batch if tree is None else tree), split)
        whole = all(type(size) is int and size > 0 for size in self.sizes)
        if not whole or sum(self.sizes) != self.num_samples:
            raise SplitError(
                f"{split!r} cut {self.num_samples} samples into {self.sizes}; they must be integers that add up"
            )
        self._device, self._collate = device, collate
        self.look: Callable[[Any, int], None] | None = None  # sees each micro-batch and its samples before it runs

    @property
    def longest(self) -> int | None:
        """The padded length of the longest sample; None where the rule does not group by length."""
        return None if self._groups is None else max(self._groups.padded_lengths, default=None)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yields each micro-batch on the device, and whether it is the last."""
        last = len(self.sizes) - 1
        moves, marks = self._device.type != "cpu", pytree.is_compiling()
        for index, piece in enumerate(self._pieces()):
            if self.look is not None:
                self.look(piece, self.sizes[index])
            part = to_device(piece, self._device) if moves else piece
            yield pytree.mark_varying(part) if marks else part, index == last

    def _follow(self, groups: Groups, split: Split) -> None:
        """Takes over the groups that a rule made."""
        self._groups = groups
        self.order, self.sizes, self.peak_tokens = list(groups.order), list(groups.sizes), groups.peak_tokens
        if sorted(self.order) != list(range(self.num_samples)):
            raise SplitError(f"{split!r} must name each of {self.num_samples} samples once, not {self.order}")

    def _pieces(self) -> Iterator[Any]:
        if self._tree is None:
            assert self._collate is not None  # without it there is a tree
            samples = self.batch if self.order is None else [self.batch[index] for index in self.order]
            return _collated(samples, self.sizes, self._collate)
        if self._groups is None:
            return self._tree.cut(self.sizes)
        return self._tree.pick(self._groups.order, self.sizes, self._groups.columns)


def to_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors on the device, copied without making the host wait.

    Args:
        tree: any tree.
        device: where to.

    Returns:
        A tree of the same types; the same object on a CPU that has nothing to move.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "a"}, torch.device("meta"))["x"].device.type
        'meta'

    Cost:
        On CUDA, one copy into page-locked memory for tensors that are not there already: only from there is a
        copy truly asynchronous.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return tree

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        source = tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor
        return source.to(device, non_blocking=True)

    return pytree.map_tensors(moved, tree)


def _collated(samples: Any, sizes: Sequence[int], collate: Callable[[Any], Any]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield collate(samples[start : start + size])
        start += size


def _sample_count(batch: Any) -> int:
    # A tuple is refused too: it is a batch of tensors that someone took out of a loader far more often than samples.
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes, tuple)):
        raise BatchError(f"with collate=, a batch is a list of samples, not {describe(batch)}")
    if not batch:
        raise BatchError("the batch holds 0 samples; leave empty batches out")
    return len(batch)


def _positive(number: object, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SplitError(f"{what}, an integer of at least 1, not {describe(number)}")
    return number
