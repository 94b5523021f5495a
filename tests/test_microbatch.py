"""How a batch is cut: sizes add up, collation is per micro-batch, and nothing is moved that need not be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc
from accumulus.microbatch import Microbatches, choose_split, to_device

CPU = torch.device("cpu")


@given(st.integers(1, 200), st.integers(1, 40))
def test_by_count_is_even_and_complete(num_samples, count):
    sizes = acc.by_count(count).sizes(num_samples)
    assert sum(sizes) == num_samples
    assert len(sizes) == min(count, num_samples)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)  # memory peaks in the first


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_number_is_the_size(num_samples, size):
    sizes = choose_split(size).sizes(num_samples)
    assert sum(sizes) == num_samples
    assert set(sizes[:-1]) <= {size}
    assert 1 <= sizes[-1] <= size


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "8", None, [4]])
def test_sizes_that_cannot_be(bad):
    with pytest.raises(acc.SplitError, match="at least 1"):
        choose_split(bad)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "8", None])
def test_counts_that_cannot_be(bad):
    with pytest.raises(acc.SplitError, match="at least 1"):
        acc.by_count(bad)


def test_auto_begins_with_the_whole_batch():
    assert list(choose_split("auto").sizes(1000)) == [1000]
    with pytest.raises(acc.SplitError, match="number of samples or a rule"):
        choose_split("automatic")


class Wrong:
    def sizes(self, num_samples):
        return [num_samples - 1]


def test_a_rule_of_ones_own_must_add_up():
    with pytest.raises(acc.SplitError, match="add up"):
        Microbatches(torch.zeros(4), Wrong(), CPU, collate=None)


def test_marks_the_last():
    parts = Microbatches(torch.arange(5), choose_split(2), CPU, collate=None)
    assert [(part.tolist(), is_last) for part, is_last in parts] == [([0, 1], False), ([2, 3], False), ([4], True)]


def test_collates_each_micro_batch_when_it_is_used():
    calls = []
    parts = iter(Microbatches(list(range(5)), choose_split(2), CPU, collate=lambda some: calls.append(some) or some))
    assert calls == []
    next(parts)
    assert calls == [[0, 1]]


@pytest.mark.parametrize("batch", [torch.zeros(3), {"x": 1}, "text", 5, iter([1])])
def test_with_collate_a_batch_is_a_list(batch):
    with pytest.raises(acc.BatchError, match="list of samples"):
        Microbatches(batch, choose_split(1), CPU, collate=list)


def test_an_empty_list_is_refused():
    with pytest.raises(acc.BatchError, match="0 samples"):
        Microbatches([], choose_split(1), CPU, collate=list)


def test_on_the_cpu_nothing_is_moved():
    tree = {"x": torch.zeros(2)}
    assert to_device(tree, CPU) is tree


def test_elsewhere_every_tensor_is():
    moved = to_device({"x": torch.zeros(2), "n": 3, "y": [torch.ones(1)]}, torch.device("meta"))
    assert moved["x"].device.type == moved["y"][0].device.type == "meta"
    assert moved["n"] == 3
