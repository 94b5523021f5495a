"""Buckets against the bits that struct gives; shares against torch's own casts."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulus.numerics.formats import FORMATS, FP16
from accumulus.numerics.histogram import EDGES, FIRST_NONFINITE, NUM_BUCKETS, Histogram, buckets_of


def slow_bucket(value):
    """Exponent and the first four bits of the fraction, read from the bytes of a float32."""
    bits = int.from_bytes(struct.pack(">f", value), "big") & 0x7FFFFFFF
    return (bits >> 23) * 16 + ((bits >> 19) & 15)


def histogram_of(values):
    counts = torch.bincount(buckets_of(values).flatten(), minlength=NUM_BUCKETS).numpy()
    return Histogram(counts=counts, largest=float(values[torch.isfinite(values)].abs().max()))


def spread(count=20_000):
    """Numbers of all magnitudes that matter, zeros among them."""
    values = torch.randn(count) * torch.exp2(torch.randint(-40, 25, (count,)).float())
    values[::50] = 0.0
    return values


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_buckets_are_those_of_the_bits(values):
    found = buckets_of(torch.tensor(values, dtype=torch.float32)).tolist()
    assert found == [slow_bucket(value) for value in values]


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_a_number_lies_between_its_buckets_edges(value):
    bucket = int(buckets_of(torch.tensor([value])))
    assert EDGES[bucket] <= value < EDGES[bucket + 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_count_as_float32(dtype):
    values = torch.tensor([0.0, 1.0, -3.0, 1e-3, math.inf], dtype=dtype)
    assert torch.equal(buckets_of(values), buckets_of(values.float()))


def test_exponents_against_frexp():
    values = spread()
    expected = {}
    for value in values.tolist():
        if value:
            power = math.frexp(value)[1] - 1
            expected[power] = expected.get(power, 0) + 1
    assert histogram_of(values).exponents() == expected


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-9])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_shares_are_those_of_real_casts(form, scale):
    values = spread()
    nonzero = values[values != 0] * scale
    cast = nonzero.to(form.dtype).float()
    beyond = nonzero.abs() >= form.overflow_from
    histogram = histogram_of(values)
    inside = 1e-3  # numbers in the last bucket of fp16, which is shared out in proportion
    assert histogram.zeroed_ratio(form, scale) == pytest.approx(float((cast == 0).double().mean()), abs=1e-9)
    assert histogram.overflow_ratio(form, scale) == pytest.approx(float(beyond.double().mean()), abs=inside)
    subnormal = (cast != 0) & (cast.abs() < form.smallest_normal)
    assert histogram.subnormal_ratio(form, scale) == pytest.approx(float(subnormal.double().mean()), abs=1e-4)
    zeroed = nonzero.abs()[cast == 0].double().sum() / nonzero.abs().double().sum()
    assert histogram.lost_ratio(form, scale) == pytest.approx(float(zeroed), rel=0.05, abs=1e-12)


def test_counts_and_what_they_are_of():
    histogram = histogram_of(torch.tensor([0.0, 1.0, math.nan, math.inf, -2.0]))
    assert (histogram.num_counted, histogram.num_zero, histogram.num_nonfinite, histogram.num_nonzero) == (5, 1, 2, 2)
    assert histogram.quantile(0.0) == 1.0
    assert histogram.quantile(1.0) == 2.0


def test_nothing_but_zeros():
    histogram = Histogram(counts=np.bincount([0, 0], minlength=NUM_BUCKETS), largest=0.0)
    assert histogram.zeroed_ratio(FP16) == histogram.lost_ratio(FP16) == histogram.quantile(0.5) == 0.0
    assert histogram.exponents() == {}
    assert not histogram.overflows(FP16)


def test_the_last_edge_is_the_end_of_float32():
    assert EDGES[FIRST_NONFINITE] == 2.0**128
    assert EDGES[FIRST_NONFINITE - 1] < torch.finfo(torch.float32).max
