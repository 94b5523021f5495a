"""Several optimizers of one model share norm, scale and the decision to skip."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc

from .reference import assert_same, relative_error, snapshot


def build():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    return model, [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model[1].parameters(), lr=0.01),
    ]


def loss_fn(model, x):
    return model[1](model[0](x).tanh()).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_equal_each_of_its_own_under_one_norm(where, precision):
    by_hand, plain = build()
    model, optimizers = build()
    step = acc.TrainStep(model, optimizers, loss_fn, precision=precision, microbatch=2, max_grad_norm=0.05)
    for seed in range(4):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        loss_fn(by_hand, x).backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
        assert step(x).applied
    assert relative_error(list(model.parameters()), list(by_hand.parameters())) <= (
        1e-4 if precision == "fp32" else 5e-3
    )


def test_none_steps_where_one_gradient_is_not_finite(where):
    model, optimizers = build()
    factor = 1.0
    step = acc.TrainStep(
        model, optimizers, lambda m, x: m[0](x).sum() * factor + m[1](x).sum(), precision="fp32", microbatch=2
    )
    step(torch.ones(2, 3))
    before = [snapshot(model, optimizer) for optimizer in optimizers]
    factor = math.inf
    assert not step(torch.ones(2, 3)).applied
    assert_same(before, [snapshot(model, optimizer) for optimizer in optimizers])


def test_their_schedulers_advance_together():
    model, optimizers = build()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(o, gamma) for o, gamma in zip(optimizers, (0.5, 0.1), strict=True)
    ]
    step = acc.TrainStep(model, optimizers, loss_fn, precision="fp32", microbatch=2, scheduler=schedulers)
    for _ in range(2):
        step(torch.ones(2, 3))
    assert [s.get_last_lr()[0] for s in schedulers] == pytest.approx([0.025, 0.0001])


def test_steps_inside_a_window_are_refused_for_each():
    model, optimizers = build()
    accumulator = acc.Accumulator(model, optimizers, precision="fp32")
    with accumulator.microbatch(False, num_samples=2):
        accumulator.backward(loss_fn(model, torch.ones(2, 3)))
    for optimizer in optimizers:
        with pytest.raises(acc.WindowError, match="inside a window"):
            optimizer.step()
    accumulator.flush()


def test_what_cannot_be_together():
    model, optimizers = build()
    with pytest.raises(acc.OptimizerError, match="two optimizers hold the same parameter"):
        acc.TrainStep(model, [*optimizers, optimizers[0]], loss_fn, precision="fp32", microbatch=1)
    with pytest.raises(acc.OptimizerError, match="empty list"):
        acc.TrainStep(model, [], loss_fn, precision="fp32", microbatch=1)


def test_fused_ones_do_not_wait(accelerator, monkeypatch):
    from accumulus import host

    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in model]
    step = acc.TrainStep(model, optimizers, loss_fn, precision="fp32", microbatch=2, max_grad_norm=1.0)
    step(torch.ones(4, 3))
    step.settle()
    waits = []
    monkeypatch.setattr(host, "wait_for", lambda flag: waits.append(flag) or bool(flag.tolist()))
    step(torch.ones(4, 3))
    assert waits == []


def test_members_are_checked():
    model, optimizers = build()
    with pytest.raises(acc.UnsupportedError, match="LBFGS evaluates the loss itself"):
        acc.TrainStep(
            model, [optimizers[0], torch.optim.LBFGS(model[1].parameters())], loss_fn, precision="fp32", microbatch=1
        )
    with pytest.raises(acc.OptimizerError, match="optimizers must have param_groups"):
        acc.TrainStep(model, [optimizers[0], None], loss_fn, precision="fp32", microbatch=1)
