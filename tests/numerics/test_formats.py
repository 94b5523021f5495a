"""A format's limits are where torch's own casts change their mind."""

from __future__ import annotations

import math

import pytest
import torch

from accumulus.numerics.formats import FORMATS, format_of


def cast(value, form):
    return torch.tensor(value, dtype=torch.float64).to(form.dtype).double().item()


def beside(value, direction):
    return math.nextafter(value, direction)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_limits_are_those_of_torchs_casts(form):
    assert cast(form.largest, form) == form.largest
    if form.name in ("fp16", "bf16", "e5m2"):
        assert cast(form.overflow_from, form) == math.inf
        assert cast(float(torch.tensor(form.overflow_from).nextafter(torch.tensor(0.0))), form) == form.largest
    else:  # no infinity: NaN, or cut off at the largest, by version of torch
        beyond = cast(form.overflow_from * 2, form)
        assert math.isnan(beyond) or beyond == form.largest
    assert cast(form.zero_below * (1 - 2**-10), form) == 0
    assert cast(form.zero_below * (1 + 2**-10), form) == 2 * form.zero_below
    assert cast(form.smallest_normal, form) == form.smallest_normal


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("value", [1.0, 1.5, 3.0, 100.0, -7.0])
def test_spacing_is_the_distance_to_the_next_number(form, value):
    spacing = form.spacing_at(value)
    exact = math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
    assert cast(exact + math.copysign(spacing, value), form) == exact + math.copysign(spacing, value)
    assert cast(exact + math.copysign(0.49 * spacing, value), form) == exact


def test_formats_by_dtype():
    assert format_of(torch.float16).name == "fp16"
    assert format_of(torch.float32) is None
