"""Small inputs that go wrong elsewhere, with the right values. `w` is one parameter at 0, the loss (w - y)^2, SGD lr 1.

The numbers are those of the project's list of reported faults; what a later feature touches is tested with it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumulus as acc

from .reference import applied_gradients, assert_same, snapshot


class W(nn.Module):
    """One scalar parameter."""

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(value)))


def squared(model, y):
    return acc.Loss((model.w - y).square().sum(), y.numel())


def make_step(model, loss_fn=squared, *, lr=1.0, optimizer=None, **options):
    options = {"precision": "fp32", "microbatch": 1} | options
    return acc.TrainStep(model, optimizer or torch.optim.SGD(model.parameters(), lr=lr), loss_fn, **options)


class Sizes:
    def __init__(self, *sizes):
        self._sizes = sizes

    def sizes(self, num_samples):
        return self._sizes


@pytest.fixture(params=[False, True], ids=["foreach", "fused"])
def fused(request):
    return request.param


def test_case_1_mean_of_means(where):
    y = torch.cat([torch.full((n,), v) for n, v in ((40, 1.0), (16, 3.0), (6, 5.0), (2, 9.0))])
    model = W()
    step = make_step(model, microbatch=Sizes(40, 16, 6, 2))
    assert applied_gradients(step, y)[0].item() == -4.25


def test_case_4_clipping_scaled_gradients(where, fused):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    step = make_step(
        model, lambda m, b: m(b).mean(), optimizer=optimizer, max_grad_norm=1.0, loss_scale=acc.StaticScale(1024.0)
    )
    for _ in range(2):
        nn.init.zeros_(model.weight)
        result = step(torch.tensor([[3.0, 4.0]] * 3))
        assert float(result.grad_norm) == pytest.approx(5.0)
        assert model.weight.flatten().tolist() == pytest.approx([-0.6, -0.8])


def test_case_5_schedule_runs_ahead(where, fused):
    model = W()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    overflow = iter([math.inf, math.inf, 1.0, 1.0, 1.0])
    step = make_step(
        model,
        lambda m, y: (m.w - y).square().mean() * next(overflow),
        optimizer=optimizer,
        precision="fp16",
        scheduler=scheduler,
    )
    for _ in range(5):
        step(torch.ones(1))
    step.state_dict()
    assert scheduler.get_last_lr() == [0.125]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_case_6_scale_collapse_in_silence(precision, where):
    model = W()
    scale = acc.DynamicScale(max_skips=6) if precision == "fp16" else acc.NoScale(max_skips=6)
    calls = []

    def loss_fn(model, y):
        calls.append(1)
        return (model.w - y).square().mean() * (math.nan if len(calls) > 2 else 1.0)

    step = make_step(model, loss_fn, lr=0.1, precision=precision, loss_scale=scale)
    for _ in range(2):
        step(torch.ones(1))
    step.state_dict()
    before = snapshot(model)
    with pytest.raises(
        acc.ScaleCollapseError, match="6 steps in a row.*non-finite at any scale: the loss itself.*made by"
    ):
        for _ in range(7):
            step(torch.ones(1))
    assert len(calls) == 2 + 6 + 2  # a second look at the last one, and one at its operators
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_case_6_names_the_module_that_made_it(precision, where):
    """A NaN from step 3 on, made in one layer's forward or backward pass and passed on by those around it."""

    class Fails(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function, self.good = function, True

        def forward(self, x):
            return x if self.good else self.function(x)

    for function, says in (
        (lambda x: torch.log(x.float() * 0 - 1), "NaN made by '2', log in the forward pass"),
        (lambda x: torch.sqrt(x.float() * 0), "inf made by '2', div in the backward pass"),
    ):
        fails = Fails(function)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), fails, nn.Linear(4, 1))
        scale = acc.DynamicScale(max_skips=6) if precision == "fp16" else acc.NoScale(max_skips=6)
        step = make_step(model, lambda m, x: m(x).float().square().mean(), precision=precision, loss_scale=scale)
        for _ in range(2):
            step(torch.ones(4, 3))
        step.state_dict()
        before = snapshot(model)
        fails.good = False
        with pytest.raises(acc.ScaleCollapseError) as caught:
            for _ in range(7):
                step(torch.ones(4, 3))
        assert "non-finite at any scale" in str(caught.value) and says in str(caught.value)
        assert_same(before, snapshot(model))


def test_case_6_a_gradient_that_no_scale_can_mend():
    model = W()
    step = make_step(
        model, lambda m, y: (m.w - y).abs().sqrt().mean(), precision="fp16", loss_scale=acc.DynamicScale(max_skips=3)
    )
    with pytest.raises(acc.ScaleCollapseError, match="the loss is finite but its gradient is not"):
        for _ in range(3):
            step(torch.zeros(1))


def test_case_7_scale_too_high_not_broken(where):
    """A gradient that is finite only at or below a scale of 2^9."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    # The seed S reaches float16 as S * 100, which is finite up to 65504.
    step = make_step(model, lambda m, b: acc.Loss((m(b) * 100).float().sum(), len(b)), lr=1e-6, precision="fp16")
    applied = [bool(step(torch.ones(1, 1)).applied) for _ in range(20)]
    assert applied == [False] * 7 + [True] * 13
    assert float(step.loss_scale) == 2.0**9


def test_case_7_only_at_this_scale():
    model = nn.Linear(1, 1, bias=False)
    step = make_step(
        model,
        lambda m, b: acc.Loss((m(b) * 100).float().sum(), len(b)),
        precision="fp16",
        loss_scale=acc.StaticScale(2.0**12, 2),
    )
    with pytest.raises(acc.ScaleCollapseError, match="only at this scale: at 256 "):
        for _ in range(2):
            step(torch.ones(1, 1))


@pytest.mark.parametrize("name", ["bf16-pure"])
def test_cases_8_and_9_bf16_sums_and_weights_are_refused(name):
    with pytest.raises(acc.UnsupportedError):
        make_step(W(), precision=name)
    with pytest.raises(acc.PrecisionError):
        make_step(W().bfloat16())


def test_case_10_counts_in_half(where):
    mask = torch.ones(70_000, dtype=torch.float16)
    model = W()

    def loss_fn(model, mask):
        return acc.Loss.masked((model.w - 1.0).square().half().expand(len(mask)), mask)

    result = make_step(model, loss_fn, precision="fp16", microbatch=70_000)(mask)
    assert float(result.weight) == 70_000
    assert float(result.loss) == 1.0
    with pytest.raises(acc.WeightError, match="cannot count beyond 2048"):
        acc.Loss(torch.ones(()), mask.sum())


def test_case_11_empty_micro_batch(where, fused):
    labels = torch.tensor([[1, 2], [-100, -100], [0, -100], [2, 2]])
    x = torch.randn(4, 2, 3)

    def loss_fn(model, batch):
        x, y = batch
        kept = (y != -100).flatten()
        losses = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="none")
        return acc.Loss.mean((losses * kept).sum() / kept.sum(), kept.sum())  # 0 / 0 where nothing is kept

    results, losses = [], []
    for keep in (slice(None), [0, 2, 3]):
        torch.manual_seed(1)
        model = nn.Linear(3, 3)
        step = make_step(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
        losses.append(float(step((x[keep], labels[keep])).loss))
        results.append(model.state_dict())
    assert losses[0] == pytest.approx(losses[1])
    for name in results[0]:
        assert torch.allclose(results[0][name], results[1][name], rtol=1e-6, atol=1e-7)


def test_case_12_no_gradients_at_all(where):
    model = nn.ModuleList([W(), W()])
    optimizer = torch.optim.AdamW(model[0].parameters())
    step = make_step(model, lambda m, y: (m[1].w - y).square().mean(), optimizer=optimizer, precision="fp16")
    before = snapshot(model, optimizer)
    with pytest.warns(UserWarning, match="no parameter of the optimizer took part"):
        result = step(torch.ones(1))
    assert not result.applied
    assert_same(before, snapshot(model, optimizer))
    assert step.loss_scale == acc.DynamicScale()


def test_case_13_one_of_two_optimizers_overflows(where):
    generator, discriminator = W(), W()
    steps = [
        make_step(generator, lambda m, y: (m.w - y).square().mean() * math.inf, precision="fp16"),
        make_step(discriminator, lambda m, y: (m.w - y).square().mean(), lr=0.5, precision="fp16"),
    ]
    assert [bool(step(torch.ones(1)).applied) for step in steps] == [False, True]
    assert (generator.w.item(), discriminator.w.item()) == (0.0, 1.0)
    assert [float(step.loss_scale) for step in steps] == [2.0**15, 2.0**16]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_case_14_evaluation_in_mid_window(precision):
    x = torch.randn(4, 8)
    found = []
    for evaluate in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

        def loss_fn(model, batch, evaluate=evaluate):
            if evaluate:
                with torch.no_grad():
                    model(batch)
            return model(batch).float().square().mean()

        found.append(applied_gradients(make_step(model, loss_fn, precision=precision), x))
    assert len(found[0]) == 4
    assert_same(found[0], found[1])


def test_case_15_weights_swapped_in_mid_run():
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def loss_fn(model, x):
        y = model(x)
        seen.append(y.item())
        return y.float().mean() * 0.0

    step = make_step(model, loss_fn, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):  # around the whole loop, as some write it
        for value in (1.0, 5.0, 1.0):
            with torch.no_grad():
                model.weight.copy_(torch.tensor([[value]]))
            step(torch.ones(1, 1))
    assert seen == [1.0, 5.0, 1.0]


def test_case_15_a_forward_between_the_steps():
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def loss_fn(model, x):
        seen.append(model(x).item())
        return model(x).float().mean() * 0.0

    step = make_step(model, loss_fn, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        for value in (1.0, 5.0, 1.0):
            model(torch.ones(1, 1))  # casts the weights in the outer region, as they were
            with torch.no_grad():
                model.weight.copy_(torch.tensor([[value]]))
            step(torch.ones(1, 1))
    assert seen == [1.0, 5.0, 1.0]


class Same(nn.Module):
    """Gives every input the same representation."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.z + 0 * x


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_case_16_contrast_inside_the_micro_batch(temperature):
    """Four pairs, all representations equal: the loss is ln 4, and micro-batches of two would say ln 2, silently."""

    def loss_fn(model, pairs):
        logits = model(pairs["left"]) @ model(pairs["right"]).T / temperature
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    pairs = {"left": torch.zeros(4, 3), "right": torch.zeros(4, 3)}
    assert loss_fn(Same(), pairs).item() == pytest.approx(math.log(4))
    report = acc.check(Same(), loss_fn, pairs, splits=[2])
    assert not report
    assert report.differences[0].name == "loss"
    assert report.differences[0].error == pytest.approx(0.5)
    assert [str(cause.kind) for cause in report.causes] == ["loss compares samples"]
    assert "gather the representations" in report.causes[0].remedy


def test_case_17_several_denominators(where):
    """Tokens 10, 1, 5 over 16; an auxiliary loss over samples 2, 2, 2 over 6."""
    counts, tokens, samples = (10, 1, 5), (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})

    def loss_fn(model, i):
        i = int(i)
        return {
            "tokens": acc.Loss(model["a"] * tokens[i] * counts[i], counts[i]),
            "aux": acc.Loss(model["b"] * samples[i] * 2, 2),
        }

    step = make_step(model, loss_fn, weigh=lambda batch: {"tokens": 16, "aux": 6})
    a, b = applied_gradients(step, torch.arange(3))
    assert a.item() == pytest.approx((10 * 1.0 + 1 * 2.0 + 5 * 3.0) / 16)
    assert b.item() == pytest.approx((2 * 4.0 + 2 * 5.0 + 2 * 6.0) / 6)


def test_case_18_the_model_already_divides(where):
    y = torch.randn(42)
    whole, parts = W(), W()
    make_step(whole, microbatch=42)(y)
    step = make_step(parts, lambda m, y: acc.Loss.mean((m.w - y).square().mean(), len(y)), microbatch=Sizes(40, 2))
    step(y)
    assert parts.w.item() == pytest.approx(whole.w.item(), rel=1e-6)


def test_case_21_skip_by_the_users_own_rule(where, fused):
    model = W()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = make_step(model, optimizer=optimizer, scheduler=scheduler, veto=lambda norm: norm > 10)
    step(torch.ones(1))
    step.settle()
    before = snapshot(model, optimizer, scheduler)
    result = step(torch.full((1,), 100.0))
    assert not result.applied
    assert result.all_finite
    step.settle()
    assert_same(before, snapshot(model, optimizer, scheduler))
    assert step(torch.ones(1)).applied
    step.settle()
    assert scheduler.get_last_lr() == [0.125]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_cases_22_and_38_and_39_checkpointed_activations(precision, use_reentrant):
    """Dropout inside the checkpointed block, autocast, and a frozen start."""

    def run(wrap):
        torch.manual_seed(1)
        first, block = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU())
        model = nn.ModuleList([first, block, nn.Linear(6, 1)])
        first.requires_grad_(use_reentrant)  # reentrant checkpoints need an input that requires gradients

        def loss_fn(model, x):
            hidden = model[0](x)
            hidden = checkpoint(model[1], hidden, use_reentrant=use_reentrant) if wrap else model[1](hidden)
            return model[2](hidden).float().square().mean()

        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        torch.manual_seed(2)
        return applied_gradients(make_step(model, loss_fn, optimizer=optimizer, precision=precision, microbatch=2), x)

    x = torch.randn(6, 6)
    right, found = run(False), run(True)
    assert len(found) == (6 if use_reentrant else 4)
    assert_same(right, found)


def test_case_24_adams_epsilon_in_half():
    model = nn.Linear(2, 1).half()
    with pytest.raises(acc.PrecisionError, match="16-bit sums lose gradient"):
        make_step(model, optimizer=torch.optim.Adam(model.parameters()), precision="fp16")


@pytest.mark.parametrize("where_fused", [True, False])
def test_case_25_resume_between_windows(where_fused):
    def fresh():
        model = W()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=where_fused)
        scale = acc.DynamicScale(initial=4.0, growth_interval=2)
        return model, optimizer, make_step(model, optimizer=optimizer, precision="fp16", loss_scale=scale)

    model, _, step = fresh()
    batches = [torch.randn(3) for _ in range(6)]
    for y in batches:
        step(y)
    first, optimizer, half = fresh()
    for y in batches[:3]:
        half(y)
    assert float(half.loss_scale) == 8.0  # grown once
    states = first.state_dict(), optimizer.state_dict(), half.state_dict()
    second, optimizer, rest = fresh()
    for part, state in zip((second, optimizer, rest), states, strict=True):
        part.load_state_dict(state)
    assert rest.state_dict() == half.state_dict()
    for y in batches[3:]:
        rest(y)
    assert second.w.item() == model.w.item()
    assert rest.state_dict() == step.state_dict()


def test_case_26_field_cut_at_different_rows():
    met = []

    def loss_fn(model, batch):
        met.append((batch["x"].tolist(), batch["names"]))
        return squared(model, batch["x"])

    batch = {"x": torch.arange(10.0), "names": [float(i) for i in range(10)]}
    make_step(W(), loss_fn, microbatch=acc.by_count(3))(batch)
    assert [len(rows) for rows, _ in met] == [4, 3, 3]
    assert all(rows == names for rows, names in met)


def test_case_27_auxiliary_loss_scaled_with_the_main_one():
    counts, c = [9, 1, 4, 2], 0.01
    model = nn.ParameterDict({"main": torch.zeros(()), "router": torch.zeros(())})

    def loss_fn(model, batch):
        count = int(batch)
        return {"main": acc.Loss(model["main"] * count, count), "balance": c * model["router"] * count}

    step = make_step(model, loss_fn, weigh=lambda batch: {"main": int(batch.sum()), "balance": len(batch)})
    main, router = applied_gradients(step, torch.tensor(counts))
    assert main.item() == pytest.approx(1.0)
    assert router.item() == pytest.approx(c * sum(counts) / 4)


def test_case_28_poison_kept_after_a_skip(where, fused):
    model = W()
    step = make_step(
        model,
        lambda m, y: (m.w - y).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
    )
    applied = [bool(step(torch.tensor([math.nan if i == 0 else 1.0])).applied) for i in range(20)]
    assert applied == [False] + [True] * 19
    assert step.state_dict()["num_applied"] == 19


def test_case_29_mixed_units_in_one_window(where):
    """The scale is read once per window: one that is loaded in the middle is the next window's."""
    model = W()

    def loss_fn(model, y):
        if y.item() == 2.0:
            step.load_state_dict({"loss_scale": acc.DynamicScale(initial=2.0).state_dict()})
        return squared(model, y)

    step = make_step(model, loss_fn, lr=1.0, precision="fp16")
    found = applied_gradients(step, torch.tensor([1.0, 2.0, 3.0]))
    assert found[0].item() == -4.0
    assert step.last.loss_scale == 2.0**16


def test_case_30_a_zero_scale_kills_weights(where):
    model = W()
    step = make_step(model, lambda m, y: (m.w - y).square().mean(), precision="fp16")
    before = snapshot(model)
    num_steps = 0
    with pytest.raises(acc.ScaleCollapseError):
        for _ in range(200):
            step(torch.tensor([math.nan]))
            num_steps += 1
    assert num_steps <= 33
    assert_same(before, snapshot(model))
    assert float(step.loss_scale) >= 1.0


def test_case_32_duplicates_in_a_sparse_gradient(where):
    def build(value):
        model = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(model.weight)
        return model, make_step(model, lambda m, i: acc.Loss(m(i).sum() * value, 1), precision="fp32", microbatch=2)

    model, step = build(3.0)
    step(torch.tensor([1, 1]))
    assert model.weight.flatten().tolist() == [0.0, -6.0, 0.0]
    model, step = build(2e38)  # twice that is beyond float32
    assert not step(torch.tensor([1, 1])).applied
    assert model.weight.flatten().tolist() == [0.0, 0.0, 0.0]


def test_case_34_decay_and_step_count_per_micro_batch(where, fused):
    model = W(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    make_step(model, lambda m, y: (m.w * 0.0).sum(), optimizer=optimizer, microbatch=acc.by_count(4))(torch.ones(4))
    assert model.w.item() == pytest.approx(0.99)
    assert float(optimizer.state[model.w]["step"]) == 1


def test_case_35_skip_by_zeroing(where, fused):
    model = W(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    step = make_step(model, optimizer=optimizer)
    before = snapshot(model, optimizer)
    step(torch.tensor([math.nan]))
    assert_same(before, snapshot(model, optimizer))
    step(torch.ones(2))
    optimizer.state[model.w]["exp_avg"].fill_(1.0)
    before = snapshot(model, optimizer)
    step(torch.tensor([math.nan]))
    assert_same(before, snapshot(model, optimizer))


def test_case_37_growth_tracker_not_saved():
    scale = acc.DynamicScale(initial=1024.0, growth_interval=2000)
    for _ in range(1999):
        scale = scale.next(True)
    restored = acc.DynamicScale().load_state_dict(scale.state_dict())
    assert float(restored) == 1024.0
    assert float(restored.next(True)) == 2048.0


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_case_40_logged_loss(where, precision):
    model = W()
    step = make_step(model, lambda m, y: (m.w * 0 + y).mean(), precision=precision)
    assert float(step(torch.tensor([1.0, 2.0, 3.0, 4.0])).loss) == 2.5
    assert math.isnan(float(step(torch.tensor([1.0, math.nan])).loss))


def test_case_41_weights_cast_once_then_changed():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    losses = []

    def loss_fn(model, x):
        loss = model(x).float().square().mean()
        losses.append(loss.item())
        return loss

    step = make_step(model, loss_fn, lr=0.5, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            step(torch.ones(1, 1))
    assert losses == [1.0, 0.0, 0.0]
    assert model.weight.item() == 0.0


def test_case_42_norms_of_half_tensors(where):
    from accumulus.norm import norm_of

    for dtype in (torch.float16, torch.bfloat16):
        gradients = [torch.full((1000,), 300.0, dtype=dtype)] * 50
        assert float(norm_of(gradients)) == pytest.approx(300.0 * math.sqrt(50_000), rel=1e-3)
