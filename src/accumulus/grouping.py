"""`by_tokens`: the samples of a batch grouped by length, so that no micro-batch is larger than a number of tokens."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from accumulus.errors import SplitError
from accumulus.lengths import lengths_of
from accumulus.microbatch import Groups
from accumulus.pytree import Sliceable
from accumulus.trim import Trim, num_cut, padding_of, rows_kept, sequence_dimensions
from accumulus.types import describe

__all__ = ["ByTokens", "by_tokens"]

Length: TypeAlias = "Callable[[Any], Any] | str | None"
TrimNames: TypeAlias = "Mapping[str, int | Sequence[int]] | Sequence[str] | None"


@dataclass(slots=True)
class Once:
    """Whether something has been said. Copies of a rule share it."""

    is_said: bool = False


@dataclass(frozen=True, slots=True)
class ByTokens:
    """Micro-batches of at most `max_tokens` tokens, padding included. Made by `by_tokens`, which says what is what.

    A copy with another budget is `dataclasses.replace(rule, max_tokens=...)`.
    """

    max_tokens: int
    length: Length = None
    multiple_of: int = 8
    buckets: Sequence[int] = ()
    trim: TrimNames = None
    strict: bool = False
    is_auto: bool = False
    _warned: Once = field(default_factory=Once, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive(self.max_tokens, "max_tokens")
        _positive(self.multiple_of, "multiple_of")
        if self.length is not None and not isinstance(self.length, str) and not callable(self.length):
            raise SplitError(
                f"length= takes a function of a sample, or the name of a mask or of labels, not {describe(self.length)}"
            )
        if not isinstance(self.buckets, Sequence):
            raise SplitError(f"buckets= takes a list of padded lengths, not {describe(self.buckets)}")
        object.__setattr__(self, "buckets", tuple(sorted({_positive(bucket, "a bucket") for bucket in self.buckets})))
        if self.trim is not None:
            object.__setattr__(self, "trim", _checked_trim(self.trim))

    def padded_length(self, length: int) -> int:
        """The length that a micro-batch is padded to whose longest sample has that length.

        Args:
            length: of the longest sample.

        Returns:
            The smallest bucket that holds it; else the next multiple of `multiple_of`, and of at least 1 token.
        """
        length = max(length, 1)
        fitting = (bucket for bucket in self.buckets if bucket >= length)
        return next(fitting, -(-length // self.multiple_of) * self.multiple_of)

    def groups(self, batch: Any) -> Groups:
        """Which samples of a batch run together.

        Args:
            batch: a `pytree.Sliceable` of padded tensors; else a sequence of samples.

        Returns:
            The groups, longest samples first. Their `peak_tokens` are those of the largest micro-batch.

        Raises:
            SplitError: the lengths cannot be found, or `strict` and a sample is longer than the budget.
            BatchError: trimming would lose something.
        """
        if isinstance(batch, Sliceable):
            groups = self._of_tensors(batch)
        else:
            groups = self._grouped(lengths_of(batch, self.length))
        if groups.padded_lengths[0] > self.max_tokens:
            self._tell_of(groups.order[0], groups.padded_lengths[0])
        return groups

    def _of_tensors(self, tree: Sliceable) -> Groups:
        if self.length is not None and not isinstance(self.length, str):
            raise SplitError(
                "for a batch of tensors length= is the name of a mask or of labels; a function of a sample needs "
                "collate= and a list of samples"
            )
        padding = padding_of(tree, self.length)
        full = padding.full_length
        dimensions = sequence_dimensions(tree, full, self.trim)
        groups = self._grouped(padding.lengths(), full_length=full)
        by_row = rows_kept(groups.order, groups.sizes, groups.padded_lengths)
        if num_cut(full, by_row) < 2:  # one entry is too little to tell padding from a label, and saves nothing
            return dataclasses.replace(groups, padded_lengths=[full] * len(groups.sizes))
        trim = Trim(padding, dimensions, groups.padded_lengths)
        trim.check(tree, by_row)
        return dataclasses.replace(groups, columns=trim)

    def _grouped(self, lengths: list[int], full_length: int | None = None) -> Groups:
        """Longest first, and as many as fit: each group is padded to its first sample."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        sizes: list[int] = []
        padded_lengths: list[int] = []
        start = 0
        while start < len(order):
            padded = self.padded_length(lengths[order[start]])
            if full_length is not None:
                padded = min(padded, full_length)
            sizes.append(min(max(1, self.max_tokens // padded), len(order) - start))
            padded_lengths.append(padded)
            start += sizes[-1]
        return Groups(order=order, sizes=sizes, padded_lengths=padded_lengths)

    def _tell_of(self, index: int, padded_length: int) -> None:
        """Raises or, once, warns: a sample is longer than the budget."""
        what = (
            f"sample {index} of the batch has {padded_length} tokens, padding included, more than the "
            f"max_tokens={self.max_tokens} of by_tokens"
        )
        if self.strict:
            raise SplitError(f"{what}; raise max_tokens, cut the sample, or let it run alone with strict=False")
        if not self._warned.is_said:
            self._warned.is_said = True
            warnings.warn(f"{what}; it runs alone, and needs more memory than the budget allows", stacklevel=6)


def by_tokens(
    max_tokens: int | str,
    *,
    length: Callable[[Any], Any] | str | None = None,
    multiple_of: int = 8,
    buckets: Sequence[int] | None = None,
    trim: Mapping[str, int | Sequence[int]] | Sequence[str] | None = None,
    strict: bool = False,
) -> ByTokens:
    """Cuts every batch into micro-batches of at most `max_tokens` tokens, samples of similar length together.

    The samples are sorted by length, the longest first, so that memory peaks in the first micro-batch; each micro-batch
    takes as many as fit when all are padded to its longest. Nothing else changes: the update is the whole batch's.

    With `collate`, each micro-batch is collated by itself. Padded tensors are trimmed: along dimension 1 of every leaf
    that is as long there as the mask, on the side where the mask shows padding. Only padding may be cut off (one value
    in all samples, -100 in labels; or what is alike in all samples, as position ids are), else the step is refused.
    The model must not look at padding: then its length cannot matter.

    Args:
        max_tokens: samples times padded length of a micro-batch, at most. A longer sample runs alone, with one warning.
            "auto": what fits in memory, then what is fastest, found in the first steps.
        length: a function of a sample (with `collate`); or the name of a leaf, as a dotted path or its last part, that
            is a mask (bool, or a name that ends in "mask": not zero is real) or labels (integers: -100 at the end of a
            sample is padding; padding on the left needs a mask). None infers it: with `collate` from a sample's
            "attention_mask", "input_ids" or its own size; for tensors from the leaf "attention_mask".
        multiple_of: padded lengths are rounded up to a multiple of this, so that there are few different shapes; at
            most to the length the batch has. With `collate`, give what it rounds to.
        buckets: padded lengths to round up to instead. What is longer than all of them goes by `multiple_of`.
        trim: names of the leaves to trim; or a mapping from name to the dimension or dimensions, as
            `{"mask": (2, 3)}` for one of shape (batch, 1, length, length). Leaves not named are left as they are.
        strict: raise where a sample is longer than the budget.

    Returns:
        A rule for `TrainStep(microbatch=...)`: a frozen dataclass. `dataclasses.replace(rule, max_tokens=...)` is the
        same rule with another budget, and `step.split(batch).peak_tokens` what the largest micro-batch holds.

    Raises:
        SplitError: an argument cannot be. When a batch is cut: a length cannot be found, or, with `strict`, is too
            large.

    Cost:
        Sorting, and for tensors a read of the trimmed leaves and a copy of each micro-batch's rows. Where the batch
        lies on an accelerator, the host waits to read it: keep batches on the CPU, from where micro-batches are moved.

    Example:
        >>> rule = by_tokens(32, multiple_of=8)
        >>> groups = rule.groups(["a" * length for length in (3, 20, 8, 5, 12)])
        >>> groups.order, groups.sizes, groups.padded_lengths
        ([1, 4, 2, 3, 0], [1, 2, 2], [24, 16, 8])
    """
    is_auto = max_tokens == "auto"
    return ByTokens(
        sys.maxsize if is_auto else max_tokens,  # type: ignore[arg-type]  # checked by the class
        length,
        multiple_of,
        () if buckets is None else buckets,
        trim=trim,
        strict=strict,
        is_auto=is_auto,
    )


def _positive(number: object, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SplitError(f"by_tokens takes {what} as an integer of at least 1, not {describe(number)}")
    return number


def _checked_trim(trim: Any) -> Any:
    """A copy of what `trim=` was given."""
    if isinstance(trim, str):
        trim = (trim,)
    if not isinstance(trim, (Mapping, Sequence)) or not all(isinstance(name, str) for name in trim):
        raise SplitError(f"trim= takes names of leaves, or a mapping from name to dimensions, not {describe(trim)}")
    if not isinstance(trim, Mapping):
        return tuple(trim)
    for name, dimensions in trim.items():
        given = (dimensions,) if isinstance(dimensions, int) else dimensions
        if not isinstance(given, Sequence) or not given or not all(type(d) is int and d > 0 for d in given):
            raise SplitError(
                f"trim= gives {describe(dimensions)} for {name!r}; dimensions are integers of at least 1 (0 is the "
                "samples)"
            )
    return dict(trim)
