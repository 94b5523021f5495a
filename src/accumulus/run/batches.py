"""Which samples make up which batch: a function of the seed and the step, so that a resumed run sees the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Batches:
    """Shuffled epochs, cut into batches; the last one of an epoch may be smaller.

    Args:
        data: the samples.
        batch_size: samples of a batch.
        seed: of the shuffling.
        length: length of a sample. A batch is then sorted by it, so that micro-batches hold similar lengths and
            little padding; what a step learns does not depend on the order within its batch.

    Example:
        >>> batches = Batches("abcde", batch_size=2, seed=0)
        >>> [len(batches[step]) for step in range(3)]
        [2, 2, 1]
        >>> sorted(batches[0] + batches[1] + batches[2])
        ['a', 'b', 'c', 'd', 'e']
    """

    def __init__(
        self,
        data: Sequence[Any],
        *,
        batch_size: int,
        seed: int,
        length: Callable[[Any], int] | None = None,
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.length = length
        self.per_epoch = math.ceil(len(data) / batch_size)
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, step: int) -> list[Any]:
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self.data), seed=self.seed, epoch=epoch)
        start = position * self.batch_size
        samples = [self.data[index] for index in self._order[start : start + self.batch_size]]
        return samples if self.length is None else sorted(samples, key=self.length, reverse=True)


def shuffled(size: int, *, seed: int, epoch: int) -> list[int]:
    """An order of `size` samples that depends on the arguments only, and not on the global random state."""
    generator = torch.Generator().manual_seed(hash((seed, epoch)) % 2**63)  # tuples of ints hash the same everywhere
    return torch.randperm(size, generator=generator).tolist()


def fingerprint(data: Sequence[Any]) -> str:
    """A short name of the samples, by which a resumed run notices that its data has changed.

    Args:
        data: samples; only those that are bytes or strings are looked at, others are counted.

    Returns:
        16 hexadecimal digits.

    Cost:
        Reads all samples once, about a gigabyte a second.
    """
    digest = hashlib.blake2b(str(len(data)).encode(), digest_size=8)
    for index in range(len(data)):
        sample = data[index]
        if not isinstance(sample, (bytes, str)):
            break
        content = sample.encode() if isinstance(sample, str) else sample
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
