"""How long the samples of a list are: asked of the user's function, read off a field, or inferred."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from accumulus import pytree
from accumulus.errors import SplitError
from accumulus.types import describe

__all__ = ["is_real", "lengths_of"]

IGNORED = -100
"""What marks a label as padding, as torch's losses take it."""

MISSING = object()


def lengths_of(samples: Sequence[Any], length: Callable[[Any], Any] | str | None) -> list[int]:
    """The length of every sample.

    Args:
        samples: the batch, before it is collated.
        length: a function of a sample; the name of a field that is a mask or holds labels; None to infer it from
            `attention_mask`, `input_ids` or the sample's own size.

    Returns:
        A length of at least 0 for each.

    Raises:
        SplitError: a length cannot be found, or is none.
    """
    if isinstance(length, str):
        return [_field_length(sample, length) for sample in samples]
    return [_checked(length(sample)) for sample in samples] if length else [_inferred(sample) for sample in samples]


def is_real(name: str, values: Any) -> Any:
    """Which entries of a mask or of labels are real and not padding.

    Args:
        name: of the leaf. One of dtype bool, or whose name ends in "mask", is a mask: what is not zero is real. One of
            integers holds labels: what is not -100 is real.
        values: a numpy array.

    Returns:
        A bool array of the same shape.

    Raises:
        SplitError: it is neither.
    """
    if is_mask(name, values):
        if values.dtype.kind == "f" and (values < 0).any():
            raise SplitError(
                f"the mask {name!r} holds {values.min():g}: lengths are read off masks that are 0 where there is "
                "padding, not off those that are added to scores; name another leaf in length="
            )
        return values != 0
    if values.dtype.kind not in "iu":
        raise SplitError(
            f"{name!r} holds {values.dtype}, so it is neither a mask (bool, or a name that ends in 'mask') nor labels "
            "(integers); name another leaf in length="
        )
    return values != IGNORED


def is_mask(name: str, values: Any) -> bool:
    """Whether a leaf is a mask: its numpy array is of dtype bool, or its name ends in "mask"."""
    return values.dtype.kind == "b" or name.endswith("mask")


def _field_length(sample: Any, name: str) -> int:
    value = _field(sample, name)
    if value is MISSING:
        raise SplitError(
            f"a sample has no field {name!r} to read its length off; it has {_names(sample)}: name one of those in "
            "length=, or give a function of a sample"
        )
    try:
        values = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:  # lists of unequal lengths
        values = np.empty((0, 0))
    if values.ndim != 1:
        raise SplitError(
            f"the field {name!r} of a sample is {describe(value)}, off which no length can be read; name a mask or "
            "labels of one dimension in length=, or give a function of a sample"
        )
    real = np.flatnonzero(is_real(name, values)) if values.size else values
    if not real.size:
        return 0
    # What stands before the first label may be a prompt; before the first real entry of a mask it is padding.
    return int(real[-1]) + 1 - (int(real[0]) if is_mask(name, values) else 0)


def _inferred(sample: Any) -> int:
    for name in ("attention_mask", "input_ids"):
        value = _field(sample, name, search=False)
        if value is not MISSING:
            return _field_length(sample, name) if name == "attention_mask" else _size(value, name)
    return _size(sample, "")


def _size(value: Any, name: str) -> int:
    """The length of bytes, text, a list of numbers, or an array of one dimension."""
    is_sized = isinstance(value, (bytes, str)) or (pytree.is_array(value) and value.ndim == 1)
    if is_sized or (isinstance(value, list) and (not value or pytree.is_plain(value))):
        return len(value)
    if name:
        raise SplitError(
            f"the field {name!r} of a sample is {describe(value)}, which has no length of its own; make it a list of "
            "numbers or a tensor of one dimension, or pass length="
        )
    raise SplitError(
        f"the length of {describe(value)} as a sample is not known: it has neither 'attention_mask' nor 'input_ids' "
        f"nor a size of its own, but {_names(value)}; pass length=, a function of a sample or the name of a mask or "
        "of labels"
    )


def _field(sample: Any, name: str, *, search: bool = True) -> Any:
    """The value at a dotted path, or the only one whose last part has that name."""
    node = sample
    for part in name.split("."):
        if isinstance(node, (Mapping, UserDict)):
            node = node.get(part, MISSING)
        elif isinstance(node, (list, tuple)) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            node = getattr(node, part, MISSING)
    if node is not MISSING or not search:
        return node
    found = [leaf.value for leaf in _leaves(sample) if leaf.name.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else MISSING


def _leaves(sample: Any) -> list[pytree.Leaf]:
    return pytree.flatten(sample, lambda node, path: False, strict=False)[0]


def _names(sample: Any) -> str:
    return ", ".join(repr(leaf.name) for leaf in _leaves(sample) if leaf.name) or "no fields"


def _checked(length: Any) -> int:
    if getattr(length, "ndim", None) == 0:  # numpy's numbers and tensors without dimensions
        length = length.item()
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise SplitError(f"length= gave {describe(length)} for a sample; it must be an integer of at least 0")
    return length
