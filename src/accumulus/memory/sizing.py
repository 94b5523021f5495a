"""Rules with another size: what recovery and tuning make of the user's own rule.

A micro-batch's *load* is what its rule counts: tokens where samples are grouped by length, samples elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from accumulus import pytree
from accumulus.grouping import ByTokens, Once
from accumulus.microbatch import ByCount, BySize, Groups, Microbatches, Split
from accumulus.step import TrainStep

__all__ = ["at_most", "elements_of", "load_of", "resized", "sample_load_of", "smallest_of", "unit_of"]


@dataclass(frozen=True, slots=True)
class Even:
    """Micro-batches of at most `size` samples, as few as will do, nearly equal: no short one is left over."""

    size: int

    def sizes(self, num_samples: int) -> Sequence[int]:
        """The larger ones first."""
        return ByCount(-(-num_samples // self.size)).sizes(num_samples)


@dataclass(frozen=True, slots=True)
class Finer:
    """Another rule's micro-batches, those of more than `size` samples cut into as few nearly equal ones as will do."""

    rule: Any
    size: int

    def groups(self, batch: Any) -> Groups:
        """The rule's groups, in its order."""
        if hasattr(self.rule, "groups"):
            whole: Groups = self.rule.groups(batch)
        else:
            num_samples = len(batch) if isinstance(batch, Sequence) else batch.length
            whole = Groups(order=range(num_samples), sizes=self.rule.sizes(num_samples))
        cut = [(size, index) for index, size in enumerate(whole.sizes) for size in self._cut(size)]
        columns, parents = whole.columns, [index for _, index in cut]
        return Groups(
            order=whole.order,
            sizes=[size for size, _ in cut],
            padded_lengths=[whole.padded_lengths[index] for index in parents] if whole.padded_lengths else (),
            columns=None if columns is None else lambda index, leaf: columns(parents[index], leaf),
        )

    def _cut(self, size: int) -> Sequence[int]:
        return Even(self.size).sizes(size)


def at_most(rule: Split, load: int) -> Split:
    """A rule whose micro-batches are no larger than a load, if single samples are not.

    Args:
        rule: any.
        load: at least 1.
    """
    if isinstance(rule, ByTokens):
        return resized(rule, min(rule.max_tokens, load))
    if isinstance(rule, (BySize, Even)):
        return Even(min(rule.size, load))
    return Even(load) if isinstance(rule, ByCount) else Finer(rule, load)


def resized(rule: Split, load: int) -> Split:
    """The same kind of rule with another size.

    Args:
        rule: a number of samples, or a token budget.
        load: at least 1.
    """
    if isinstance(rule, ByTokens):  # not the user's budget, so a longer sample is no reason to complain
        return replace(rule, max_tokens=load, strict=False, _warned=Once(is_said=True))
    return Even(load)


def load_of(parts: Microbatches) -> int:
    """Samples or tokens in the largest micro-batch."""
    return max(parts.sizes) if parts.peak_tokens is None else parts.peak_tokens


def sample_load_of(parts: Microbatches) -> int:
    """What the largest sample counts for in the load."""
    return 1 if parts.longest is None else parts.longest


def elements_of(part: Any, num_samples: int) -> int:
    """Numbers in the tensors of a micro-batch that grow with its samples: a measure by which samples are compared.

    Where tensors of two dimensions or more have a row for each sample, those that have not are shared by all, as a mask
    over the length is: in a small micro-batch they would make each sample look large. Else all are counted, as where
    samples are packed one after another.

    Args:
        part: a micro-batch, or a whole batch.
        num_samples: samples in it.
    """
    leaves, _ = pytree.flatten(part, lambda node, path: False, strict=False)
    arrays = [leaf.value for leaf in leaves if pytree.is_array(leaf.value)]
    by_row = [array for array in arrays if array.ndim and len(array) == num_samples]
    counted = by_row if any(array.ndim > 1 for array in by_row) else arrays
    return sum(pytree.num_elements(array) for array in counted)


def smallest_of(step: TrainStep) -> int:
    """The fewest samples that may go through the model together: BatchNorm in training mode refuses a single one."""
    return 2 if any(isinstance(m, _BatchNorm) and m.training for m in step.model.modules()) else 1


def unit_of(rule: Split) -> str:
    """What a load counts: "samples" or "tokens"."""
    return "tokens" if isinstance(rule, ByTokens) else "samples"
