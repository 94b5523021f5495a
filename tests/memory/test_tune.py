"""The search: ends, in about ten steps, with a size that is nearly the fastest, for every curve of speeds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulus.errors import StateError
from accumulus.memory.tune import MAX_STEPS, Tuning


def search(speed, **scope):
    """Runs a search to its end; the sizes it used, and the search."""
    tuning, used = Tuning(**scope), []
    while tuning.choice is None:
        used.append(tuning.next_size())
        tuning = tuning.record(used[-1], speed(used[-1]), tells=len(used) > 1)
    return tuning, used


def rising(half):
    """As on an accelerator: more samples are faster until it is full."""
    return lambda size: size / (size + half)


def peaked(half, cache):
    """As on many CPUs: beyond some size the caches overflow."""
    return lambda size: size / (size + half) / (1 + size / cache)


curves = st.one_of(
    st.builds(rising, st.floats(0.01, 500)),
    st.builds(peaked, st.floats(0.01, 100), st.floats(1, 5000)),
    st.just(lambda size: 1.0),
)


@given(curve=curves, whole=st.integers(1, 5000), part=st.floats(0.01, 1.0))
def test_the_choice_is_nearly_the_fastest_that_fits(curve, whole, part):
    largest = max(1, int(whole * part))
    tuning, used = search(curve, whole=whole, largest=largest)
    sizes = tuning.sizes()
    assert max(used) <= largest and tuning.choice <= largest
    assert len(used) <= MAX_STEPS
    assert curve(tuning.choice) >= 0.9 * max(map(curve, sizes))  # 0.95 of the best that was tried


@given(curve=curves, whole=st.sampled_from([64, 256, 512]))
def test_with_few_sizes_to_choose_from_none_is_missed(curve, whole):
    tuning, _ = search(curve, whole=whole, largest=whole)
    best = max(map(curve, tuning.sizes()))
    smallest = min(size for size in tuning.sizes() if curve(size) >= 0.95 * best)
    assert curve(tuning.choice) >= 0.95 * best * 0.98
    assert tuning.choice <= 4 * smallest


@pytest.mark.parametrize(
    "speeds",
    [
        {256: 150, 128: 360, 64: 400, 32: 395, 16: 465, 8: 490, 4: 405, 2: 318, 1: 200},
        {256: 220, 128: 475, 64: 500, 32: 530, 16: 560, 8: 470, 4: 380, 2: 270, 1: 160},
        {256: 5000, 128: 4900, 64: 4200, 32: 2900, 16: 1600, 8: 850, 4: 430, 2: 220, 1: 110},
        {256: 100, 128: 99, 64: 98, 32: 97, 16: 70, 8: 40, 4: 22, 2: 12, 1: 6},
    ],
    ids=["cpu fp32", "cpu bf16", "accelerator", "flat"],
)
def test_trying_costs_little_of_a_run_of_sixty_steps(speeds):
    """Measured speeds of the built-in task on two cores, and two shapes of an accelerator's."""
    tuning, used = search(speeds.__getitem__, whole=256, largest=256)
    best = max(speeds.values())
    seconds = sum(1 / speeds[size] for size in used) + (60 - len(used)) / speeds[tuning.choice]
    assert seconds <= 1.05 * 60 / best


def test_sizes_cut_the_batch_evenly():
    assert Tuning(whole=256, largest=100).sizes() == [86, 43, 22, 11, 6, 3, 2, 1]
    assert Tuning(whole=10, largest=10).sizes() == [10, 5, 3, 2, 1]
    assert Tuning(whole=8192, largest=4096, smallest=1000).sizes() == [4096, 2048, 1024, 1000]
    assert Tuning(whole=1, largest=1).sizes() == [1]


def test_one_size_needs_no_search():
    tuning, used = search(lambda size: 1.0, whole=1, largest=1)
    assert used == [1] and tuning.choice == 1


def test_a_disturbed_step_is_measured_again():
    """The best is not chosen on the strength, nor dropped on the weakness, of one step."""
    calls = []

    def speed(size):
        calls.append(size)
        return 2.0 if size == 64 and calls.count(64) == 1 else rising(10)(size)

    tuning, used = search(speed, whole=256, largest=256)
    assert used.count(tuning.choice) >= 2


def test_steps_that_tell_nothing_are_counted_and_not_believed():
    tuning = Tuning(whole=64, largest=64)
    for _ in range(MAX_STEPS):
        assert tuning.choice is None
        tuning = tuning.record(tuning.next_size(), 1e9, tells=False)
    assert tuning.choice == 64 and not tuning.speeds


def test_limited_keeps_what_was_measured_of_the_sizes_that_are_left():
    tuning = Tuning(whole=64, largest=64).record(64, 3.0).record(16, 2.0).record(8, 1.0)
    limited = tuning.limited(16)
    assert limited.speeds == {16: 2.0, 8: 1.0} and limited.counts == {16: 1, 8: 1}
    assert max(limited.sizes()) == 16


def test_state_holds_every_field():
    tuning = Tuning(whole=64, largest=32, smallest=2).record(8, 3.5).record(16, 2.0, tells=False)
    for one in (tuning, search(rising(9), whole=64, largest=64)[0]):
        assert Tuning.from_state(json.loads(json.dumps(one.state_dict()))) == one
    for wrong in ({}, {**tuning.state_dict(), "speeds": [1]}, {**tuning.state_dict(), "whole": "x"}):
        with pytest.raises(StateError, match="not the saved state"):
            Tuning.from_state(wrong)
