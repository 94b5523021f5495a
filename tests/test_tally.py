"""Sums and weights of a window, on the host and on a device."""

from __future__ import annotations

import math

import pytest
import torch

from accumulus.tally import Tally, power_of_two


@pytest.mark.parametrize("weight", [1, 2, 3, 7, 8, 9, 1000, 0.3, 1e-12, 5e30])
def test_power_of_two_is_exact_and_not_above(weight):
    for found in (power_of_two(weight), float(power_of_two(torch.tensor(float(weight), dtype=torch.float64)))):
        assert math.frexp(found)[0] == 0.5
        assert found <= weight < 2 * found


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf, -3.0])
def test_what_has_no_power_of_two_has_one(weight):
    assert float(power_of_two(torch.tensor(weight))) == 1.0


def test_sums_of_tensors_equal_sums_of_numbers():
    numbers, tensors = Tally(), Tally()
    for value, weight in ((1.5, 2), (2.5, 0.5), (-3.0, 4)):
        numbers.add(value, weight)
        tensors.add(torch.tensor(value), torch.tensor(weight))
    tensors.add(torch.tensor(math.nan), torch.tensor(0))
    assert float(tensors.total()) == numbers.total() == 1.0
    assert float(tensors.total_weight()) == numbers.total_weight() == 6.5
    assert float(tensors.mean()) == numbers.mean()
    assert numbers.is_valid() is True
    assert bool(tensors.is_valid())


def test_an_empty_tally_has_no_mean():
    assert math.isnan(Tally().mean())
