"""Loss scales: GradScaler's sequence step for step, and what GradScaler cannot say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc

ENDLESS = {"minimum": 1e-37, "max_skips": 10**9}


def grad_scaler_scales(pattern, *, init_scale, growth_factor, backoff_factor, growth_interval):
    """The scales of torch.amp.GradScaler, driven as a user drives it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )  # fmt: skip
    scales = []
    for all_finite in pattern:
        scaler.scale(weight.sum())
        weight.grad = torch.tensor([1.0 if all_finite else float("inf")])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, scaler


def our_scales(scale, pattern):
    scales = []
    for all_finite in pattern:
        scale = scale.next(all_finite)
        scales.append(float(scale))
    return scales, scale


@given(
    pattern=st.lists(st.booleans(), max_size=60),
    initial=st.sampled_from([1.0, 2.0**16, 3000.0, 2.0**126]),
    growth=st.sampled_from([2.0, 1.5, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.9]),
    interval=st.integers(1, 5),
)
def test_equals_grad_scaler_step_for_step(pattern, initial, growth, backoff, interval):
    right, scaler = grad_scaler_scales(
        pattern, init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    scale = acc.DynamicScale(initial=initial, growth=growth, backoff=backoff, growth_interval=interval, **ENDLESS)
    found, last = our_scales(scale, pattern)
    assert found == right
    if pattern:
        taken_over = acc.DynamicScale(**ENDLESS).load_state_dict(scaler.state_dict())
        follow = [True] * 6 + [False, True]
        assert our_scales(taken_over, follow)[0] == our_scales(last, follow)[0]


def test_hysteresis_tolerates_before_it_shrinks():
    scale = acc.DynamicScale(initial=8.0, hysteresis=3, growth_interval=2)
    assert our_scales(scale, [False, False, False, False])[0] == [8.0, 8.0, 4.0, 2.0]
    # Growing restores the tolerance; single finite steps do not.
    assert our_scales(scale, [False, True, False, True, False, True, True, False])[0] == [8, 8, 8, 8, 4, 4, 8, 8]


def test_never_goes_below_the_minimum_and_then_collapses():
    scale = acc.DynamicScale(initial=8.0, minimum=3.0)
    scales, scale = our_scales(scale, [False, False])
    assert scales == [4.0, 3.0]
    assert float(scale.next(True)) == 3.0
    with pytest.raises(acc.ScaleCollapseError, match="scale 3, which is the minimum, after 3 skipped steps"):
        scale.next(False)


@pytest.mark.parametrize("scale", [acc.NoScale(max_skips=3), acc.StaticScale(4.0, 3), acc.DynamicScale(max_skips=3)])
def test_collapses_after_max_skips_in_a_row(scale):
    _, scale = our_scales(scale, [False, False, True, False, False])
    with pytest.raises(acc.ScaleCollapseError, match="3 steps in a row"):
        scale.next(False)


def test_no_and_static_scale_stay():
    assert our_scales(acc.NoScale(), [True, False, True])[0] == [1.0] * 3
    assert our_scales(acc.StaticScale(64.0), [True, False, True])[0] == [64.0] * 3


def test_does_not_grow_beyond_float32():
    assert our_scales(acc.DynamicScale(initial=2.0**127, growth_interval=1), [True, True])[0] == [2.0**127] * 2


FULL = [
    acc.NoScale(max_skips=7, num_skips=3),
    acc.StaticScale(value=32.0, max_skips=7, num_skips=3),
    acc.DynamicScale(
        initial=64.0, growth=4.0, backoff=0.25, growth_interval=9, hysteresis=5, minimum=2.0, max_skips=8,
        scale=16.0, num_finite=3, num_skips=2, tolerance_left=4,
    ),
]  # fmt: skip


@pytest.mark.parametrize("scale", FULL)
def test_every_field_survives_saving(scale):
    default = type(scale)(1.0) if isinstance(scale, acc.StaticScale) else type(scale)()
    for field in dataclasses.fields(scale):
        assert getattr(scale, field.name) != getattr(default, field.name), f"{field.name} is at its default here"
    assert default.load_state_dict(scale.state_dict()) == scale


@pytest.mark.parametrize("scale", FULL)
@pytest.mark.parametrize("state", [{"kind": "Other"}, {"kind": "NoScale"}, {"kind": "DynamicScale"}, {"extra": 1}])
def test_another_state_is_refused(scale, state):
    with pytest.raises(acc.StateError):
        scale.load_state_dict(state)


def test_a_disabled_grad_scaler_has_nothing_to_load():
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert acc.NoScale(max_skips=5).load_state_dict(disabled.state_dict()) == acc.NoScale(max_skips=5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial": 0.0}, {"initial": float("inf")}, {"initial": float("nan")}, {"initial": 0.5}, {"growth": 1.0},
        {"backoff": 1.0}, {"backoff": 0.0}, {"growth_interval": 0}, {"hysteresis": 0}, {"minimum": 0.0},
        {"max_skips": 0}, {"scale": 0.0},
    ],
)  # fmt: skip
def test_arguments_out_of_bounds(arguments):
    with pytest.raises(acc.PrecisionError, match=next(iter(arguments))):
        acc.DynamicScale(**arguments)


@pytest.mark.parametrize("value", [0.0, -2.0, float("inf"), float("nan")])
def test_static_scales_out_of_bounds(value):
    with pytest.raises(acc.PrecisionError, match="value"):
        acc.StaticScale(value)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        acc.DynamicScale().scale = 3.0
