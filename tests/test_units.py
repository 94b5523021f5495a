from __future__ import annotations

import math

import pytest

from accumulus import units


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (25 * 2**30, "25.0 GiB"), (5e15, "4547 TiB")],
)
def test_bytes(num_bytes, text):
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (950, "950"), (12_345, "12.3k"), (1.2e6, "1.20M"), (4e9, "4.00G")]
)
def test_counts(count, text):
    assert units.format_count(count) == text


def test_rates():
    assert units.format_rate(12_345, "tokens") == "12.3k tokens/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (125, "2 min 05 s"),
        (12_000, "3 h 20 min"),
        (math.inf, "unknown"),
    ],
)
def test_durations(seconds, text):
    assert units.format_duration(seconds) == text
