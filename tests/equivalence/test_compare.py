from __future__ import annotations

import math

import pytest
import torch

from accumulus.equivalence.compare import LARGEST_ALLOWED, Floor, combined_error, differences, gradient_errors, relative
from accumulus.equivalence.runs import Outcome


def outcome(loss=1.0, buffers=None, **gradients):
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()}
    return Outcome(loss, tensors, {name: torch.tensor(value) for name, value in (buffers or {}).items()})


def test_relative_error():
    right = torch.tensor([3.0, 4.0])
    assert relative(right, right) == 0.0
    assert relative(torch.tensor([3.0, 4.5]), right) == pytest.approx(0.1)
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative(torch.tensor([3.0, math.nan]), right) == math.inf
    assert relative(torch.zeros(3), right) == math.inf


def test_a_gradient_that_is_zero_but_for_rounding_is_judged_beside_the_others():
    right, found = outcome(w=[1.0, 0.0], b=[1e-17]), outcome(w=[1.0, 0.0], b=[-1e-17])
    assert gradient_errors(found, right)["b"] < 1e-12
    assert gradient_errors(outcome(w=[1.0, 0.0], b=[1e-3]), outcome(w=[1.0, 0.0], b=[1e-4]))["b"] > 1


def test_the_whole_gradient_is_one_vector():
    assert combined_error(outcome(a=[3.0], b=[4.5]), outcome(a=[3.0], b=[4.0])) == pytest.approx(0.1)


def test_what_is_allowed_follows_the_floor_and_has_a_lid():
    floor = Floor(torch.float64, {"a": 1e-16, "b": 1e-9, "c": 0.3})
    assert floor.allowed("b") == LARGEST_ALLOWED[torch.float64]  # another quantity's floor raises it, a little
    assert Floor(torch.float64, {"a": 1e-16}).allowed("a") == 1e-12
    assert Floor(torch.float64, {"a": 1e-10}).allowed("a") == pytest.approx(3e-9)
    assert Floor(torch.float64, {"a": 0.3}).allowed("a") == LARGEST_ALLOWED[torch.float64]
    assert Floor(torch.float32, {}).allowed("a") == 5e-6


def test_the_worst_split_of_each_quantity_comes_first():
    right = outcome(a=[1.0], b=[1.0], buffers={"count": 1})
    found = {"one": outcome(a=[1.0], b=[1.2], buffers={"count": 2}), "two": outcome(a=[1.5], b=[1.1])}
    found["two"] = outcome(a=[1.5], b=[1.1], buffers={"count": 1})
    rows = differences(found, right, Floor(torch.float64, {}))
    assert [(row.name, row.split) for row in rows] == [("count", "one"), ("a", "two"), ("b", "one"), ("loss", "one")]
    assert [row.is_equal for row in rows] == [False, False, False, True]


def test_a_loss_that_cancels_is_judged_beside_its_gradient():
    rows = differences({"one": outcome(1e-17, w=[1.0])}, outcome(-2e-17, w=[1.0]), Floor(torch.float64, {}))
    assert all(row.is_equal for row in rows)
