"""The update: one multiplier, folded where it can be, no wait for the device, nothing left behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accumulus as acc
from accumulus import update

from .reference import assert_same, relative_error, token_loss, tokens_batch, tokens_model

FUSED = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.item.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        )
        return function(*args, **(kwargs or {}))


def device_loss(model, batch):
    loss = token_loss(model, batch)
    return acc.Loss(loss.sum, torch.as_tensor(loss.weight), metrics={"m": (loss.sum, torch.as_tensor(loss.weight))})


@pytest.mark.parametrize("make", FUSED)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_host_sync_where_the_optimizer_is_fused(make, precision, where, monkeypatch):
    model = tokens_model(torch.float32)
    step = acc.TrainStep(
        model, make(model.parameters(), fused=True), device_loss, precision=precision, microbatch=1, max_grad_norm=1.0
    )
    batches = [tokens_batch([3, 0, 9], seed=i) for i in range(4)]
    step(batches[0])
    waits = []
    monkeypatch.setattr(
        acc_host(), "wait_for", lambda flag: waits.append(flag) or bool(getattr(flag, "tolist", lambda: flag)())
    )
    for batch in batches[1:]:
        del waits[:]
        with Reads() as reads:
            step(batch)
        assert reads.count == 0
        if where == "device":
            # Two flags, those of the step before: read before this step's first backward pass, and nothing after.
            assert len(waits) == 2


def acc_host():
    from accumulus import host

    return host


def test_the_test_sees_a_sync():
    """With an optimizer that cannot skip on the device, the host must wait, and the mode above would show an item()."""
    with Reads() as reads:
        torch.ones(1).item()
    assert reads.count == 1


@pytest.mark.parametrize("make", FUSED)
def test_the_multiplier_is_folded_into_fused_kernels(make, monkeypatch, where):
    def refuse(*_):
        raise AssertionError("a separate pass over the gradients")

    model = tokens_model(torch.float32)
    optimizer = make(model.parameters(), fused=True)
    step = acc.TrainStep(model, optimizer, token_loss, precision="fp16", microbatch=1, max_grad_norm=0.1)
    monkeypatch.setattr(torch, "_foreach_mul_", refuse)
    for seed in range(3):
        assert step(tokens_batch([3, 9], seed=seed)).applied
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_one_read_of_the_gradients_for_the_norm(monkeypatch):
    calls = []
    norm_of = update.norm_of
    monkeypatch.setattr(update, "norm_of", lambda gradients, **k: calls.append(1) or norm_of(gradients, **k))
    model = tokens_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"precision": "fp32", "microbatch": 1}
    acc.TrainStep(model, optimizer, token_loss, max_grad_norm=1.0, **options)(tokens_batch([3]))
    assert len(calls) == 1
    result = acc.TrainStep(model, optimizer, token_loss, skip_nonfinite=False, **options)(tokens_batch([3]))
    assert len(calls) == 1
    assert result.grad_norm is None
    assert result.all_finite


class TestNorm:
    @pytest.mark.parametrize("order", [2.0, math.inf])
    def test_over_dtypes_shapes_and_strides(self, where, order):
        gradients = [
            torch.randn(300, 4, dtype=torch.float64),
            torch.randn(7),
            torch.randn(9, 5).T,
            torch.randn(8).half(),
            torch.randn(()),
            torch.randn(6).bfloat16(),
            torch.randn(40)[::3],
        ]
        right = torch.cat([g.double().flatten() for g in gradients]).norm(p=order)
        assert float(update.norm_of(gradients, order)) == pytest.approx(float(right), rel=1e-6)

    def test_of_many_elements(self):
        gradient = torch.randn(3_000_001)
        assert update.norm_of([gradient]) == pytest.approx(float(gradient.double().norm()), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_is_not_finite_where_a_gradient_is_not(self, where, dtype, value):
        gradient = torch.ones(100, dtype=dtype)
        gradient[57] = value
        assert not math.isfinite(float(update.norm_of([torch.ones(3), gradient])))

    def test_zero(self, where):
        assert float(update.norm_of([torch.zeros(3)])) == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_clipping_by_value_is_of_the_true_gradient(where, fused, scale):
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=1, max_grad_value=0.5,
        loss_scale=acc.StaticScale(scale),
    )  # fmt: skip
    for _ in range(2):  # the second one skips on the device
        result = step(torch.tensor([[3.0, -0.25, -2.0], [1.0, 0.25, -2.0]]))
    assert model.weight.tolist() == [[-1.0, 0.0, 1.0]]
    assert result.clipped
    assert float(result.grad_norm) == pytest.approx(math.sqrt(8), rel=1e-6)


def test_clipping_by_both_takes_the_norm_first():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = acc.TrainStep(
        model,
        optimizer,
        lambda m, b: m(b).mean(),
        precision="fp32",
        microbatch=1,
        max_grad_norm=1.0,
        max_grad_value=0.7,
    )
    step(torch.tensor([[3.0, 4.0]]))
    assert model.weight.flatten().tolist() == pytest.approx([-0.6, -0.7])


def test_frozen_parameters_and_those_without_gradients_stay(where):
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "frozen": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: (m["used"](b) + m["frozen"](b)).mean(), precision="fp32", microbatch=1
    )
    before = {name: p.clone() for name, p in model.state_dict().items()}
    for _ in range(2):
        assert step(torch.ones(2, 2)).applied
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, before[name]) == (not name.startswith("used"))


def test_parameters_outside_the_optimizer_keep_no_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    acc.TrainStep(model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=1)(torch.ones(2, 2))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_several_groups_and_dtypes(where, fused):
    """A float64 head on a float32 body, in groups with rates of their own."""

    def build():
        torch.manual_seed(1)
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1).double()])

    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.01}]

    def loss_fn(model, batch):
        return model[1](model[0](batch).double()).square().mean()

    by_hand, ours = build(), build()
    plain = torch.optim.AdamW(groups(by_hand), foreach=False)
    step = acc.TrainStep(ours, torch.optim.AdamW(groups(ours), fused=fused), loss_fn, precision="fp32", microbatch=2)
    for seed in range(4):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        loss_fn(by_hand, batch).backward()
        plain.step()
        plain.zero_grad()
        step(batch)
    assert relative_error(list(ours.parameters()), list(by_hand.parameters())) <= 1e-6


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)])
def test_sparse_gradients(make):
    def build():
        torch.manual_seed(1)
        return nn.Embedding(10, 3, sparse=True)

    def loss_fn(model, batch):
        return acc.Loss(model(batch).square().sum(), batch.numel())

    by_hand, ours = build(), build()
    plain = make(by_hand.parameters())
    step = acc.TrainStep(ours, make(ours.parameters()), loss_fn, precision="fp32", microbatch=1)
    for seed in range(3):
        batch = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(seed))
        loss = loss_fn(by_hand, batch)
        (loss.sum / loss.weight).backward()
        plain.step()
        plain.zero_grad()
        step(batch)
    assert relative_error([ours.weight], [by_hand.weight]) <= 1e-6


class Lion:
    """An optimizer of another library: param_groups, state and step, and nothing of torch's."""

    def __init__(self, parameters, lr):
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.state = {}

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= self.param_groups[0]["lr"] * parameter.grad.sign()


def test_optimizers_of_other_libraries():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    step = acc.TrainStep(
        model,
        Lion(model.parameters(), 0.5),
        lambda m, b: m(b).mean(),
        precision="fp16",
        microbatch=1,
        max_grad_norm=1.0,
    )
    step(torch.ones(4, 1))
    assert model.weight.item() == -0.5


def test_what_is_no_optimizer():
    model = nn.Linear(1, 1)
    with pytest.raises(acc.OptimizerError, match="param_groups and step"):
        acc.TrainStep(model, "adam", token_loss, precision="fp32", microbatch=1)


def test_skipping_the_first_step_makes_no_state(where):
    """Momentum buffers of a fused SGD's skipped first step would be uninitialised memory."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    factor = math.inf
    step = acc.TrainStep(model, optimizer, lambda m, b: (m(b) * factor).mean(), precision="fp32", microbatch=1)
    empty = optimizer.state_dict()["state"]
    assert not step(torch.ones(2, 2)).applied
    assert_same(empty, optimizer.state_dict()["state"])
    factor = 1.0
    assert step(torch.ones(2, 2)).applied
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True]), torch.tensor([[1]])])
def test_a_veto_may_answer_in_any_form_of_one_flag(where, answer):
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    step = acc.TrainStep(
        model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).mean(), precision="fp32", microbatch=1,
        veto=lambda norm: answer,
    )  # fmt: skip
    assert not step(torch.ones(1, 1)).applied
    assert torch.equal(before, model.weight)


def test_a_veto_of_several_flags_is_refused():
    model = nn.Linear(1, 1)
    step = acc.TrainStep(
        model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).mean(), precision="fp32", microbatch=1,
        veto=lambda norm: torch.tensor([True, False]),
    )  # fmt: skip
    with pytest.raises(acc.OptimizerError, match="one flag"):
        step(torch.ones(1, 1))
    with pytest.raises(acc.OptimizerError, match="veto must be a function"):
        acc.TrainStep(model, torch.optim.SGD(model.parameters()), token_loss, precision="fp32", microbatch=1, veto=10)
