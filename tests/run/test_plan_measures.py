"""What would make it fit: the changed jobs compute the same, their bytes are those of `acc.memory.estimate`."""

from functools import partial

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.run.plan_measures import (
    CHECKPOINTING,
    MOMENTUM,
    NO_STATE,
    PURE,
    Job,
    checkpointed,
    explain_shortfall,
    pure_peak,
    repeated_blocks,
    smaller_optimizer,
)
from accumulus.run.plan_rows import Limit

from .deep import Block, Deep, loss_fn

BATCH = torch.randn(8, 16, 32)


def estimate(model, optimizer, precision):
    return acc.memory.estimate(model, optimizer, loss_fn, BATCH, precision=precision, microbatch=1, device="cpu")


def job(model=None, optimizer=torch.optim.AdamW, precision="fp32"):
    model = model or Deep()
    return Job(model=model, optimizer=optimizer(model.parameters()), precision=precision, estimate=estimate)


def explained(limit_bytes, **options):
    return explain_shortfall(job(**options), Limit(limit_bytes=limit_bytes, source="given"))


@pytest.fixture(scope="module")
def all_measures():
    """Alone, and all together: nothing fits into one byte."""
    return explained(1)


def test_checkpointing_shares_every_tensor_and_computes_the_same_gradients():
    model = Deep(depth=4)
    twin, num_blocks, name = checkpointed(model)
    assert (num_blocks, name) == (4, "Block")
    assert {id(tensor) for tensor in twin.parameters()} == {id(tensor) for tensor in model.parameters()}
    assert twin.shift is model.shift
    assert not any("forward" in vars(module) for module in model.modules())
    loss_fn(model, BATCH).sum.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss_fn(twin, BATCH).sum.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def stack(kind, *children):
    return kind(list(children)) if kind is nn.ModuleList else kind(*children)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Deep(depth=3), 3),
        (nn.Linear(2, 2), 0),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 0),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), 0),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2),
        (nn.ModuleList([Deep(depth=2), nn.Sequential(Block(32), Block(32))]), 4),  # the same kind in two containers
        (nn.ModuleList([Deep(depth=5), Deep(depth=5)]), 2),  # the outer ones
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 3, enable_nested_tensor=False), 3),
    ],
)
def test_the_blocks_that_a_model_repeats(model, expected):
    assert len(repeated_blocks(model)) == expected


def test_a_smaller_optimizer_holds_the_same_parameters():
    model = Deep()
    groups = [
        {"params": list(model.blocks[:1].parameters())},
        {"params": list(model.blocks[1:].parameters()), "lr": 1.0},
    ]
    given = torch.optim.AdamW(groups, fused=True)
    small = smaller_optimizer(given, momentum=0.9)
    held = [[id(p) for p in group["params"]] for group in small.param_groups]
    assert held == [[id(p) for p in group["params"]] for group in given.param_groups]
    assert small.param_groups[0]["fused"] and small.param_groups[0]["momentum"] == 0.9
    assert not given.state and not small.state


def test_every_measure_alone_has_the_bytes_of_an_estimate_of_the_changed_job(all_measures):
    model, found = Deep(), all_measures
    now = estimate(model, torch.optim.AdamW(model.parameters()), "fp32")
    assert found.peak_bytes == now.peak_bytes
    assert sum(found.parts.values()) == now.peak_bytes
    assert found.dominant == (
        "optimizer state",
        now.parts["optimizer state"],
        now.parts["optimizer state"] / now.peak_bytes,
    )
    alone = {each.changes[0]: each for each in found.measures if len(each.changes) == 1}
    assert list(alone) == [CHECKPOINTING, MOMENTUM, NO_STATE, PURE]
    adamw = torch.optim.AdamW(model.parameters())
    expected = {
        CHECKPOINTING: estimate(checkpointed(model)[0], adamw, "fp32"),
        MOMENTUM: estimate(model, torch.optim.SGD(model.parameters(), momentum=0.9), "fp32"),
        NO_STATE: estimate(model, torch.optim.SGD(model.parameters()), "fp32"),
    }
    for name, estimated in expected.items():
        assert alone[name].peak_bytes == estimated.peak_bytes
        assert alone[name].saved_bytes == now.peak_bytes - estimated.peak_bytes
    assert alone[NO_STATE].saved_bytes >= alone[MOMENTUM].saved_bytes > 0


def test_checkpointing_saves_activations_of_a_deep_model():
    big = torch.randn(2, 512, 32)
    count = partial(acc.memory.estimate, loss_fn=loss_fn, batch=big, precision="fp32", microbatch=2, device="cpu")
    model = Deep(depth=6)
    optimizer = torch.optim.AdamW(model.parameters())
    plain, kept = count(model, optimizer), count(checkpointed(model)[0], optimizer)
    assert kept.peak_bytes < 0.6 * plain.peak_bytes
    assert kept.parts["parameters"] == plain.parts["parameters"]


def test_the_estimate_with_checkpointing_is_what_a_real_step_holds():
    """Dispatch-mode count of the real run, as for plain models in tests/memory."""
    twin = checkpointed(Deep(depth=3))[0]
    optimizer = torch.optim.AdamW(twin.parameters(), fused=True)
    step = acc.TrainStep(twin, optimizer, loss_fn, precision="fp32", microbatch=4)
    step(BATCH)  # makes the optimizer's state
    live = acc.memory.LiveBytes()
    with live.watching(step):
        step(BATCH)
    found = acc.memory.estimate(twin, optimizer, loss_fn, BATCH, precision="fp32", microbatch=4)
    assert found.method == "fake"
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)


def test_bf16_pure_halves_parameters_and_drops_the_casts_and_never_goes_below_the_update():
    model = Deep()
    bf16 = estimate(model, torch.optim.AdamW(model.parameters()), "bf16")
    held = sum(parameter.nbytes for parameter in model.parameters())
    peak_bytes, how = pure_peak(bf16, model, held)
    least = held // 2 + held + 2 * held  # parameters in bf16; gradients and two moments in fp32
    assert peak_bytes >= least
    assert peak_bytes <= bf16.peak_bytes - held // 2
    assert (
        peak_bytes
        == max(bf16.peak_bytes - bf16.parts["cast weights"], least + held // 2 + bf16_scalars(bf16, held)) - held // 2
    )
    assert "arrives with a later version" in how


def bf16_scalars(estimated, held):
    """What AdamW keeps besides its two moments: a step count per parameter."""
    return estimated.parts["optimizer state"] - 2 * held


def test_where_one_measure_is_enough_none_are_combined(all_measures):
    alone = {each.changes[0]: each for each in all_measures.measures if len(each.changes) == 1}
    found = explained(alone[NO_STATE].peak_bytes)
    assert all(len(each.changes) == 1 for each in found.measures)
    assert [each.changes[0] for each in found.measures if each.is_enough] == [NO_STATE]


def test_where_none_is_enough_the_smallest_sets_that_are(all_measures):
    best = min(each.peak_bytes for each in all_measures.measures if len(each.changes) == 1)
    found = explained(best - 1)
    together = [each for each in found.measures if len(each.changes) > 1]
    assert together
    assert all(each.is_enough and len(each.changes) == 2 for each in together)
    assert not any({MOMENTUM, NO_STATE} <= set(each.changes) for each in together)


def test_where_nothing_is_enough_all_together_and_it_says_so(all_measures):
    found = all_measures
    together = [each for each in found.measures if len(each.changes) > 1]
    assert [each.changes for each in together] == [(CHECKPOINTING, NO_STATE, PURE)]
    assert not together[0].is_enough
    assert found.notes[-1].startswith("None of this is enough")


def test_what_is_not_possible_is_not_listed():
    found = explained(1, model=nn.Linear(32, 32), optimizer=partial(torch.optim.SGD, lr=0.1))
    assert [each.changes for each in found.measures if len(each.changes) == 1] == [(PURE,)]
    assert found.notes[0].startswith(CHECKPOINTING) and found.notes[-1].startswith("None of this is enough")
    with_momentum = explained(1, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    alone = [each.changes[0] for each in with_momentum.measures if len(each.changes) == 1]
    assert alone == [CHECKPOINTING, NO_STATE, PURE]


def test_a_measure_that_the_model_does_not_bear_is_left_out_with_the_reason():
    class Counting(Deep):
        """Refuses what checkpointing does: to run a block again."""

        def forward(self, hidden):
            if any("forward" in vars(block) for block in self.blocks):
                raise RuntimeError("a block\nwas changed")
            return super().forward(hidden)

    found = explained(1, model=Counting())
    assert CHECKPOINTING not in {change for each in found.measures for change in each.changes}
    told = [note for note in found.notes if note.startswith(CHECKPOINTING)]
    assert len(told) == 1
    assert "not counted" in told[0] and "a block was changed" in told[0]
    assert any(len(each.changes) == 2 for each in found.measures)


def test_nothing_is_touched():
    model = Deep()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    optimizer = torch.optim.AdamW(model.parameters())
    explain_shortfall(
        Job(model=model, optimizer=optimizer, precision="fp32", estimate=estimate), Limit(limit_bytes=1, source="given")
    )
    assert not optimizer.state
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])
        assert tensor.grad is None
