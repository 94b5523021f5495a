"""The first non-finite value: its producer is named, wherever it is planted, and never those that pass it on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumulus as acc
from accumulus.origin import OriginWatch, trace_origin

from .reference import assert_same, snapshot

DEPTH = 5


class Do(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def deep(function, position, width=6):
    """Linear and ReLU in turns, with one function put in between."""
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
    layers.insert(2 * position, Do(function))
    return nn.Sequential(*layers)


def trace(model, x=None, loss_fn=lambda output: output.float().square().sum()):
    x = torch.randn(4, 6) if x is None else x

    def run(look):
        loss = loss_fn(model(x))
        look(loss)
        loss.backward()

    return trace_origin(model, run, lambda: [p.grad for p in model.parameters() if p.grad is not None])


FAULTS = {
    "log": (lambda x: torch.log(x * 0), "-inf", "log", False),
    "zero by zero": (lambda x: (x * 0) / (x * 0), "NaN", "div", False),
    "root of a negative number": (lambda x: (-1 - x.abs()).sqrt(), "NaN", "sqrt", False),
    "exp": (lambda x: (x.abs() + 1000).exp(), "inf", "exp", False),
    "fp16": (lambda x: ((x.abs() + 1).half() * 6e4 * 4).float(), "inf", "mul", False),
    "root of zero": (lambda x: (x * 0).sqrt(), "inf", "div", True),
    "norm of zero": (lambda x: (x * 0).square().sum(1, keepdim=True).sqrt() + x, "inf", "div", True),
    "power": (lambda x: (x * 0).abs().pow(0.5), "inf", "pow", True),
}


@pytest.mark.parametrize("position", [1, 2, DEPTH])
@pytest.mark.parametrize("name", list(FAULTS))
def test_the_producer_is_named(name, position):
    function, value, operator, is_backward = FAULTS[name]
    if name == "norm of zero" and position == DEPTH:
        function = FAULTS["root of zero"][0]
    origin = trace(deep(function, position), torch.ones(4, 6) if is_backward else None)
    assert origin is not None
    assert origin.module == str(2 * position), str(origin)
    assert origin.is_backward == is_backward
    if is_backward:
        assert origin.value in ("inf", "NaN")
    else:
        assert (origin.value, origin.operator) == (value, operator)
    assert origin.source == "made"
    assert f"made by '{2 * position}'" in str(origin)
    assert origin.to_dict()["text"] == str(origin)


def test_a_healthy_pass_has_none():
    assert trace(deep(lambda x: x, 2)) is None


MASKS = {
    "filled": lambda s: s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf),
    "added": lambda s: s + torch.full_like(s, -math.inf).triu(1),
    "where": lambda s: torch.where(torch.ones_like(s).tril() > 0, s, -math.inf),
    "in place": lambda s: s.clone().masked_fill_(torch.ones_like(s).triu(1) > 0, -math.inf),
    "by index": lambda s: s.index_fill(1, torch.tensor([3]), -math.inf),
    "log of a mask": lambda s: s + torch.ones_like(s).tril().log(),
    "from a constant": lambda s: s + torch.tensor([0.0, 0.0, 0.0, -math.inf]),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_a_mask_of_minus_infinity_is_no_finding(name):
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: MASKS[name](x).softmax(-1)), nn.Linear(4, 2))
    assert trace(model, torch.randn(4, 4)) is None


def test_attention_with_a_mask_is_no_finding():
    mask = torch.full((5, 5), -math.inf).triu(1)
    model = nn.Sequential(nn.Linear(8, 8), Do(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)))
    assert trace(model, torch.randn(2, 1, 5, 8)) is None


def test_a_row_that_masks_everything_is_one():
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x.masked_fill(x < 1e9, -math.inf).softmax(-1)))
    origin = trace(model, torch.randn(4, 4))
    assert (origin.module, origin.operator, origin.value) == ("1", "softmax", "NaN")
    assert "a row in which everything is masked" in origin.note


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_minimum_that_a_dtype_cannot_hold(dtype):
    lowest = torch.finfo(torch.float32).min

    def mask(x, hidden):
        return (x + (hidden * lowest).to(dtype)).softmax(-1).float()

    some = torch.ones(4, 4).triu(1)
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: mask(x.to(dtype), some)), nn.Linear(4, 2))
    x = torch.randn(4, 4)
    with OriginWatch(model) as watch:
        loss = model(x).square().sum()
        watch.whereabouts.note(loss)
        loss.backward()
    assert watch.origin_of([p.grad for p in model.parameters()]) is None
    assert {(origin.module, origin.operator, origin.value) for origin in watch.infinities} == {("1", "to_copy", "-inf")}
    origin = trace(nn.Sequential(model[0], Do(lambda x: mask(x.to(dtype), torch.ones(4, 4)))), x)
    assert origin.operator == "to_copy" and "torch.finfo" in origin.note


def test_what_came_in_is_not_blamed_on_a_module():
    x = torch.randn(4, 6)
    x[1, 2] = math.nan
    origin = trace(deep(lambda x: x, 2), x)
    assert origin.source == "given"
    assert str(origin) == "NaN came with the batch, first met by addmm in '0'"
    model = deep(lambda x: x, 2)
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
    origin = trace(model)
    assert "was in the model's '2.weight'" in str(origin)


def test_the_loss_function_is_named_too():
    origin = trace(deep(lambda x: x, 2), loss_fn=lambda output: (output * 0 - 1).log().sum())
    assert (origin.module, origin.operator) == ("", "log")
    assert "the loss function, log" in str(origin)
    origin = trace(deep(lambda x: x, 2), loss_fn=lambda output: output.sum() * math.nan)
    assert origin.note == "a constant of it is NaN"


def test_inputs_are_shown_with_their_ranges():
    origin = trace(deep(lambda x: (x.clamp(-1, 1) - 5).log(), 0))
    assert origin.dtype == "float32"
    assert len(origin.inputs) == 1 and origin.inputs[0].startswith("float32 4x6 in [-6, -4")


def test_in_place_operators_show_what_they_found():
    origin = trace(deep(lambda x: x.clone().mul_(0).log_(), 0))
    assert (origin.operator, origin.inputs) == ("log", ("float32 4x6 in [0, 0]",)) or "-0" in origin.inputs[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.bad = nn.Linear(6, 6), Do(lambda x: (x * 0).sqrt())

        def forward(self, x):
            return checkpoint(lambda y: self.bad(self.first(y)), x, use_reentrant=use_reentrant)

    origin = trace(nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 1)))
    assert origin.is_backward and origin.module == "1.bad"


def test_reused_memory_carries_no_old_blame():
    """Many infinities that die in a softmax; then a fault elsewhere."""

    def busy(x):
        for _ in range(20):
            x = x + torch.where(x > 0, x, -math.inf).softmax(-1).nan_to_num()
        return x

    model = nn.Sequential(nn.Linear(6, 6), Do(busy), nn.Linear(6, 6), Do(lambda x: (x - x.max() - 1).log()))
    assert trace(model).module == "3"


def small_step(function, precision="fp32", **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6).eval(), Do(function), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {"microbatch": 2, "precision": precision} | options
    return acc.TrainStep(model, optimizer, lambda m, x: m(x).float().square().mean(), **options), model, optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_finds_the_origin_and_changes_nothing(precision, where):
    step, model, optimizer = small_step(lambda x: torch.log(x * 0 - 1), precision)
    batch = torch.randn(6, 6)
    before, states = snapshot(model, optimizer), torch.get_rng_state()
    saved = step.state_dict()
    origin = step.find_origin(batch)
    assert isinstance(origin, acc.Origin)
    assert (origin.module, origin.operator) == ("3", "log")
    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(states, torch.get_rng_state())
    assert step.state_dict() == saved
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert small_step(lambda x: x, precision)[0].find_origin(batch) is None


def test_a_scale_that_is_too_large_is_blamed_on_what_overflowed():
    step, _, _ = small_step(lambda x: x * 100, "fp16", loss_scale=acc.StaticScale(2.0**30, max_skips=2))
    batch = torch.randn(6, 6)
    assert step.find_origin(batch, scale=2.0**-12) is None
    assert step.find_origin(batch).value == "inf"
    with pytest.raises(acc.ScaleCollapseError, match="only at this scale.*at most that; at 1.07374e.09, -?inf made by"):
        for _ in range(3):
            step(batch)


def test_a_trace_that_fails_hides_nothing(monkeypatch):
    step, _, _ = small_step(lambda x: x * math.nan, loss_scale=acc.NoScale(max_skips=1))

    def broken(*_):
        raise ValueError("no way")

    monkeypatch.setattr("accumulus.step.trace_origin", broken)
    with pytest.raises(acc.ScaleCollapseError, match="the loss itself is NaN.*could not be traced: ValueError: no way"):
        step(torch.randn(4, 6))


def test_a_finite_write_to_a_part_leaves_the_blame_for_the_rest():
    def patched(x):
        x = (x.abs() + 1000).exp()
        y = x.clone()
        y[0] = 1.0
        return y

    origin = trace(deep(patched, 2))
    assert (origin.module, origin.operator) == ("4", "exp")


def test_sparse_gradients():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.bad = nn.Embedding(5, 3, sparse=True), Do(lambda x: (x * 0).sqrt())

        def forward(self, tokens):
            return self.bad(self.table(tokens))

    origin = trace(Rows(), torch.tensor([1, 2, 2]))
    assert origin.module == "bad" and origin.is_backward
