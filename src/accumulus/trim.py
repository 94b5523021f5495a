"""Padded batches: where their padding lies, which columns a micro-batch keeps, and that nothing else is cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulus import pytree
from accumulus.errors import BatchError, SplitError
from accumulus.lengths import IGNORED, is_mask, is_real
from accumulus.pytree import Leaf, Sliceable

__all__ = ["Padding", "Trim", "padding_of", "sequence_dimensions"]

Dimensions = dict[str, tuple[int, ...]]
"""From a leaf's path to its dimensions that run along the sequence."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the padding of a batch lies.

    Args:
        leaf: the mask or the labels that say so.
        real: what is real and no padding; bool, of shape (samples, full length).
        is_left: the padding stands on the left of every sample, not on the right.
    """

    leaf: Leaf
    real: Any
    is_left: bool

    @property
    def full_length(self) -> int:
        """To what length the batch is padded."""
        return int(self.real.shape[1])

    def lengths(self) -> list[int]:
        """Each sample's columns from the side without padding to its last real one; 0 where it has none."""
        columns = self.real if self.is_left else self.real[:, ::-1]
        lengths = np.where(self.real.any(1), self.full_length - columns.argmax(1), 0)
        return [int(length) for length in lengths]


def padding_of(tree: Sliceable, name: str | None) -> Padding:
    """Finds where a batch is padded.

    Args:
        tree: the batch.
        name: of the mask or the labels: a dotted path, or its last part; None for "attention_mask".

    Returns:
        Padding on the left where every sample of a mask ends at the last column and not all begin at the first; else
        on the right, by which nothing real is ever cut. Of labels always on the right: what stands before the first
        one may be a prompt.

    Raises:
        SplitError: there is no such leaf, or it is neither mask nor labels.

    Cost:
        Reads the leaf on the host: on an accelerator, a wait.
    """
    leaf = find_leaf(tree, name or "attention_mask", "length=")
    value = leaf.value
    if not pytree.is_array(value) or value.ndim != 2 or leaf.rows != tree.length:
        shape = tuple(value.shape) if pytree.is_array(value) else type(value).__name__
        raise SplitError(
            f"{leaf.name!r} is {shape}, and lengths are read off a mask or labels of shape (samples, length); name "
            f"another leaf in length=: {names_of(tree)}"
        )
    values = value.detach().cpu() if isinstance(value, Tensor) else value
    if isinstance(values, Tensor):
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    real = is_real(leaf.name, values)
    used = real[real.any(1)]
    ends_last = bool(used[:, -1:].all()) and not bool(used[:, :1].all())
    return Padding(leaf, real, is_left=ends_last and is_mask(leaf.name, values))


def find_leaf(tree: Sliceable, name: str, argument: str) -> Leaf:
    """The leaf of that dotted path, or else the only one whose last part it is.

    Args:
        tree: the batch.
        name: what the user wrote.
        argument: where, for the error message.

    Raises:
        SplitError: there is none, or several.
    """
    exact = [leaf for leaf in tree.leaves if leaf.name == name]
    found = exact or [leaf for leaf in tree.leaves if leaf.name.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise SplitError(
            f"the batch has several leaves {name!r}: {', '.join(leaf.name for leaf in found)}; {argument} "
            "takes one's whole path"
        )
    raise SplitError(f"the batch has no leaf {name!r}; it has {names_of(tree)}: name one of those in {argument}")


def names_of(tree: Sliceable) -> str:
    """The leaves of a batch, for an error message."""
    return ", ".join(repr(leaf.name) for leaf in tree.leaves if leaf.name) or "one tensor without a name"


def sequence_dimensions(
    tree: Sliceable, full_length: int, trim: Mapping[str, int | Sequence[int]] | Sequence[str] | None
) -> Dimensions:
    """Which dimensions of which leaves are trimmed.

    Args:
        tree: the batch.
        full_length: to what length it is padded.
        trim: names of leaves, perhaps with their dimensions; None for dimension 1 of all that have the full length
            there.

    Raises:
        SplitError: a leaf is not there, or has no such dimension.
    """
    if trim is None:
        return {
            leaf.path: (1,)
            for leaf in tree.leaves
            if leaf.rows == tree.length
            and pytree.is_array(leaf.value)
            and leaf.value.ndim > 1
            and leaf.value.shape[1] == full_length
        }
    items = trim.items() if isinstance(trim, Mapping) else ((name, 1) for name in trim)
    chosen: Dimensions = {}
    for name, given in items:
        leaf = find_leaf(tree, name, "trim=")
        dimensions = (given,) if isinstance(given, int) else tuple(given)
        shape = tuple(leaf.value.shape) if pytree.is_array(leaf.value) and leaf.rows == tree.length else ()
        if any(not 0 < d < len(shape) or shape[d] != full_length for d in dimensions):
            raise SplitError(
                f"trim= names dimension {', '.join(map(str, dimensions))} of {name!r}, whose shape is {shape}; a "
                f"dimension to trim comes after the first and has the mask's length of {full_length}"
            )
        chosen[leaf.path] = dimensions
    return chosen


@dataclass(frozen=True, slots=True)
class Trim:
    """What each micro-batch keeps of a padded batch.

    Args:
        padding: where the padding lies.
        dimensions: which dimensions of which leaves are trimmed.
        kept: how many columns each micro-batch keeps.
    """

    padding: Padding
    dimensions: Dimensions
    kept: Sequence[int]

    def __call__(self, index: int, leaf: Leaf) -> list[tuple[int, int, int]]:
        """Of a micro-batch and a leaf: dimension, start and stop of what is kept."""
        full, kept = self.padding.full_length, self.kept[index]
        start = full - kept if self.padding.is_left else 0
        return [(dimension, start, start + kept) for dimension in self.dimensions.get(leaf.path, ())]

    def check(self, tree: Sliceable, rows_kept: Any) -> None:
        """Looks at everything that would be cut off.

        Args:
            tree: the batch.
            rows_kept: how many columns of each sample of the batch are kept; an array of integers.

        Raises:
            BatchError: some of it is not padding.

        Cost:
            Reads the trimmed leaves twice; a wait for each one that lies on an accelerator.
        """
        columns = np.arange(self.padding.full_length)
        from_start = columns[::-1] if self.padding.is_left else columns
        kept = from_start < np.asarray(rows_kept)[:, None]
        for leaf in tree.leaves:
            if leaf.path in self.dimensions and leaf is not self.padding.leaf:
                place = first_loss(leaf.value, kept, self.dimensions[leaf.path], is_left=self.padding.is_left)
                if place is not None:
                    raise BatchError(self._explain(leaf, place))

    def _explain(self, leaf: Leaf, place: tuple[int, int]) -> str:
        row, column = place
        padding = self.padding.leaf.name
        return (
            f"batch{leaf.path} holds something at row {row}, column {column} that is not padding, though {padding!r} "
            "calls it so, and trimming would lose it: what is cut off must be one value everywhere (-100 in labels). "
            "Pad it so; or, if it has no sequence dimension, name the leaves that have one in trim= and leave it out"
        )


def first_loss(value: Any, kept: Any, dimensions: tuple[int, ...], *, is_left: bool) -> tuple[int, int] | None:
    """The first entry that would be cut off and is not padding.

    Padding is what is one value wherever it is cut, or what all samples have alike, as position ids are. Of a leaf
    with several sequence dimensions, as a mask between positions has, the last one counts: what positions that are
    kept see of those that are cut.

    Args:
        value: a tensor or array of all samples.
        kept: bool of shape (samples, full length).
        dimensions: those of `value` that are trimmed.
        is_left: the padding stands on the left.

    Returns:
        Its row and its place along the last of the dimensions; None where all is padding.
    """
    last = dimensions[-1]
    region = spread(~kept, value.ndim, last)
    for dimension in dimensions[:-1]:
        region = region & spread(kept, value.ndim, dimension)
    if not region.any():
        return None
    far = np.flatnonzero(region)[0 if is_left else -1]  # far from what is real: if anything is padding, this is
    place = [int(at) for at in np.unravel_index(far, region.shape)]
    where = tuple(
        slice(at, at + 1) if axis == 0 or axis in dimensions else slice(None) for axis, at in enumerate(place)
    )
    pad = value[where]
    within = torch.from_numpy(region).to(value.device) if isinstance(value, Tensor) else region
    holds_labels = is_integer(value) and not bool((pad == IGNORED).all()) and bool((value == IGNORED).any())
    lost = within & (value != (IGNORED if holds_labels else pad))
    if bool(lost.any()):
        lost = lost & ~((value != value) & (pad != pad))  # NaN is one value too
    if not bool(lost.any()) or (not holds_labels and is_same_in_all(value, region, last)):
        return None
    found = np.argwhere(lost.cpu().numpy() if isinstance(lost, Tensor) else lost)[0]
    return int(found[0]), int(found[last])


def spread(columns: Any, ndim: int, dimension: int) -> Any:
    """A (samples, length) array with its length along another dimension, and 1 along the rest."""
    shape = [columns.shape[0]] + [columns.shape[1] if axis == dimension else 1 for axis in range(1, ndim)]
    return columns.reshape(shape)


def is_integer(value: Any) -> bool:
    """Whether an array holds integers that may be negative."""
    if isinstance(value, Tensor):
        return value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    return bool(value.dtype.kind == "i")


def is_same_in_all(value: Any, region: Any, dimension: int) -> bool:
    """Whether the columns that any sample loses are alike in all samples; of a single one, whether it counts on."""
    if len(value) == 1:
        return is_integer(value) and value.ndim == 2 and bool((value[:, 1:] == value[:, :-1] + 1).all())
    axes = tuple(axis for axis in range(region.ndim) if axis != dimension)
    columns = np.flatnonzero(region.any(axis=axes))
    where = [slice(None)] * value.ndim
    where[dimension] = slice(int(columns[0]), int(columns[-1]) + 1)
    part = value[tuple(where)]
    return bool((part == part[:1]).all())


def rows_kept(order: Sequence[int], sizes: Sequence[int], kept: Sequence[int]) -> Any:
    """How many columns of each sample of the batch are kept, from what each micro-batch keeps."""
    by_row = np.empty(len(order), np.int64)
    by_row[np.asarray(order)] = np.repeat(np.asarray(kept), np.asarray(sizes))
    return by_row


def num_cut(full_length: int, by_row: Any) -> int:
    """How many columns are cut off, over all samples."""
    return int((full_length - by_row).sum())
