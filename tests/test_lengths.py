"""How long samples are: asked, read off a field, or inferred; else one sentence that says what to do."""

from __future__ import annotations

import dataclasses
from collections import UserDict

import numpy as np
import pytest
import torch

import accumulus as acc
from accumulus.lengths import lengths_of


@dataclasses.dataclass
class Sample:
    input_ids: list
    labels: list


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (b"abc", 3),
        ("abcd", 4),
        ([1, 2], 2),
        ([], 0),
        (torch.arange(5), 5),
        (np.arange(6), 6),
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": torch.arange(4), "labels": 1}, 4),
        (UserDict({"input_ids": [1, 2, 3]}), 3),
        (Sample([1, 2], [3]), 2),
        ({"attention_mask": [1, 1, 0, 0], "input_ids": [1, 2, 0, 0]}, 2),
        ({"attention_mask": torch.tensor([0, 0, 1, 1, 1]), "input_ids": [0] * 5}, 3),
        ({"attention_mask": [0, 0], "input_ids": [0, 0]}, 0),
        ({"attention_mask": [], "input_ids": []}, 0),
    ],
)
def test_inferred(sample, length):
    assert lengths_of([sample], None) == [length]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("labels", 4),  # what is ignored before the first label is a prompt
        ("inner.keep", 2),
        ("keep", 2),
        ("inner.1", 3),
        ("mask", 3),
    ],
)
def test_read_off_a_field(name, length):
    sample = {
        "labels": [-100, -100, 5, 6, -100],
        "mask": np.array([0.0, 1, 0.5, 1]),
        "inner": {"keep": torch.tensor([False, True, True, False]), "1": [1, 2, 3]},
    }
    assert lengths_of([sample, sample], name) == [length, length]


def test_asked_of_a_function():
    samples = [(1, "ab"), (2, "abc")]
    assert lengths_of(samples, lambda sample: len(sample[1])) == [2, 3]
    assert lengths_of(samples, lambda sample: torch.tensor(7)) == [7, 7]
    assert lengths_of(samples, lambda sample: np.int64(8)) == [8, 8]


@pytest.mark.parametrize("bad", [-1, 2.5, None, "3", True, torch.ones(2)])
def test_functions_that_give_no_length(bad):
    with pytest.raises(acc.SplitError, match="at least 0"):
        lengths_of([b"a"], lambda sample: bad)


@pytest.mark.parametrize(
    ("sample", "name", "says"),
    [
        ((1, [2]), None, "'0', '1'.*length="),
        ({"text": "abc"}, None, "'text'"),
        (5, None, "no fields"),
        ([[1], [2]], None, "length="),
        (torch.zeros(2, 3), None, "length="),
        ({"input_ids": torch.zeros(1, 7)}, None, r"'input_ids' .*\(1, 7\).*one dimension"),
        ({"input_ids": [[1, 2]]}, None, "'input_ids' .*a list"),
        ({"text": "abc"}, "mask", "no field 'mask'.*'text'"),
        ({"text": "abc"}, "text", "no length can be read"),
        ({"x": torch.zeros(2, 2)}, "x", "no length can be read"),
        ({"x": [[1], [1, 2]]}, "x", "no length can be read"),
        ({"x": [0.5]}, "x", "neither a mask"),
    ],
)
def test_what_is_not_known(sample, name, says):
    with pytest.raises(acc.SplitError, match=says):
        lengths_of([sample], name)
