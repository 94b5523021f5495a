"""The laws of `TrainStep`, against the whole batch in float64; then the ways in which it refuses or skips."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accumulus as acc

from .reference import (
    applied_gradients,
    assert_same,
    relative_error,
    snapshot,
    token_loss,
    tokens_batch,
    tokens_model,
    whole_batch,
)

FUSED = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


class Sizes:
    """A split by any list of sizes."""

    def __init__(self, sizes):
        self._sizes = sizes

    def sizes(self, num_samples):
        return self._sizes


def make_step(model, loss_fn=token_loss, *, lr=1.0, fused=False, **options):
    options = {"precision": "fp32", "microbatch": 4} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=fused)
    return acc.TrainStep(model, optimizer, loss_fn, **options)


@st.composite
def splits(draw):
    """Counts of valid labels per sample, zeros and a 100-fold range among them, and a way to cut them."""
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 50, 100]), min_size=1, max_size=12).filter(sum))
    sizes, left = [], len(counts)
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return counts, sizes


class TestTheLawOfTheSplit:
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
    @pytest.mark.parametrize("max_grad_norm", [None, 0.05])
    @given(case=splits(), fused=st.booleans())
    @settings(max_examples=40)
    def test_any_split_equals_the_whole_batch(self, dtype, bound, max_grad_norm, case, fused):
        counts, sizes = case
        model, batch = tokens_model(dtype), tokens_batch(counts)
        right = whole_batch(model, token_loss, batch, max_grad_norm=max_grad_norm)
        step = make_step(model, fused=fused, microbatch=Sizes(sizes), max_grad_norm=max_grad_norm)
        found = applied_gradients(step, batch)
        result = step.last
        assert relative_error(found, right.gradients) <= bound
        assert float(result.loss) == pytest.approx(right.loss, rel=bound)
        assert float(result.grad_norm) == pytest.approx(right.grad_norm, rel=bound)
        assert {k: float(v) for k, v in result.metrics.items()} == pytest.approx(right.metrics, rel=1e-6)
        assert (result.num_samples, result.num_microbatches) == (len(counts), len(sizes))
        assert float(result.weight) == sum(counts)

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=15)
    def test_the_order_of_micro_batches_does_not_matter(self, seed):
        batch = tokens_batch([100, 1, 0, 50, 2, 7])
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        shuffled = {name: leaf[order] for name, leaf in batch.items()}
        one, other = tokens_model(), tokens_model()
        make_step(one, microbatch=1)(batch)
        make_step(other, microbatch=1)(shuffled)
        assert relative_error(list(one.parameters()), list(other.parameters())) <= 1e-14

    @pytest.mark.parametrize("name", FUSED)
    @pytest.mark.parametrize("fused", [True, False])
    def test_over_many_steps_of_every_optimizer(self, name, fused, where):
        """Twenty windows of different weights: the reference passes from window to window and never shows."""
        models = [tokens_model(), tokens_model()]
        plain = FUSED[name](models[0].parameters(), lr=0.01, foreach=False)
        step = acc.TrainStep(
            models[1],
            FUSED[name](models[1].parameters(), lr=0.01, fused=fused),
            token_loss,
            precision="fp32",
            microbatch=3,
            max_grad_norm=0.5,
        )
        for i in range(20):
            batch = tokens_batch([1 + i * 4, 0, 100, 3, 5 * i, 1, 0], seed=i)
            loss = token_loss(models[0], batch)
            (loss.sum / loss.weight).backward()
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.5)
            plain.step()
            plain.zero_grad()
            step(batch)
        assert (
            relative_error(list(models[1].parameters()), list(models[0].parameters())) <= 1e-7
        )  # clip_grad_norm_ adds 1e-6

    @pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**8, 2.0**16, 3000.0])
    @pytest.mark.parametrize("fused", [True, False])
    def test_any_loss_scale_gives_the_same_update(self, scale, fused):
        batch = tokens_batch([100, 1, 0, 50])
        right = whole_batch(tokens_model(), token_loss, batch, max_grad_norm=0.1)
        model = tokens_model(torch.float32)
        step = make_step(model, fused=fused, microbatch=1, max_grad_norm=0.1, loss_scale=acc.StaticScale(scale))
        found = applied_gradients(step, batch)
        assert relative_error(found, right.gradients) <= 2e-5

    @pytest.mark.parametrize(("precision", "bound"), [("fp16", 4e-3), ("bf16", 3e-2)])
    @pytest.mark.parametrize("scale", [1.0, 2.0**6, 2.0**12])
    def test_low_precision_is_the_whole_batch_up_to_its_rounding(self, precision, bound, scale):
        batch = tokens_batch([100, 1, 0, 50, 20])
        right = whole_batch(tokens_model(), token_loss, batch)
        for size in (1, 2, 5):
            model = tokens_model(torch.float32)
            step = make_step(model, precision=precision, microbatch=size, loss_scale=acc.StaticScale(scale))
            found = applied_gradients(step, batch)
            assert relative_error(found, right.gradients) <= bound

    def test_collated_samples_are_padded_to_their_own_longest(self):
        samples = [torch.randint(1, 17, (n,)) for n in (3, 50, 7, 20, 1)]
        widths = []

        def collate(some):
            tokens = nn.utils.rnn.pad_sequence(some, batch_first=True)
            widths.append(tokens.shape[1])
            return {"tokens": tokens, "labels": torch.where(tokens > 0, tokens, -100)}

        right = whole_batch(tokens_model(), token_loss, collate(samples))
        widths.clear()
        model = tokens_model()
        step = make_step(model, microbatch=2, collate=collate)
        found = applied_gradients(step, samples)
        assert relative_error(found, right.gradients) <= 1e-12
        assert widths == [50, 20, 1]

    def test_a_scalar_stands_for_the_mean_over_samples(self):
        x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
        model = nn.Linear(3, 1).double()

        def mean(model, batch):
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        right = whole_batch(model, lambda m, b: acc.Loss.mean(mean(m, b), 10), (x, y))
        found = applied_gradients(make_step(model, mean), (x, y))
        assert relative_error(found, right.gradients) <= 1e-12


class TestTerms:
    """Several terms, each over its own count: the objective is the sum of sum_k / weight_k."""

    @staticmethod
    def terms(model, batch):
        tokens = token_loss(model, batch)
        per_sample = model(batch["tokens"]).square().mean((1, 2)).sum()
        return {"tokens": tokens, "balance": acc.Loss(0.3 * per_sample, len(batch["tokens"]))}

    @staticmethod
    def weigh(batch):
        return {"tokens": (batch["labels"] != -100).sum(), "balance": len(batch["labels"])}

    @given(case=splits())
    @settings(max_examples=30)
    def test_equal_the_whole_batch_when_weighed(self, case):
        counts, sizes = case
        model, batch = tokens_model(), tokens_batch(counts)
        right = whole_batch(model, self.terms, batch)
        step = make_step(model, self.terms, microbatch=Sizes(sizes), weigh=self.weigh)
        found = applied_gradients(step, batch)
        result = step.last
        assert relative_error(found, right.gradients) <= 1e-12
        assert float(result.loss) == pytest.approx(right.loss, rel=1e-12)
        assert result.to_dict()["weight"] == {"tokens": sum(counts), "balance": len(counts)}

    def test_on_a_device_too(self, accelerator):
        model, batch = tokens_model(), tokens_batch([9, 0, 30, 1, 1])
        right = whole_batch(model, self.terms, batch)
        step = make_step(model, self.terms, microbatch=2, weigh=self.weigh, fused=True)
        assert relative_error(applied_gradients(step, batch), right.gradients) <= 1e-12

    def test_without_weigh_equal_shares_are_enough(self, where):
        model, batch = tokens_model(), tokens_batch([5, 5, 5, 5])
        right = whole_batch(model, self.terms, batch)
        found = applied_gradients(make_step(model, self.terms, microbatch=2), batch)
        assert relative_error(found, right.gradients) <= 1e-12

    @pytest.mark.parametrize("fused", [True, False])
    def test_without_weigh_unequal_shares_are_refused_before_a_parameter_changes(self, where, fused):
        model, batch = tokens_model(), tokens_batch([5, 5, 5, 6])
        step = make_step(model, self.terms, microbatch=2, fused=fused)
        before = snapshot(model)
        with pytest.raises(acc.WeightError, match="pass weigh="):
            step(batch)
            step.state_dict()  # on a device the refusal is known only when its outcome is read
        assert_same(before, snapshot(model))
        assert all(p.grad is None for p in model.parameters())

    def test_one_micro_batch_needs_no_weigh(self):
        model, batch = tokens_model(), tokens_batch([5, 5, 5, 6])
        right = whole_batch(model, self.terms, batch)
        found = applied_gradients(make_step(model, self.terms, microbatch=4), batch)
        assert relative_error(found, right.gradients) <= 1e-12

    def test_a_term_that_weigh_forgot_is_named(self):
        step = make_step(tokens_model(), self.terms, microbatch=2, weigh=lambda batch: {"tokens": 21})
        with pytest.raises(acc.WeightError, match="'balance'"):
            step(tokens_batch([5, 5, 5, 6]))

    def test_a_term_absent_from_some_micro_batches_counts_there_for_nothing(self):
        def loss_fn(model, batch):
            returned = self.terms(model, batch)
            return returned if batch["flag"].any() else {"tokens": returned["tokens"]}

        batch = tokens_batch([5, 9, 5, 6]) | {"flag": torch.tensor([True, True, False, False])}
        model = tokens_model()

        def right_fn(model, batch):
            first = {name: leaf[:2] for name, leaf in batch.items()}
            return {"tokens": token_loss(model, batch), "balance": self.terms(model, first)["balance"]}

        right = whole_batch(model, right_fn, batch)
        step = make_step(model, loss_fn, microbatch=2, weigh=lambda b: {"tokens": 25, "balance": int(b["flag"].sum())})
        assert relative_error(applied_gradients(step, batch), right.gradients) <= 1e-12


class TestNonFinite:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("name", [*FUSED, "RMSprop"])
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("first", [True, False])
    def test_changes_nothing_bit_for_bit(self, where, precision, name, fused, first):
        if name == "RMSprop" and fused:
            pytest.skip("RMSprop has no fused kernel")
        model = tokens_model(torch.float32)
        cls = FUSED.get(name, torch.optim.RMSprop)
        momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        optimizer = cls(model.parameters(), lr=0.1, **momentum, **({"fused": True} if fused else {}))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        poison = False

        def loss_fn(model, batch):
            loss = token_loss(model, batch)
            return acc.Loss(loss.sum * float("inf"), loss.weight) if poison and batch["tokens"][0, 0] == 1 else loss

        step = acc.TrainStep(
            model, optimizer, loss_fn, precision=precision, microbatch=1, scheduler=scheduler, max_grad_norm=1.0
        )
        batch = tokens_batch([9, 3, 4])
        batch["tokens"][:, 0] = torch.tensor([2, 1, 2])
        if not first:
            step(batch)
            step.state_dict()
        before = snapshot(model, optimizer, scheduler)
        scale = float(step.loss_scale)
        poison = True
        result = step(batch)
        assert not result.all_finite
        assert not result.applied
        assert float(step.loss_scale) == (scale / 2 if precision == "fp16" else scale)
        assert_same(before, snapshot(model, optimizer, scheduler))
        assert all(p.grad is None for p in model.parameters())
        poison = False
        assert step(batch).applied
        assert step.state_dict()["num_applied"] == (1 if first else 2)

    def test_is_applied_where_the_user_says_so(self):
        model = tokens_model(torch.float32)
        step = make_step(model, lambda m, b: token_loss(m, b).sum * math.nan, skip_nonfinite=False)
        result = step(tokens_batch([3]))
        assert result.applied
        assert result.grad_norm is None  # nothing needed it
        assert any(p.isnan().any() for p in model.parameters())

    def test_large_finite_gradients_are_not_taken_for_infinite(self):
        """Their squares do not fit in float32; the gradient does."""
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        step = make_step(model, lambda m, b: (m(b) * 1e25).sum(), lr=1e-25, microbatch=1)
        result = step(torch.ones(1, 1))
        assert result.applied
        assert float(result.grad_norm) == pytest.approx(1e25)
        assert model.weight.item() == pytest.approx(-1.0)


class TestWeights:
    def test_a_batch_of_total_weight_zero_raises_and_changes_nothing(self, where):
        model = tokens_model()
        step = make_step(model)
        before = snapshot(model)
        with pytest.raises(acc.WeightError, match="total weight 0"):
            step(tokens_batch([0, 0, 0]))
            step.state_dict()
        assert_same(before, snapshot(model))

    def test_or_is_skipped_and_says_so(self, where):
        model = tokens_model()
        step = make_step(model, on_empty="skip")
        before = snapshot(model)
        result = step(tokens_batch([0, 0, 0]))
        assert not result.applied
        assert result.to_dict()["weight"] == 0
        assert math.isnan(float(result.loss))
        assert_same(before, snapshot(model))
        assert step(tokens_batch([1, 0, 3])).applied
        assert step.state_dict()["num_steps"] == 2

    @pytest.mark.parametrize(
        "bad",
        [
            -1,
            -0.5,
            math.nan,
            math.inf,
            "many",
            None,
            torch.tensor(-2),
            torch.tensor(math.nan),
            torch.ones(3),
            torch.tensor(3.0, dtype=torch.float16),
            torch.tensor(1 + 1j),
        ],
    )
    def test_weights_that_cannot_be_are_refused(self, bad):
        model = tokens_model()
        before = snapshot(model)
        with pytest.raises(acc.WeightError):
            make_step(model, lambda m, b: acc.Loss(token_loss(m, b).sum, bad))(tokens_batch([1]))
        assert_same(before, snapshot(model))
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("bad", [-2.0, math.nan, math.inf])
    @pytest.mark.parametrize("fused", [True, False])
    def test_on_a_device_they_are_refused_when_the_outcome_is_read(self, accelerator, bad, fused):
        model = tokens_model()
        before = snapshot(model)
        step = make_step(model, lambda m, b: acc.Loss(token_loss(m, b).sum, torch.tensor(bad)), fused=fused)
        with pytest.raises(acc.WeightError, match="negative, NaN or infinite"):
            step(tokens_batch([1]))
            step.state_dict()
        assert_same(before, snapshot(model))

    def test_fractional_weights(self, where):
        """Importance weights: sum(w * loss) / sum(w)."""
        model = tokens_model()
        importance = torch.rand(6, dtype=torch.float64)

        def loss_fn(model, batch):
            per_sample = model(batch["tokens"]).square().mean((1, 2))
            return acc.Loss((per_sample * batch["w"]).sum(), batch["w"].sum())

        batch = tokens_batch([1] * 6) | {"w": importance}
        right = whole_batch(model, loss_fn, batch)
        found = applied_gradients(make_step(model, loss_fn), batch)
        assert relative_error(found, right.gradients) <= 1e-12


class TestRefusals:
    def test_gradients_from_elsewhere(self):
        model = tokens_model()
        step = make_step(model)
        token_loss(model, tokens_batch([3])).sum.backward()
        with pytest.raises(acc.WindowError, match="'0.weight'.*zero_grad"):
            step(tokens_batch([3]))

    def test_a_loss_without_a_graph(self):
        with pytest.raises(acc.LossError, match="no graph"):
            make_step(tokens_model(), lambda m, b: token_loss(m, b).sum.detach())(tokens_batch([3]))

    @pytest.mark.parametrize("returned", [None, 3.0, torch.ones(2), {}, {"a": 1.0}, "loss"])
    def test_what_is_no_loss(self, returned):
        with pytest.raises(acc.LossError):
            make_step(tokens_model(), lambda m, b: returned)(tokens_batch([3]))

    def test_a_step_inside_its_own_loss_function(self):
        model = tokens_model()

        def loss_fn(model, batch):
            step(batch)

        step = make_step(model, loss_fn)
        with pytest.raises(acc.WindowError, match="inside"):
            step(tokens_batch([3]))

    def test_an_error_in_the_loss_function_leaves_nothing_behind(self):
        model = tokens_model()
        calls = []

        def loss_fn(model, batch):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("user's own")
            return token_loss(model, batch)

        step = make_step(model, loss_fn, microbatch=1)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match="user's own"):
            step(tokens_batch([3, 4]))
        assert_same(before, snapshot(model))
        assert all(p.grad is None for p in model.parameters())
        assert step(tokens_batch([3, 4])).applied

    def test_closures(self):
        model = tokens_model()
        with pytest.raises(acc.UnsupportedError, match="closure"):
            acc.TrainStep(model, torch.optim.LBFGS(model.parameters()), token_loss, precision="fp32", microbatch=1)

    def test_complex_parameters(self):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(model.weight.to(torch.complex64))
        with pytest.raises(acc.UnsupportedError, match="complex"):
            make_step(model)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
    def test_parameters_in_16_bit(self, dtype, precision):
        with pytest.raises(acc.PrecisionError, match=r"model.float\(\)"):
            make_step(tokens_model(dtype), precision=precision)

    def test_frozen_16_bit_parameters_are_fine(self):
        """Adapters on a 16-bit base."""
        model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        step = acc.TrainStep(
            model, optimizer, lambda m, b: m(b).float().square().mean(), precision="bf16", microbatch=2
        )
        before = model[0].weight.clone()
        assert step(torch.randn(4, 4)).applied
        assert torch.equal(before, model[0].weight)

    def test_another_models_optimizer(self):
        other = tokens_model()
        with pytest.raises(acc.OptimizerError, match="none of the model's parameters"):
            acc.TrainStep(
                tokens_model(), torch.optim.SGD(other.parameters()), token_loss, precision="fp32", microbatch=1
            )

    def test_a_model_without_parameters(self):
        with pytest.raises(acc.OptimizerError, match="no parameters"):
            acc.TrainStep(nn.ReLU(), None, token_loss, microbatch=1)

    @pytest.mark.parametrize("bound", [0, -1.0, math.nan])
    @pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
    def test_bounds_that_are_not_positive(self, name, bound):
        with pytest.raises(acc.OptimizerError, match=name):
            make_step(tokens_model(), **{name: bound})

    def test_data_parallel_wrappers(self):
        model = nn.DataParallel(tokens_model())
        with pytest.raises(acc.UnsupportedError, match="DataParallel"):
            make_step(model)

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("loss_scale", 1024.0, acc.PrecisionError),
            ("loss_scale", 0, acc.PrecisionError),
            ("loss_scale", "dynamic", acc.PrecisionError),
            ("scheduler", 3, acc.OptimizerError),
            ("weigh", 5, acc.WeightError),
            ("max_grad_norm", "1", acc.OptimizerError),
            ("microbatch", "8", acc.SplitError),
        ],
    )
    def test_arguments_of_another_kind(self, name, value, error):
        with pytest.raises(error, match=name):
            make_step(tokens_model(), **{name: value})

    def test_other_arguments_of_another_kind(self):
        model = tokens_model()
        with pytest.raises(acc.LossError, match="loss_fn"):
            make_step(model, 3)
        with pytest.raises(acc.OptimizerError, match="model must be"):
            acc.TrainStep([model], torch.optim.SGD(model.parameters()), token_loss, microbatch=1)
        with pytest.raises(acc.BatchError, match="collate"):
            make_step(model, collate=3)([1, 2])

    def test_a_model_cast_after_the_step_was_made(self):
        model = tokens_model(torch.float32)
        step = make_step(model, fused=True)
        model.bfloat16()
        before = snapshot(model)
        with pytest.raises(acc.PrecisionError, match="bfloat16"):
            step(tokens_batch([3]))
        assert_same(before, snapshot(model))
        assert all(p.grad is None for p in model.parameters())

    def test_on_empty(self):
        with pytest.raises(acc.WeightError, match="on_empty"):
            make_step(tokens_model(), on_empty="ignore")


class TestState:
    def test_goes_on_as_if_it_had_not_stopped(self):
        def fresh():
            model = tokens_model(torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            scale = acc.DynamicScale(initial=4.0, growth_interval=3)
            return (
                model,
                optimizer,
                acc.TrainStep(model, optimizer, token_loss, precision="fp16", microbatch=2, loss_scale=scale),
            )

        batches = [tokens_batch([3, 0, 60, 9, 1], seed=i) for i in range(8)]
        model, _, step = fresh()
        for batch in batches:
            step(batch)
        again, optimizer, first = fresh()
        for batch in batches[:4]:
            first(batch)
        saved = copy.deepcopy((again.state_dict(), optimizer.state_dict(), first.state_dict()))
        resumed, optimizer, second = fresh()
        for part, state in zip((resumed, optimizer, second), saved, strict=True):
            part.load_state_dict(state)
        for batch in batches[4:]:
            second(batch)
        assert_same(model.state_dict(), resumed.state_dict())
        assert second.state_dict() == step.state_dict()

    def test_holds_plain_values(self):
        step = make_step(tokens_model())
        step(tokens_batch([3]))
        assert step.state_dict() == {
            "loss_scale": {"kind": "NoScale", "max_skips": 32, "num_skips": 0},
            "num_steps": 1,
            "num_applied": 1,
            "reference": 3.0,
        }

    @pytest.mark.parametrize(
        "state",
        [
            {"scale": 3},
            {"loss_scale": {"kind": "DynamicScale"}},
            {"loss_scale": 3},
            {"reference": -1.0, "num_steps": 77},
            {"reference": math.inf, "num_steps": 77},
            {"num_steps": 77, "num_applied": "many"},
            {"num_steps": 77, "num_applied": None},
        ],
    )
    def test_of_another_kind_is_refused_whole(self, state):
        step = make_step(tokens_model())
        before = step.state_dict()
        with pytest.raises(acc.StateError):
            step.load_state_dict(state)
        assert step.state_dict() == before

    def test_of_a_grad_scaler_is_taken(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        step = make_step(tokens_model(torch.float32), precision="fp16")
        step.load_state_dict(scaler.state_dict())
        assert float(step.loss_scale) == 64.0

    def test_survives_the_optimizers_own_rollback(self, accelerator):
        """A first step that is skipped must not leave uninitialised momentum, after a rollback either."""
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        initial = copy.deepcopy(optimizer.state_dict())
        step = acc.TrainStep(model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=1)
        for _ in range(2):
            step(torch.ones(2, 2))
        optimizer.load_state_dict(initial)
        assert not step(torch.tensor([[1.0, math.inf]])).applied
        assert not any(optimizer.state.values())


class TestResult:
    def test_is_plain_numbers_as_a_dict(self, where):
        model = tokens_model(torch.float32)
        step = make_step(model, fused=True, max_grad_norm=1.0)
        step(tokens_batch([3, 2]))
        found = step(tokens_batch([3, 2])).to_dict()
        assert list(found) == [
            "loss", "grad_norm", "clipped", "all_finite", "applied", "loss_scale", "weight",
            "num_microbatches", "num_samples", "metrics", "lr", "seconds", "choice",
        ]  # fmt: skip
        kinds = {
            "clipped": bool,
            "all_finite": bool,
            "applied": bool,
            "metrics": dict,
            "loss": float,
            "grad_norm": float,
        }
        for name, kind in kinds.items():
            assert type(found[name]) is kind, name

    def test_is_frozen(self):
        result = make_step(tokens_model())(tokens_batch([3]))
        with pytest.raises(AttributeError):
            result.loss = 0


def test_schedulers_advance_once_per_applied_step(where):
    model = tokens_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=1, scheduler=scheduler)
    rates = [step(tokens_batch([3, 4, 5])).lr for _ in range(3)]
    step.state_dict()
    assert rates == [1.0, 0.5, 0.25]
    assert scheduler.get_last_lr() == [0.125]


def test_a_deep_copy_is_a_step_of_its_own():
    step = make_step(
        tokens_model(torch.float32), precision="fp16", loss_scale=acc.DynamicScale(initial=4.0, growth_interval=1)
    )
    other = copy.deepcopy(step)
    before = snapshot(step.model)
    assert other(tokens_batch([3, 4])).loss_scale == 4.0
    assert other(tokens_batch([3, 4])).loss_scale == 8.0
    assert_same(before, snapshot(step.model))
    assert float(step.loss_scale) == 4.0


@pytest.mark.parametrize("fused", [True, False])
def test_a_bound_of_infinity_only_measures(where, fused):
    model, plain = tokens_model(torch.float32), tokens_model(torch.float32)
    batch = tokens_batch([3, 9])
    step = make_step(model, fused=fused, max_grad_norm=math.inf)
    for _ in range(2):
        result = step(batch)
        make_step(plain)(batch)
    assert float(result.grad_norm) > 0
    assert not result.clipped
    assert relative_error(list(model.parameters()), list(plain.parameters())) <= 1e-6


def test_a_gradient_of_zero_stays_one(where):
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    assert make_step(model, lambda m, b: m(b).mean() * 0.0, max_grad_norm=1.0)(torch.ones(2, 1)).applied
    assert model.weight.item() == before


def test_tiny_gradients_have_a_norm():
    model = nn.Linear(1, 1, bias=False)
    step = make_step(model, lambda m, b: (m(b) * 1e-24).sum())
    assert float(step(torch.ones(1, 1)).grad_norm) == pytest.approx(1e-24, rel=1e-5)


def test_windows_without_weight_do_not_lose_the_step_before(accelerator):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: acc.Loss(m(b).sum(), int(b.sum())), precision="fp32", microbatch=2,
        scheduler=scheduler, on_empty="skip",
    )  # fmt: skip
    for weight in (1, 0, 1, 0, 1, 0):
        step(torch.full((2, 1), float(weight)))
    assert step.state_dict() | {"loss_scale": None} == {
        "loss_scale": None, "num_steps": 6, "num_applied": 3, "reference": 1.0
    }  # fmt: skip
    assert scheduler.get_last_lr() == [0.0125]


def test_reduce_on_plateau_steps_on_the_reported_loss(where):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: m(b).mean() * 0.0 + b.mean(), precision="fp32", microbatch=2, scheduler=plateau
    )
    for value in (3.0, 2.0, 2.5, math.nan):
        step(torch.full((4, 1), value))
    step.settle()
    assert plateau.best == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_on_step_hears_of_every_step_once_and_averages_follow_applied_steps_only(where):
    model = nn.Linear(1, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    heard = []

    def follow(result):
        heard.append(result.num_samples)
        if result.applied:
            average.update_parameters(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = acc.TrainStep(model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=2, on_step=follow)
    for count, value in ((4, 1.0), (3, math.nan), (2, 1.0)):
        step(torch.full((count, 1), value))
    step.settle()
    assert heard == [4, 3, 2]
    assert average.n_averaged == 2


def test_settle_advances_the_scheduler(accelerator):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=2, scheduler=scheduler
    )
    for _ in range(2):
        step(torch.ones(2, 1))
    step.settle()
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_that_raises_does_not_stop_the_loss_scale():
    class Ends:
        def step(self):
            raise ValueError("past its end")

    step = make_step(
        tokens_model(torch.float32), precision="fp16", scheduler=Ends(),
        loss_scale=acc.DynamicScale(initial=8.0, growth_interval=2),
    )  # fmt: skip
    for _ in range(4):
        with pytest.raises(ValueError, match="past its end"):
            step(tokens_batch([3]))
    assert float(step.loss_scale) == 32.0


def test_rates_that_the_optimizer_chooses_itself_or_keeps_in_a_tensor():
    model = tokens_model(torch.float32)
    step = make_step(model)
    step.update.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert step(tokens_batch([3])).to_dict()["lr"] == 0.5
    optimizer = torch.optim.Adafactor(model.parameters())
    step = acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=1)
    assert step(tokens_batch([3])).applied


def test_parameters_that_stand_in_the_optimizer_twice():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.clone()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([*model.parameters(), *model.parameters()], lr=1.0)
    step = acc.TrainStep(
        model, optimizer, lambda m, b: m(b).mean(), precision="fp32", microbatch=1, loss_scale=acc.StaticScale(4.0)
    )
    step(torch.ones(4, 2))
    assert torch.allclose(
        before - model.weight, torch.full((1, 2), 2.0)
    )  # torch itself steps it twice, by the true gradient


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_on_the_optimizers_step_see_the_true_gradient_and_applied_steps_only(where, fused):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    factor, norms, done = 1.0, [], []
    optimizer.register_step_pre_hook(lambda *_: norms.append(model.weight.grad.norm().item()))
    optimizer.register_step_post_hook(lambda *_: done.append(1))
    step = acc.TrainStep(
        model,
        optimizer,
        lambda m, b: m(b).mean() * factor,
        precision="fp32",
        microbatch=1,
        loss_scale=acc.StaticScale(1024.0),
    )
    for factor in (1.0, math.inf, 3.0):  # noqa: B007
        step(torch.ones(4, 1))
    assert norms == [1.0, 3.0]
    assert len(done) == 2


def test_the_cause_of_a_collapse_that_cannot_be_found_does_not_hide_it():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 2:
            raise StopIteration
        return token_loss(model, batch).sum * math.nan

    step = make_step(tokens_model(), loss_fn, loss_scale=acc.NoScale(max_skips=1))
    with pytest.raises(acc.ScaleCollapseError, match="could not be run again"):
        step(tokens_batch([3]))


def test_an_outer_autocast_does_not_reach_into_fp32():
    model = tokens_model(torch.float32)
    seen = []

    def loss_fn(model, batch):
        logits = model(batch["tokens"])
        seen.append(logits.dtype)
        return logits.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        make_step(model, loss_fn)(tokens_batch([3]))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [torch.float32]


def test_modules_that_mix_samples_are_warned_of():
    def loss_fn(model, batch):
        return model(batch).mean()

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"1 BatchNorm modules \('1' among them\).*use GroupNorm"):
        acc.TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, precision="fp32", microbatch=2)
    model[1].eval()
    acc.TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, precision="fp32", microbatch=2)


def test_no_warning_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_step(tokens_model(torch.float32), precision="fp16", fused=True)(tokens_batch([3, 4]))
