"""Laws of the rows against a slow search over every size, on curves that are straight lines."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulus.run.plan_rows import Limit, choose, choose_size, list_sizes, make_rows

from .lines import Line


def limit(size):
    return Limit(limit_bytes=size, source="given")


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 300), st.integers(1, 3000))
def test_the_choice_is_safe_and_no_safe_power_of_two_needs_fewer_micro_batches(fixed, each, batch_size, fit_bytes):
    curve = Line(fixed, each)
    size = choose_size(curve, fit_bytes, batch_size=batch_size)
    safe = [n for n in range(1, batch_size + 1) if curve.at(n).peak_bytes <= fit_bytes]
    if not safe:
        assert size == 0
        return
    assert size in safe
    candidates = [n for n in safe if n == batch_size or n & (n - 1) == 0]
    fewest = min(math.ceil(batch_size / n) for n in candidates)
    assert math.ceil(batch_size / size) == fewest
    if batch_size % fewest == 0:
        assert size * fewest == batch_size


@given(st.integers(1, 300), st.lists(st.integers(0, 300)))
def test_sizes_are_ordered_and_hold_the_powers_the_batch_and_the_others(batch_size, also):
    also = [size for size in also if size <= batch_size]
    sizes = list_sizes(batch_size, also=also)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1 and sizes[-1] == batch_size
    powers = {2**k for k in range(10) if 2**k <= batch_size}
    assert set(sizes) == powers | {batch_size} | (set(also) - {0})


@pytest.mark.parametrize(
    ("batch_size", "largest", "expected"),
    [
        (256, 256, 256),
        (256, 255, 128),
        (100, 100, 100),
        (100, 99, 50),
        (100, 40, 25),
        (70, 40, 32),
        (96, 80, 48),
        (7, 6, 4),
        (1, 1, 1),
    ],
)
def test_sizes_that_are_chosen(batch_size, largest, expected):
    assert choose_size(Line(0, 1), largest, batch_size=batch_size) == expected


def test_rows_say_what_the_curve_says():
    rows = make_rows({"fp32": Line(100, 10), "bf16": Line(120, 5)}, limit(200), batch_size=12, asked=3)
    assert [row.microbatch for row in rows if row.precision == "fp32"] == [1, 2, 3, 4, 6, 8, 10, 12]
    for row in rows:
        line = Line(100, 10) if row.precision == "fp32" else Line(120, 5)
        assert row.peak_bytes == line.at(row.microbatch).peak_bytes == sum(row.parts.values())
        assert row.num_microbatches == math.ceil(12 / row.microbatch)
        assert row.limit_ratio == row.peak_bytes / 200
        assert row.verdict == ("no" if row.peak_bytes > 200 else "tight" if row.peak_bytes > 180 else "yes")
        assert row.to_dict()["fits"] == (row.peak_bytes <= 200)


@pytest.mark.parametrize(
    ("curves", "fast", "expected", "told"),
    [
        ({"fp32": Line(100, 1), "bf16": Line(100, 1)}, "bf16", ("bf16", 16), "the whole batch fits at once"),
        ({"fp32": Line(100, 10), "bf16": Line(100, 10)}, "bf16", ("bf16", 8), "largest power of two within 90%"),
        (
            {"fp32": Line(100, 10), "bf16": Line(300, 10)},
            "bf16",
            ("fp32", 8),
            "bf16, the choice for speed (it has units), does not fit",
        ),
        ({"fp32": Line(100, 10)}, "bf16", ("fp32", 8), "is not among --precisions"),
        ({"fp32": Line(185, 10), "bf16": Line(190, 1)}, "fp32", ("fp32", 1), "beyond 90%"),
        ({"fp32": Line(201, 1)}, "fp32", None, ""),
    ],
)
def test_choices(curves, fast, expected, told):
    rows = make_rows(curves, limit(200), batch_size=16, asked=16)
    choice = choose(rows, curves, limit(200), fast=fast, fast_reason="it has units", batch_size=16)
    assert (choice and (choice.row.precision, choice.row.microbatch)) == expected
    assert choice is None or told in " ".join(choice.reasons)
