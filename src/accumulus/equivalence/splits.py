"""The ways in which `check` cuts a batch: by count, unevenly, into single samples, reordered, by tokens."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accumulus import pytree
from accumulus.errors import BatchError, SplitError
from accumulus.grouping import by_tokens
from accumulus.microbatch import Groups, Split, by_count, choose_split
from accumulus.types import describe

__all__ = ["SPLITS", "Singles", "Uneven", "make_splits"]

SPLITS = ("by_count", "uneven", "singles", "reordered", "by_tokens")
"""The names that `check(splits=...)` knows, and what it tries by default."""

MAX_SINGLES = 8


@dataclass(frozen=True, slots=True)
class Uneven:
    """Each micro-batch takes about six tenths of what is left."""

    def sizes(self, num_samples: int) -> Sequence[int]:
        """Sizes that fall down to 1."""
        sizes: list[int] = []
        while num_samples:
            sizes.append(max(1, min(num_samples - 1, num_samples * 3 // 5)) if num_samples > 1 else 1)
            num_samples -= sizes[-1]
        return sizes


@dataclass(frozen=True, slots=True)
class Singles:
    """Single samples, at most eight of them; the rest of a larger batch runs together."""

    def sizes(self, num_samples: int) -> Sequence[int]:
        """Mostly ones."""
        rest = num_samples - MAX_SINGLES
        return [1] * min(num_samples, MAX_SINGLES) + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class Reordered:
    """Two or three micro-batches of samples that do not stand beside each other in the batch."""

    def groups(self, batch: Any) -> Groups:
        """Shuffled, always in the same way."""
        count = batch.length if isinstance(batch, pytree.Sliceable) else len(batch)
        order = list(range(count))
        random.Random(0).shuffle(order)
        return Groups(order=order, sizes=by_count(min(3, count)).sizes(count))


NAMED: dict[str, Split] = {
    "by_count": by_count(2),
    "uneven": Uneven(),
    "singles": Singles(),
    "reordered": Reordered(),
}


def make_splits(asked: Sequence[Any], batch: Any, *, has_collate: bool) -> tuple[dict[str, Split], list[str]]:
    """The rules to try.

    Args:
        asked: names of `SPLITS`, numbers of samples, or rules.
        batch: what they will cut.
        has_collate: it is a list of samples.

    Returns:
        Rules by name, and a sentence for what was left out.

    Raises:
        SplitError: a name is unknown, or nothing is left.
    """
    if isinstance(asked, (str, int)):
        asked = (asked,)
    is_default = tuple(asked) == SPLITS  # then nobody asked for by_tokens
    rules: dict[str, Split] = {}
    notes: list[str] = []
    for item in asked:
        if not isinstance(item, str):
            rule = choose_split(item)
            rules[_name_of(item, rule)] = rule
        elif item == "by_tokens":
            _add_by_tokens(rules, notes, batch, has_collate=has_collate)
        elif item in NAMED:
            rules[item] = NAMED[item]
        else:
            raise SplitError(f"splits= takes {', '.join(SPLITS)}, numbers and rules, not {describe(item)}")
    if not rules:
        raise SplitError(f"splits={asked!r} leaves nothing to compare with the whole batch; {' '.join(notes)}".strip())
    return rules, [] if is_default else notes


def _add_by_tokens(rules: dict[str, Split], notes: list[str], batch: Any, *, has_collate: bool) -> None:
    rule = by_tokens(1, multiple_of=1)
    try:
        with warnings.catch_warnings(action="ignore"):  # that every sample is longer than one token
            groups = rule.groups(batch if has_collate else pytree.sliceable(batch))
    except (SplitError, BatchError):
        notes.append(
            "by_tokens was not tried: lengths are read off an attention_mask; splits=[acc.by_tokens(n, length=...)] "
            "names another."
        )
        return
    total = sum(size * length for size, length in zip(groups.sizes, groups.padded_lengths, strict=True))
    rules["by_tokens"] = by_tokens(max(total // 3, max(groups.padded_lengths)), multiple_of=1)


def _name_of(item: Any, rule: Split) -> str:
    if isinstance(item, int):
        return f"{item} at a time"
    limit = getattr(rule, "max_tokens", None)
    return f"by_tokens({limit})" if limit is not None else repr(rule)
