"""Batches as trees: find their length, cut them along it, and map their tensors. Nothing else of a tree is needed."""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from accumulus.errors import BatchError

__all__ = ["Sliceable", "is_compiling", "map_tensors", "mark_varying", "num_elements", "sliceable"]

Rebuild: TypeAlias = Callable[[Iterator[Any]], Any]
"""Makes a tree of the flattened one's shape, taking its leaves from an iterator."""

PLAIN_TYPES = frozenset({bool, int, float, str, bytes})

SHARED_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
    slice,
    range,
)


PATH_PART = re.compile(r"\.(\w+)|\[(.*?)\]")


class Leaf:
    """One leaf of a tree, with the path that names it in an error message.

    `rows` is its length along the first dimension; None for what every micro-batch shares.
    """

    __slots__ = ("in_list", "path", "rows", "value")

    path: str
    value: Any
    in_list: bool
    rows: int | None

    def __init__(self, path: str, value: Any, in_list: bool) -> None:
        self.path = path
        self.value = value
        self.in_list = in_list
        is_cut = isinstance(value, (list, tuple)) or (is_array(value) and value.ndim)
        self.rows = len(value) if is_cut else None

    @property
    def name(self) -> str:
        """The path as users write it: `encoder.mask` for `batch.encoder.mask`, `0.mask` for `batch[0].mask`."""
        return ".".join(word or key.strip("'\"") for word, key in PATH_PART.findall(self.path))


Columns: TypeAlias = Callable[[int, Leaf], Sequence[tuple[int, int, int]]]
"""From a micro-batch's number and a leaf to (dimension, start, stop) of what is kept of the leaf."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sliceable:
    """A batch that has been looked at: its length, its leaves, and how to build such a tree again."""

    length: int
    leaves: list[Leaf]
    rebuild: Rebuild

    def cut(self, sizes: Sequence[int]) -> Iterator[Any]:
        """Cuts the batch into consecutive micro-batches; tensors and arrays become views.

        Args:
            sizes: samples in each micro-batch; their sum is the batch's length.

        Returns:
            An iterator over the micro-batches, each a tree of the batch's own types.
        """
        pieces = [_pieces(leaf, sizes) for leaf in self.leaves]
        return (self.rebuild(iter(parts)) for parts in zip(*pieces, strict=True))

    def pick(self, order: Sequence[int], sizes: Sequence[int], columns: Columns | None = None) -> Iterator[Any]:
        """Cuts the batch into micro-batches of its samples in another order, each copied when it is asked for.

        Args:
            order: the samples' places in the batch, in the order in which they shall run.
            sizes: samples in each micro-batch.
            columns: what each micro-batch keeps of the other dimensions; None for all.

        Returns:
            An iterator over the micro-batches, each a tree of the batch's own types.
        """
        for leaf in self.leaves:
            _refuse_uncuttable(leaf)
        stops = itertools.accumulate(sizes)
        rows = [order[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
        return (self._picked(index, chosen, columns) for index, chosen in enumerate(rows))

    def _picked(self, index: int, rows: Sequence[int], columns: Columns | None) -> Any:
        on: dict[torch.device, Tensor] = {}  # the rows as an index, on each device that needs it
        values = []
        for leaf in self.leaves:
            value = leaf.value
            if leaf.rows != self.length:
                values.append(value)
                continue
            kept = [slice(None)] * (value.ndim if is_array(value) else 0)
            for dimension, start, stop in () if columns is None else columns(index, leaf):
                kept[dimension] = slice(start, stop)
            if isinstance(value, Tensor):
                if value.device not in on:
                    on[value.device] = torch.tensor(rows, device=value.device)
                values.append(value[tuple(kept)].index_select(0, on[value.device]))
            elif is_array(value):
                values.append(value[tuple(kept)][np.asarray(rows)])
            else:
                values.append(type(value)([value[row] for row in rows]))
        return self.rebuild(iter(values))


def sliceable(batch: Any) -> Sliceable:
    """Looks at a batch once, so that it can be cut.

    Tensors and arrays are cut along their first dimension. A list as long as the batch, or a tuple of as many
    strings or numbers, holds one entry per sample and is cut too; a list of tensors of the batch's length is a
    container of them, as `[inputs, labels]` is. Tensors without dimensions, numbers, strings and None go to every
    micro-batch.

    Args:
        batch: a tree of dicts, `UserDict`s, lists, tuples, namedtuples and dataclasses over tensors and arrays.

    Returns:
        The batch, ready to be cut.

    Raises:
        BatchError: no tensor has a first dimension, they disagree, it is 0, a leaf's type is not known, or a list could
            be read both ways.
    """
    lengths: list[int] = []  # of the lists and tuples in the batch
    leaves, rebuild = flatten(batch, lambda node, path: bool(lengths.append(len(node))))  # type: ignore[func-returns-value]
    length = _rows_of(leaves)
    if length in lengths:
        has_outside = any(leaf.rows is not None and not leaf.in_list for leaf in leaves)
        leaves, rebuild = flatten(
            batch, lambda node, path: _is_sample_list(node, length, path, has_outside=has_outside)
        )
        _rows_of(leaves)
    return Sliceable(length, leaves, rebuild)


def mark_varying(tree: Any) -> Any:
    """Tells torch.compile that the number of rows may change, so that a short micro-batch is not compiled anew.

    Soft marks: nothing fails where a model turns out to need a fixed number. torch always compiles a single row apart.

    Args:
        tree: a micro-batch; its tensors are marked, and not copied.

    Returns:
        The same tree.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        _mark(tree, dynamo.maybe_mark_dynamic)
    return tree


def is_compiling() -> bool:
    """Whether anything was compiled in this process: else marks would only cost time. Yes where torch does not tell."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:  # loading it to ask would take a second
        return False
    backends = getattr(dynamo.eval_frame, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def _mark(node: Any, mark: Callable[[Tensor, int], None]) -> None:
    if isinstance(node, Tensor):
        if node.ndim:
            mark(node, 0)
        return
    if type(node) in (tuple, list) and (not node or type(node[0]) in PLAIN_TYPES):
        return
    for _, child in _children(node) or ():
        _mark(child, mark)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with every tensor replaced by `function(tensor)`; unknown types stay as they are.

    Args:
        function: what to do with each tensor.
        tree: as for `sliceable`, but leaves may be of any type.

    Returns:
        A new tree of the same types.
    """
    leaves, rebuild = flatten(tree, _is_never_leaf, strict=False)
    values = (leaf.value for leaf in leaves)
    return rebuild(iter([function(value) if isinstance(value, Tensor) else value for value in values]))


def num_elements(tree: Any) -> int:
    """How many numbers the tensors and arrays of a tree hold: a measure by which micro-batches are compared.

    Args:
        tree: any tree.

    Returns:
        The sum over its tensors and arrays; 0 where it has none that can be seen.
    """
    if isinstance(tree, Tensor):
        return tree.numel()
    if isinstance(tree, np.ndarray):
        return tree.size
    if type(tree) in (tuple, list) and (not tree or type(tree[0]) in PLAIN_TYPES):
        return 0
    return sum(num_elements(child) for _, child in _children(tree) or ())


def flatten(tree: Any, is_leaf: Callable[[Any, str], bool], *, strict: bool = True) -> tuple[list[Leaf], Rebuild]:
    """Splits a tree into its leaves and a function that builds the same tree from others.

    Args:
        tree: any tree.
        is_leaf: called with every list or plain tuple and its path: True where it is a leaf and not a container.
        strict: refuse leaves of types that might hide tensors.

    Returns:
        The leaves in order, and the function.

    Raises:
        BatchError: `strict`, and a leaf's type is not known.
    """
    leaves: list[Leaf] = []

    def visit(node: Any, path: str, in_list: bool) -> Rebuild:
        is_sequence = type(node) is tuple or isinstance(node, list)
        is_entire = is_sequence and (is_plain(node) or is_leaf(node, path))
        children = None if is_entire else _children(node)
        if children is not None:
            inside = in_list or isinstance(node, list)
            return _rebuilder(node, [(key, visit(child, path + _label(key), inside)) for key, child in children])
        if strict and not (is_array(node) or isinstance(node, (list, tuple, *SHARED_TYPES))):
            kind = type(node)
            raise BatchError(
                f"batch{path} is a {kind.__module__}.{kind.__qualname__}, which accumulus cannot cut; use tensors in "
                "dicts, lists, tuples or dataclasses, or pass a list of samples and collate="
            )
        leaves.append(Leaf(path, node, in_list))
        return next

    build = visit(tree, "", False)
    found = leaves.copy()
    leaves.clear()  # `visit` refers to itself, and would hold them until garbage is collected
    return found, build


def is_plain(node: Any) -> bool:
    """Whether a list or tuple holds strings or numbers only, as a batch's names or lengths: not worth a walk."""
    return bool(node) and all(map(PLAIN_TYPES.__contains__, map(type, node)))


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or a numpy array."""
    return isinstance(value, (Tensor, np.ndarray))


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, Tensor):  # the usual leaf, before the slower questions
        return None
    if isinstance(node, (Mapping, UserDict)):
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _rebuilder(node: Any, children: list[tuple[Any, Rebuild]]) -> Rebuild:
    kind = type(node)
    if all(build is next for _, build in children):  # the usual flat batch, without a call per leaf
        keys, count = [key for key, _ in children], len(children)
        if kind is dict:
            return lambda leaves: dict(zip(keys, leaves, strict=False))
        if kind in (tuple, list):
            return lambda leaves: kind(itertools.islice(leaves, count))
    if kind is dict:
        return lambda leaves: {key: build(leaves) for key, build in children}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return lambda leaves: kind(*[build(leaves) for _, build in children])
    if isinstance(node, (list, tuple)):
        return lambda leaves: kind([build(leaves) for _, build in children])
    if isinstance(node, (Mapping, UserDict)):
        return lambda leaves: _refill(node, {key: build(leaves) for key, build in children})
    return lambda leaves: _replace(copy.copy(node), {name: build(leaves) for name, build in children})


def _refill(node: Any, items: dict[Any, Any]) -> Any:
    if not isinstance(node, (MutableMapping, UserDict)):
        return type(node)(items)
    mapping: Any = copy.copy(node)
    if isinstance(mapping, UserDict):
        mapping.data = items  # copy.copy shares .data with the original
        return mapping
    for key, value in items.items():
        mapping[key] = value
    return mapping


def _replace(instance: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        object.__setattr__(instance, name, value)  # frozen dataclasses too
    return instance


def _label(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _is_never_leaf(node: Any, path: str) -> bool:
    return False


def _is_sample_list(node: Any, length: int, path: str, *, has_outside: bool) -> bool:
    """Whether a list or tuple holds one entry per sample, and is not a container of tensors of all samples."""
    if len(node) != length:
        return False
    rows = [leaf.rows for leaf in flatten(node, _is_never_leaf, strict=False)[0] if leaf.rows is not None]
    if isinstance(node, tuple):  # as torch's default_collate returns the strings of a batch
        return not rows
    if rows and all(count == length for count in rows) and has_outside and length > 1:
        raise BatchError(
            f"batch{path} is a list of {length} entries whose tensors have {length} rows, and the batch has {length} "
            "samples: is there one entry per sample, or one tensor per field? Use a tuple for fields, or collate="
        )
    return not rows or any(count != length for count in rows)


def _rows_of(leaves: list[Leaf]) -> int:
    arrays = [leaf for leaf in leaves if is_array(leaf.value) and leaf.rows is not None]
    # A list of boxes per image, say, holds tensors of any length: what stands outside lists decides.
    outside = [leaf for leaf in arrays if not leaf.in_list] or arrays
    if not outside:
        raise BatchError("the batch holds no tensor with a first dimension; for a list of samples pass collate=")
    first = outside[0]
    for leaf in outside:
        if leaf.rows != first.rows:
            raise BatchError(
                f"tensors of one batch must share their first dimension: batch{first.path} has {first.rows} but "
                f"batch{leaf.path} has {leaf.rows}; keep what all samples share outside the batch, or pass a list of "
                "samples and collate="
            )
    if not first.rows:
        raise BatchError("the batch holds 0 samples; leave empty batches out")
    return first.rows


def _pieces(leaf: Leaf, sizes: Sequence[int]) -> Any:
    value = leaf.value
    if isinstance(value, Tensor) and value.ndim:
        _refuse_uncuttable(leaf)
        return value.split_with_sizes(list(sizes))
    if leaf.rows != sum(sizes):  # what all samples share
        return itertools.repeat(value, len(sizes))
    stops = list(itertools.accumulate(sizes))
    return [value[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def _refuse_uncuttable(leaf: Leaf) -> None:
    value = leaf.value
    if isinstance(value, Tensor) and value.ndim and (value.layout != torch.strided or value.is_nested):
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise BatchError(f"batch{leaf.path} is {kind}, which cannot be cut; pass a list of samples and collate=")
