"""Windows of loss scales: their ends are where real casts begin to overflow and to lose."""

from __future__ import annotations

import pytest
import torch

from accumulus.numerics.formats import BF16, FP16
from accumulus.numerics.histogram import NUM_BUCKETS, Histogram, buckets_of
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.scales import find_scales, layer_of, power


def row(name, values, kind="activation gradient"):
    counts = torch.bincount(buckets_of(values), minlength=NUM_BUCKETS).numpy()
    histogram = Histogram(counts=counts, largest=float(values.abs().max()))
    return RangeRow(kind=kind, name=name, dtype=torch.float32, histogram=histogram)


def find(*rows, form=FP16, ratio=0.01):
    return find_scales(rows, form, underflow_ratio=ratio, counts=lambda row: True)


def lost(values, scale):
    gone = (values * scale).half() == 0
    return float(values[gone].abs().double().sum() / values.abs().double().sum())


@pytest.mark.parametrize("size", [1e-10, 1e-6, 1.0, 1e6])
def test_the_ends_are_those_of_real_casts(size):
    values = torch.randn(5000) * size
    scales = find(row("a", values))
    assert (values * scales.high).half().isfinite().all()
    assert not (values * scales.high * 2).half().isfinite().all()
    assert lost(values, scales.low) <= 0.0101
    assert lost(values, scales.low / 2) > 0.0099
    assert scales.low <= scales.chosen <= scales.high
    assert scales.one_serves_all


def test_the_window_of_all_is_what_the_windows_share():
    scales = find(row("a", torch.full((9,), 1e-3)), row("b", torch.full((9,), 1e-7)))
    assert [layer.layer for layer in scales.layers] == ["a", "b"]
    assert scales.low == max(layer.low for layer in scales.layers)
    assert scales.high == min(layer.high for layer in scales.layers)
    assert scales.one_serves_all and "serves all layers" in str(scales)


def test_no_scale_serves_what_lies_too_far_apart():
    scales = find(row("large", torch.full((9,), 1e4)), row("small", torch.full((9,), 1e-12)))
    assert not scales.one_serves_all
    assert scales.needs_most.layer == "small" and scales.bears_least.layer == "large"
    assert scales.chosen < scales.high
    assert "no scale serves all layers: 'small' needs" in str(scales)
    assert scales.to_dict()["one_serves_all"] is False


def test_the_chosen_scale_leaves_room_above():
    scales = find(row("a", torch.full((9,), 1e-3)))
    assert scales.chosen == scales.high / 16
    wide = find(row("a", torch.full((9,), 1e-3)), form=BF16)
    assert wide.chosen == 1.0
    assert str(find(row("a", torch.ones(9)), form=BF16)) == "bf16: any scale serves all layers; it would take 2^0"


def test_a_layer_is_its_parameters_and_its_output():
    scales = find(row("a.b.weight", torch.ones(3), "weight gradient"), row("a.b", torch.ones(3)))
    assert [layer.layer for layer in scales.layers] == ["a.b"]
    assert layer_of(row("bare", torch.ones(3), "weight gradient")) == "bare"


def test_without_gradients_there_is_no_window():
    assert find() is None
    assert find(row("a", torch.zeros(3)), row("b", torch.ones(3), "activation")) is None


@pytest.mark.parametrize(("scale", "text"), [(1.0, "2^0"), (65536.0, "2^16"), (2.0**-9, "2^-9"), (1000.0, "1000")])
def test_powers_of_two_are_written_so(scale, text):
    assert power(scale) == text
