"""What is diagnosed: copies that share nothing with the original, and states that are put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.numerics.subject import all_as_before, make_subject
from tests.reference import assert_same, snapshot

from .models import squares


def make(model, **options):
    given = {"loss_fn": squares, "optimizer": None, "precision": None, "microbatch": None, "collate": None}
    return make_subject(model, **(given | options))


def learned(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def storages(model, optimizer):
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_copies_share_nothing_and_hold_the_same():
    model, optimizer = learned()
    copied = make(model, optimizer=optimizer).copied()
    assert storages(model, optimizer).isdisjoint(storages(copied.model, copied.optimizer))
    assert_same(snapshot(model, optimizer), snapshot(copied.model, copied.optimizer))
    assert all(parameter.grad is None for parameter in copied.model.parameters())
    own = {parameter for group in copied.optimizer.param_groups for parameter in group["params"]}
    assert own == set(copied.model.parameters())


def test_widened_copies_hold_the_same_numbers_in_float32():
    model, optimizer = learned(torch.bfloat16)
    subject = make(model, optimizer=optimizer)
    wide = subject.widened()
    for narrow, wider in zip(model.state_dict().values(), wide.model.state_dict().values(), strict=True):
        assert wider.dtype in (torch.float32, torch.int64)
        assert torch.equal(narrow.to(wider.dtype), wider)
    states = [value for state in wide.optimizer.state.values() for value in state.values()]
    assert all(value.dtype == torch.float32 for value in states)
    assert subject.narrow_dtype == torch.bfloat16 and wide.scale == 1.0
    before = snapshot(model, optimizer)
    wide.learn(torch.randn(6, 8, dtype=torch.bfloat16))
    assert_same(before, snapshot(model, optimizer))


def test_float64_stays_float64():
    model = nn.Linear(8, 1).double()
    wide = make(model, precision="fp32", loss_fn=lambda m, x: m(x).square().mean()).widened()
    assert wide.model.weight.dtype == torch.float64


def test_a_run_leaves_the_gradients_of_the_scaled_loss():
    model = nn.Linear(8, 1)
    x = torch.randn(4, 8)
    subject = make(model, precision="fp32").copied()
    totals = subject.run(x, scale=8.0)
    loss = squares(model, x)
    loss.backward()
    assert float(totals.loss) == pytest.approx(float(loss.detach()))
    assert torch.allclose(subject.gradients()[0] / totals.divisor, model.weight.grad)
    subject.drop_gradients()
    assert subject.gradients() == []


def test_finiteness_at_a_scale():
    subject = make(nn.Linear(8, 1)).copied()
    x = torch.randn(4, 8)
    assert subject.is_finite(x, 1.0)
    assert not subject.is_finite(x, 2.0**40)
    assert not subject.is_finite(x * torch.nan, 1.0)
    assert subject.gradients() == []


def test_states_and_gradients_are_put_back():
    model = nn.Linear(2, 1)
    gradient = model.weight.grad = torch.ones(1, 2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match="on purpose"), all_as_before(model, torch.device("cpu")):
        torch.rand(3), random.random(), np.random.rand()
        model.weight.grad = None
        raise ValueError("on purpose")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert model.weight.grad is gradient


def test_a_steps_own_parts_are_used():
    model = nn.Linear(8, 1)
    step = acc.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        squares,
        precision="fp16",
        microbatch=2,
        max_grad_norm=0.5,
        loss_scale=acc.StaticScale(64.0),
    )
    subject = make(step, loss_fn=None)
    assert (subject.scale, subject.adapts, subject.max_grad_norm) == (64.0, False, 0.5)
    assert subject.split is step.microbatch
    assert make(step, loss_fn=None, microbatch=3).split.sizes(4) == [3, 1]
    assert make(step, loss_fn=None, precision="bf16").scale == 1.0
