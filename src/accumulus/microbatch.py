"""How a batch is cut: `by_count`, a plain number of samples, and the micro-batches that come of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from accumulus import pytree
from accumulus.errors import BatchError, SplitError
from accumulus.types import describe

__all__ = ["Microbatches", "Split", "by_count", "choose_split", "to_device"]


class Split(Protocol):
    """A rule that says how many samples each micro-batch takes."""

    def sizes(self, num_samples: int) -> Sequence[int]:
        """Samples in each micro-batch, in order; at least 1 each, `num_samples` in all."""


@dataclass(frozen=True, slots=True)
class BySize:
    """Micro-batches of `size` samples; the last one takes what is left."""

    size: int
    unit: ClassVar[str] = "samples"

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


@dataclass(frozen=True, slots=True)
class AtMost:
    """Another rule's micro-batches, those of more than `size` samples cut into as few nearly equal ones as will do."""

    rule: Split
    size: int

    def sizes(self, num_samples: int) -> Sequence[int]:
        """The rule's sizes, in order."""
        sizes: list[int] = []
        for whole in self.rule.sizes(num_samples):
            sizes += ByCount(-(-whole // self.size)).sizes(whole)
        return sizes


def at_most(rule: Split, load: int) -> Split:
    """A rule whose micro-batches are no larger than a load.

    Args:
        rule: any.
        load: samples, at least 1.

    Returns:
        The rule itself where it is a plain number that is small enough.
    """
    if isinstance(rule, BySize):
        return rule if rule.size <= load else BySize(load)
    return AtMost(rule, load)


def resized(rule: Split, load: int) -> Split:
    """A rule of the same kind with another size.

    Args:
        rule: a number of samples.
        load: samples, at least 1.
    """
    return BySize(load)


def by_count(count: int) -> Split:
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
        microbatch: samples per micro-batch, a rule such as `by_count(8)`, or "auto".

    Returns:
        The rule; for "auto" the one that what chooses sizes begins with.

    Raises:
        SplitError: it is neither, or below 1.
    """
    if microbatch == "auto":
        return BySize(sys.maxsize)  # the whole batch, until a size has been chosen
    if callable(getattr(microbatch, "sizes", None)):
        return microbatch  # type: ignore[return-value]
    return BySize(_positive(microbatch, "microbatch takes a number of samples or a rule such as by_count(8)"))


class Microbatches:
    """The micro-batches of one batch: cut, collated and moved to the device one at a time, as they are used.

    Args:
        batch: a tree of tensors; with `collate`, a sequence of samples.
        split: how many samples each micro-batch takes.
        device: where the model lies.
        collate: makes a micro-batch of a list of samples.

    Raises:
        BatchError: the batch cannot be cut.
        SplitError: a rule of the user's own gave sizes that do not cover the batch.
    """

    __slots__ = ("_collate", "_device", "_tree", "batch", "look", "num_samples", "sizes")

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
        self.sizes = list(split.sizes(self.num_samples))
        whole = all(type(size) is int and size > 0 for size in self.sizes)
        if not whole or sum(self.sizes) != self.num_samples:
            raise SplitError(
                f"{split!r} cut {self.num_samples} samples into {self.sizes}; they must be integers that add up"
            )
        self._device, self._collate = device, collate
        self.look: Callable[[Any, int], None] | None = None  # sees each micro-batch and its samples before it runs

    @property
    def load(self) -> int:
        """Samples in the largest micro-batch."""
        return max(self.sizes)

    @property
    def sample_load(self) -> int:
        """What the largest sample counts for in the load."""
        return 1

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


    def _pieces(self) -> Iterator[Any]:
        if self._tree is not None:
            return self._tree.cut(self.sizes)
        assert self._collate is not None  # without it there is a tree
        return _collated(self.batch, self.sizes, self._collate)


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
