"""`windows`: marks the last micro-batch of each window, by looking one ahead."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from accumulus import pytree
from accumulus.errors import BatchError, SplitError

__all__ = ["IsLast", "windows"]


class IsLast(int):
    """Whether a micro-batch is the last of its window: true or false, and the number of samples it came with."""

    num_samples: int | None

    def __new__(cls, value: bool, num_samples: int | None) -> IsLast:
        """Makes the flag of a micro-batch."""
        flag = super().__new__(cls, value)
        flag.num_samples = num_samples
        return flag

    def __repr__(self) -> str:
        return str(bool(self))


def windows(microbatches: Iterable[Any], *, size: int | Callable[[int], int]) -> Iterator[tuple[Any, IsLast]]:
    """Marks the last micro-batch of every window, that of a short last window included.

    After a `break` call `Accumulator.flush`, or the window goes on in the next loop.

    Compiled models do not compile again for a short micro-batch: its tensors are marked as varying in their first
    dimension. What copies them afterwards, as `.to(device)` does, loses the mark, and they compile once more.

    Args:
        microbatches: any iterable, of known length or not. Each pass over it begins a new window, so nothing leaks
            from one epoch into the next.
        size: micro-batches in a window; or a function of the window's number (from 0), to let batches grow.

    Returns:
        An iterator over each micro-batch and whether it is the last of its window. It looks one ahead, and holds no
        more.

    Raises:
        SplitError: a size is not an integer of at least 1.

    Example:
        >>> [(part, bool(is_last)) for part, is_last in windows("abcde", size=2)]
        [('a', False), ('b', True), ('c', False), ('d', True), ('e', True)]
    """
    size_of = size if callable(size) else lambda index: size
    iterator, marks = iter(microbatches), pytree.is_compiling()
    present = next(iterator, _END)
    index, left = 0, _checked(size_of(0))
    while present is not _END:
        following = next(iterator, _END)
        left -= 1
        is_last = left == 0 or following is _END
        yield pytree.mark_varying(present) if marks else present, _flag(is_last, _num_samples(present))
        present = following
        if is_last and present is not _END:
            index += 1
            left = _checked(size_of(index))


_END: Any = object()


def _checked(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise SplitError(f"a window's size is a number of micro-batches, an integer of at least 1, not {size!r}")
    return int(size)


def _num_samples(microbatch: Any) -> int | None:
    """Samples in a micro-batch; 1 for a single number or string, None where it is not certain."""
    kind = type(microbatch)
    values = microbatch.values() if kind is dict else microbatch if kind in (tuple, list) else (microbatch,)
    found = -1
    for value in values:  # the usual ones, without a walk
        of = type(value)
        if of is Tensor and value.ndim:
            length = value.size(0)
            if found not in (-1, length):
                return None
            found = length
        elif of is Tensor:
            continue
        elif of not in pytree.PLAIN_TYPES and not (of in (list, tuple) and pytree.is_plain(value)):
            return _walked(microbatch)
    if found >= 0:
        return found
    return 1 if isinstance(microbatch, Tensor) or kind in pytree.PLAIN_TYPES else None


def _walked(microbatch: Any) -> int | None:
    try:
        return pytree.sliceable(microbatch).length
    except BatchError:
        return None


@functools.lru_cache(maxsize=256)
def _flag(value: bool, num_samples: int | None) -> IsLast:
    return IsLast(value, num_samples)
