"""How much too large a micro-batch is."""

from __future__ import annotations

import json
import math

import pytest

from accumulus.memory.bound import NO_BOUND, Bound


def test_samples_of_the_known_size_count_in_proportion():
    bound = Bound(elements=1000, sample_elements=100)
    assert bound.excess(1000, 10) == 1
    assert bound.excess(500, 5) == 0.5
    assert bound.excess(1000, 20) == 1  # shorter ones: at most in proportion


def test_longer_samples_may_need_their_square():
    bound = Bound(elements=1000, sample_elements=100)
    assert bound.excess(1000, 5) == 2
    assert bound.excess(400, 1) == 1.6


def test_without_a_bound_all_fits():
    assert NO_BOUND.excess(10**12, 1) == 0
    assert Bound(1000, 100).excess(0, 4) == 0


def test_widened_and_scaled():
    bound = Bound(0, 0).widened(60, 3).widened(50, 2)
    assert bound == Bound(60, 25)
    assert bound.scaled(0.5) == Bound(30, 25)


@pytest.mark.parametrize("bound", [Bound(10.0, 2.0), NO_BOUND])
def test_state(bound):
    saved = json.loads(json.dumps(bound.state_dict()))
    assert Bound.from_state(saved) == bound
    assert math.isfinite(saved["sample_elements"])
