"""`windows`: the last of each window is marked, whatever the length, and no more than one micro-batch is held ahead."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc


@given(st.integers(0, 20), st.integers(1, 8))
def test_marks_the_last_of_each_and_the_last_of_all(count, size):
    found = [(part, bool(is_last)) for part, is_last in acc.windows(iter(range(count)), size=size)]
    right = [(i, (i + 1) % size == 0 or i == count - 1) for i in range(count)]
    assert found == right


def test_sizes_may_grow_with_the_windows_number():
    flags = [bool(is_last) for _, is_last in acc.windows(range(9), size=lambda index: index + 1)]
    assert flags == [True, False, True, False, False, True, False, False, True]


def test_looks_one_ahead_and_holds_no_more():
    class Held:
        pass

    made = []

    def produce():
        for _ in range(6):
            item = Held()
            made.append(weakref.ref(item))
            yield item
            del item

    for number, (_, _) in enumerate(acc.windows(produce(), size=3)):
        gc.collect()
        alive = [i for i, ref in enumerate(made) if ref() is not None]
        assert len(made) <= number + 2
        assert set(alive) <= {number, number + 1}


def test_counts_the_samples():
    batches = [torch.zeros(3, 2), {"x": torch.zeros(5)}, torch.tensor(1.0), "text", (torch.zeros(2), ["a", "b"])]
    assert [is_last.num_samples for _, is_last in acc.windows(batches, size=2)] == [3, 5, 1, 1, 2]


def test_samples_that_disagree_are_not_counted():
    """A scalar could then be a mean over anything."""
    ((_, flag),) = acc.windows([{"x": torch.zeros(4, 1), "mask": torch.zeros(1, 3)}], size=1)
    assert flag.num_samples is None


def test_flags_are_plain_in_print_and_comparison():
    ((_, flag),) = acc.windows([torch.zeros(3)], size=4)
    assert flag == True  # noqa: E712
    assert repr(flag) == "True"


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4", lambda index: 0])
def test_sizes_that_cannot_be(size):
    with pytest.raises(acc.SplitError, match="at least 1"):
        list(acc.windows(range(3), size=size))


class Opaque:
    def __init__(self):
        self.x = torch.ones(3)


@pytest.mark.parametrize("microbatch", [["a", "b"], [], None, {"t": ["a", "b"]}, Opaque(), (["a"], ["b"])])
def test_what_is_not_certain_is_not_counted(microbatch):
    ((_, flag),) = acc.windows([microbatch], size=1)
    assert flag.num_samples is None
