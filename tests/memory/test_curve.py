"""The curve through a few runs: exact for what grows as a polynomial, on straight lines for what does not compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc
from accumulus.memory import MemoryCurve
from accumulus.memory.live import PARTS, Timeline

NUM_MOMENTS = 6


def timeline(table, events=None):
    phases = np.array([0, 0, 1, 1, 2, 2], dtype=np.int8)
    return Timeline(np.array(table, dtype=np.int64), phases, np.array(events or [1, -1] * 3, dtype=np.int8))


def test_maximum_of_lines():
    """Every moment is a line in the size; the peak is the highest, whichever that is."""
    generator = np.random.default_rng(0)
    start = generator.integers(0, 10_000, (NUM_MOMENTS, len(PARTS)))
    slope = generator.integers(0, 50, (NUM_MOMENTS, len(PARTS)))
    found = MemoryCurve(
        {size: timeline(start + size * slope) for size in (2, 50, 100)}, precision="fp32", method="fake", note="a note"
    )
    for size in range(1, 200):
        table = (start + size * slope)[::2]  # what is made at even moments is freed at odd ones
        estimate = found.at(size)
        assert estimate.peak_bytes == table.sum(axis=1).max() == sum(estimate.parts.values())
        assert (estimate.microbatch, estimate.precision, estimate.method) == (size, "fp32", "fake")
        assert estimate.note == "a note"
    assert "sizes=[2, 50, 100]" in repr(found)


@given(st.integers(0, 10**9), st.integers(0, 10**4), st.integers(0, 100), st.integers(1, 300))
def test_parabolas(constant, linear, square, size):
    table = {
        n: timeline(np.full((NUM_MOMENTS, len(PARTS)), constant + linear * n + square * n * n)) for n in (2, 90, 300)
    }
    right = len(PARTS) * (constant + linear * size + square * size * size)
    assert MemoryCurve(table, precision="fp32", method="fake").at(size).peak_bytes == pytest.approx(right, abs=10)


def test_runs_that_do_not_compare_are_joined_by_straight_lines():
    low, high = np.full((NUM_MOMENTS, len(PARTS)), 100), np.full((NUM_MOMENTS, len(PARTS)), 300)
    found = MemoryCurve(
        {10: timeline(low), 20: timeline(high, events=[1, 1, 1, -1, -1, -1])}, precision="fp32", method="measured"
    )
    assert [found.at(size).peak_bytes for size in (5, 10, 15, 20, 30)] == [0, 600, 1200, 1800, 3000]
    with_phases = low.copy()
    with_phases[4] = 500
    found = MemoryCurve(
        {10: timeline(with_phases), 20: timeline(high, [1, 1, 1, -1, -1, -1])}, precision="fp32", method="measured"
    )
    assert found.at(11).phase == "update"
    assert found.at(20).phase == "forward"


@given(st.integers(0, 5000), st.integers(1, 40))
def test_largest_against_brute_force(limit, at_most):
    table = {n: timeline(np.full((NUM_MOMENTS, len(PARTS)), 7 * n + 3)) for n in (2, 4)}
    found = MemoryCurve(table, precision="fp32", method="fake")
    right = max([n for n in range(1, at_most + 1) if len(PARTS) * (7 * n + 3) <= limit], default=0)
    assert found.largest(limit, at_most) == right


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4", None])
def test_sizes_that_are_none(size):
    found = MemoryCurve({2: timeline(np.ones((NUM_MOMENTS, len(PARTS))))}, precision="fp32", method="fake")
    with pytest.raises(acc.SplitError, match="microbatch must be an integer of at least 1"):
        found.at(size)
    with pytest.raises(acc.SplitError, match="at_most must be an integer of at least 1"):
        found.largest(10, size)


@pytest.mark.parametrize("limit", [-1, float("nan"), True, "24GiB", None])
def test_limits_that_are_none(limit):
    found = MemoryCurve({2: timeline(np.ones((NUM_MOMENTS, len(PARTS))))}, precision="fp32", method="fake")
    with pytest.raises(acc.MemoryLimitError, match="at least 0"):
        found.largest(limit, 10)
