"""The streaming form: equal to `TrainStep` and to the whole batch; stopped anywhere, resumed; misuse is a sentence."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accumulus as acc

from .reference import assert_same, relative_error, snapshot, token_loss, tokens_batch, tokens_model, whole_batch


def rows_of(batch, start, stop):
    return {name: leaf[start:stop] for name, leaf in batch.items()}


def make(model, *, lr=1.0, fused=False, **options):
    options = {"precision": "fp32"} | options
    return acc.Accumulator(model, torch.optim.SGD(model.parameters(), lr=lr, fused=fused), **options)


def run_window(accumulator, microbatches, loss_fn=token_loss):
    """One window over the given micro-batches."""
    for microbatch, is_last in acc.windows(microbatches, size=len(microbatches)):
        with accumulator.microbatch(is_last):
            accumulator.backward(loss_fn(accumulator.model, microbatch))
    return accumulator.step()


class TestTheLaw:
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
    @given(
        counts=st.lists(st.sampled_from([0, 1, 2, 7, 50, 100]), min_size=1, max_size=14).filter(sum),
        size=st.integers(1, 5),
        rows=st.integers(1, 4),
        fused=st.booleans(),
    )
    @settings(max_examples=40)
    def test_every_window_is_its_own_whole_batch(self, dtype, bound, counts, size, rows, fused):
        """Random windows, weights and short ends; the streamed run is compared window by window."""
        batch = tokens_batch(counts)
        model = tokens_model(dtype)
        accumulator = make(model, fused=fused, lr=0.5, on_empty="skip", max_grad_norm=0.3)
        pieces = [rows_of(batch, i, i + rows) for i in range(0, len(counts), rows)]
        window = []
        before = copy.deepcopy(model)
        for piece, is_last in acc.windows(pieces, size=size):
            window.append(piece)
            with accumulator.microbatch(is_last):
                accumulator.backward(token_loss(model, piece))
            if not is_last:
                continue
            result = accumulator.step()
            whole = {name: torch.cat([p[name] for p in window]) for name in batch}
            if not (whole["labels"] != -100).any():
                assert not result.applied
            else:
                right = whole_batch(before, token_loss, whole, max_grad_norm=0.3, lr=0.5)
                assert float(result.loss) == pytest.approx(right.loss, rel=bound)
                assert float(result.grad_norm) == pytest.approx(right.grad_norm, rel=bound)
                floor = torch.finfo(dtype).eps
                assert relative_error(list(model.parameters()), list(right.model.parameters())) <= max(bound, floor)
            window, before = [], copy.deepcopy(model)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_equals_train_step_bit_for_bit(self, where, precision):
        models = [tokens_model(torch.float32) for _ in range(2)]
        # Frozen: one serves both.
        scale = acc.DynamicScale(initial=16.0, growth_interval=2) if precision == "fp16" else None
        options = {"precision": precision, "max_grad_norm": 0.5}
        optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in models]
        step = acc.TrainStep(models[0], optimizers[0], token_loss, microbatch=2, loss_scale=scale, **options)
        accumulator = acc.Accumulator(models[1], optimizers[1], loss_scale=scale, **options)
        for seed in range(5):
            batch = tokens_batch([9, 0, 100, 3, 1, 50], seed=seed)
            one = step(batch)
            other = run_window(accumulator, [rows_of(batch, i, i + 2) for i in (0, 2, 4)])
            assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-12)
            assert one.loss_scale == other.loss_scale
            assert (one.num_samples, one.num_microbatches) == (other.num_samples, other.num_microbatches)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)

    def test_terms_with_totals_given_at_the_start(self, where):
        def terms(model, batch):
            aux = model(batch["tokens"]).square().mean((1, 2)).sum()
            return {"tokens": token_loss(model, batch), "aux": acc.Loss(aux, len(batch["tokens"]))}

        model, batch = tokens_model(), tokens_batch([10, 1, 5])
        right = whole_batch(model, terms, batch)
        accumulator = make(model)
        accumulator.begin({"tokens": 16, "aux": 3})
        run_window(accumulator, [rows_of(batch, i, i + 1) for i in range(3)], terms)
        assert relative_error(list(model.parameters()), list(right.model.parameters())) <= 1e-12
        accumulator = make(tokens_model())
        with pytest.raises(acc.WeightError, match="shares differ"):
            run_window(accumulator, [rows_of(batch, i, i + 1) for i in range(3)], terms)
            accumulator.settle()

    def test_several_backwards_in_one_micro_batch_are_terms(self, where):
        batch = tokens_batch([10, 10, 10])

        def both(model, batch):
            penalty = model(batch["tokens"]).square().mean((1, 2)).sum()
            return {"a": token_loss(model, batch), "b": acc.Loss(penalty, len(batch["tokens"]))}

        model = tokens_model()
        right = whole_batch(model, both, batch)
        accumulator = make(model)
        for i, is_last in acc.windows(range(3), size=3):
            with accumulator.microbatch(is_last):
                for term in both(model, rows_of(batch, i, i + 1)).values():
                    accumulator.backward(term)
        accumulator.step()
        assert relative_error(list(model.parameters()), list(right.model.parameters())) <= 1e-12


class TestCases:
    @staticmethod
    def gradients(values, size):
        """The gradient of each window, each from w = 0; the loss of one element is (w - y)^2."""
        found = []
        weight = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(weight.weight)
        accumulator = make(weight)
        for y, is_last in acc.windows([torch.tensor([[v]]) for v in values], size=size):
            with accumulator.microbatch(is_last):
                accumulator.backward((weight(torch.ones(1, 1)) - y).square().mean())
            if is_last:
                accumulator.step()
                found.append(-weight.weight.item())
                nn.init.zeros_(weight.weight)
        return found

    def test_case_2_short_last_window(self, where):
        assert self.gradients([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], size=3) == [-4.0, -10.0, -14.0]

    def test_case_3_window_larger_than_the_data(self):
        assert self.gradients([1.0, 2.0, 3.0], size=4) == [-4.0]
        model = nn.Linear(1, 1)
        accumulator = make(model)
        steps = []
        for _ in range(2):
            for x, is_last in acc.windows(torch.ones(3, 1, 1), size=4):
                with accumulator.microbatch(is_last):
                    accumulator.backward(model(x).mean())
                if is_last:
                    steps.append(accumulator.step().num_microbatches)
        assert steps == [3, 3]

    def test_case_23_unknown_length(self):
        flags = [bool(f) for _, f in acc.windows((i for i in range(10)), size=4)]
        assert [i + 1 for i, flag in enumerate(flags) if flag] == [4, 8, 10]

    def test_case_13_generator_and_discriminator(self, where):
        """Each with its own step and scale, the other frozen while it learns; one overflows."""
        generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
        scale = acc.DynamicScale(initial=2.0**8)
        steps = [make(m, lr=0.1, precision="fp16", loss_scale=scale) for m in (generator, discriminator)]
        blow_up = math.inf
        before = snapshot(generator), snapshot(discriminator)
        for accumulator, other in (steps, steps[::-1]):
            other.model.requires_grad_(False)
            for z, is_last in acc.windows(torch.randn(2, 4, 2), size=2):
                with accumulator.microbatch(is_last):
                    score = discriminator(generator(z)).float().mean()
                    accumulator.backward(score * (blow_up if accumulator is steps[0] else 1.0))
            accumulator.step()
            other.model.requires_grad_(True)
        assert [float(a.loss_scale) for a in steps] == [2.0**7, 2.0**8]
        assert_same(before[0], snapshot(generator))
        assert not torch.equal(before[1][0]["weight"], discriminator.weight)

    @pytest.mark.parametrize("scale", [1.0, 1024.0])
    def test_case_31_gradient_penalty_under_a_scale(self, scale):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        accumulator = make(model, loss_scale=acc.StaticScale(scale), max_grad_norm=math.inf)
        x = torch.ones(1, 1, requires_grad=True)
        with accumulator.microbatch(True):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            accumulator.backward(acc.Loss((slope.norm() - 1).square(), 1))
        result = accumulator.step()
        assert float(result.loss) == 1.0
        assert float(result.grad_norm) == 2.0

    def test_case_33_averages_per_window(self, where):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
        average.update_parameters(model)  # the first one copies
        nn.init.zeros_(average.module.weight)
        accumulator = make(model, lr=0.0, on_step=lambda result: average.update_parameters(model))
        for x, is_last in acc.windows(torch.ones(40, 1, 1), size=4):
            with accumulator.microbatch(is_last):
                accumulator.backward(model(x).mean())
            if is_last:
                accumulator.step()
        accumulator.settle()
        assert average.module.weight.item() == pytest.approx(0.651, abs=5e-4)

    def test_case_36_totals_in_the_right_unit(self):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=25)
        accumulator = acc.Accumulator(model, optimizer, precision="fp32", scheduler=scheduler)
        rates = []
        for _ in range(3):
            for x, is_last in acc.windows(torch.ones(10, 1, 1), size=4):
                with accumulator.microbatch(is_last):
                    accumulator.backward(model(x).mean())
                if is_last:
                    accumulator.step()
                    rates.append(scheduler.get_last_lr()[0])
        assert len(rates) == 9
        assert rates[6] == pytest.approx(0.72)


class TestResume:
    """Stopped after any micro-batch and loaded into fresh objects, a run goes on bit for bit."""

    @staticmethod
    def fresh(precision):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(17, 8), nn.Dropout(0.3), nn.Linear(8, 17))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scale = acc.DynamicScale(initial=4.0, growth_interval=2) if precision == "fp16" else None
        return (
            model,
            optimizer,
            acc.Accumulator(model, optimizer, precision=precision, loss_scale=scale, max_grad_norm=1.0),
        )

    @staticmethod
    def take(accumulator, number, batch):
        with accumulator.microbatch(number % 3 == 2):
            accumulator.backward(token_loss(accumulator.model, batch))
        if number % 3 == 2:
            accumulator.step()

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("stop", range(1, 9))
    def test_at_every_micro_batch(self, where, precision, stop, tmp_path):
        batches = [tokens_batch([3 + i, 0, 60 - i], seed=i) for i in range(9)]
        model, _, accumulator = self.fresh(precision)
        torch.manual_seed(4)
        for number, batch in enumerate(batches):
            self.take(accumulator, number, batch)
        first, optimizer, accumulator = self.fresh(precision)
        torch.manual_seed(4)
        for number in range(stop):
            self.take(accumulator, number, batches[number])
        states = {"m": first.state_dict(), "o": optimizer.state_dict(), "a": accumulator.state_dict()}
        torch.save(states | {"r": torch.get_rng_state()}, tmp_path / "state.pt")
        accumulator.flush()

        states = torch.load(tmp_path / "state.pt", weights_only=True)
        resumed, optimizer, accumulator = self.fresh(precision)
        torch.manual_seed(99)
        resumed.load_state_dict(states["m"])
        optimizer.load_state_dict(states["o"])
        torch.set_rng_state(states["r"])
        accumulator.load_state_dict(states["a"])
        for number in range(stop, 9):
            self.take(accumulator, number, batches[number])
        assert_same(model.state_dict(), resumed.state_dict())

    @pytest.mark.parametrize("stop", [1, 2])
    def test_metrics_per_sample_come_in_the_order_of_arrival(self, where, stop, tmp_path):
        pieces = [torch.tensor([[4.0], [1.0]]), torch.tensor([[3.0]]), torch.tensor([[2.0], [0.0], [5.0]])]

        def take(accumulator, number):
            with accumulator.microbatch(number == 2):
                outputs = accumulator.model(pieces[number])
                metrics = {"input": acc.Metric(pieces[number][:, 0].half(), per_sample=True)}
                accumulator.backward(acc.Loss(outputs.sum(), len(outputs), metrics=metrics))

        accumulator = make(nn.Linear(1, 1))
        for number in range(stop):
            take(accumulator, number)
        torch.save(accumulator.state_dict(), tmp_path / "state.pt")
        accumulator.flush()
        resumed = make(nn.Linear(1, 1))
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for number in range(stop, 3):
            take(resumed, number)
        assert resumed.step().to_dict()["metrics"] == {"input": [4, 1, 3, 2, 0, 5]}

    def test_without_gradients_the_window_is_left_out(self):
        accumulator = make(tokens_model())
        with accumulator.microbatch(False):
            accumulator.backward(token_loss(accumulator.model, tokens_batch([3])))
        assert "window" in accumulator.state_dict()
        assert "window" not in accumulator.state_dict(gradients=False)
        accumulator.flush()

    def test_a_window_of_another_model_is_refused(self):
        accumulator = make(tokens_model())
        with accumulator.microbatch(False):
            accumulator.backward(token_loss(accumulator.model, tokens_batch([3])))
        state = accumulator.state_dict()
        with pytest.raises(acc.StateError, match="gradients"):
            make(nn.Linear(1, 1)).load_state_dict(state)
        accumulator.flush()


def test_functions_that_hear_of_a_step_are_heard_before_the_next_window(where):
    """They may change the model: on a device too before its next forward pass."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)

    @torch.no_grad()
    def clamp(result):
        model.weight.clamp_(-0.1, 0.1)

    accumulator = make(model, lr=0.5, fused=True, on_step=clamp)
    losses = []
    for x, is_last in acc.windows(torch.ones(3, 1, 3, dtype=torch.float64), size=1):
        with accumulator.microbatch(is_last):
            accumulator.backward(model(x).square().mean())
        losses.append(float(accumulator.step().loss))
    accumulator.settle()
    assert losses == pytest.approx([9.0, 0.09, 0.09])


class TestMisuse:
    """Each kind has its own sentence, and changes no parameter."""

    @pytest.fixture
    def accumulator(self):
        accumulator = make(tokens_model())
        yield accumulator
        accumulator._abandon()

    @staticmethod
    def one(accumulator, is_last=False):
        with accumulator.microbatch(is_last):
            accumulator.backward(token_loss(accumulator.model, tokens_batch([3])))

    def backward_outside(self, a):
        a.backward(token_loss(a.model, tokens_batch([3])))

    def step_too_early(self, a):
        self.one(a)
        a.step()

    def step_without_window(self, a):
        a.step()

    def step_inside(self, a):
        with a.microbatch(True):
            a.step()

    def one_more_after_the_last(self, a):
        self.one(a, is_last=True)
        self.one(a)

    def nested(self, a):
        with a.microbatch(False), a.microbatch(False):
            pass

    def parameters_by_hand(self, a):
        self.one(a)
        with torch.no_grad():
            a.model[0].weight.mul_(1.0)
        self.one(a)

    def optimizer_step(self, a):
        self.one(a)
        a.update.optimizer.step()

    def zero_grad(self, a):
        self.one(a, is_last=True)
        a.update.optimizer.zero_grad()
        a.step()

    def load_in_the_middle(self, a):
        self.one(a)
        a.load_state_dict(a.state_dict(gradients=False))

    def save_inside(self, a):
        with a.microbatch(False):
            a.state_dict()

    def no_graph(self, a):
        with a.microbatch(True):
            a.backward(acc.Loss(torch.ones(()), 1))

    def gradients_there(self, a):
        token_loss(a.model, tokens_batch([3])).sum.backward()
        self.one(a)

    def scalar_of_unknown_size(self, a):
        with a.microbatch(True):
            a.backward(token_loss(a.model, tokens_batch([3])).sum)

    def begin_twice(self, a):
        self.one(a)
        a.begin(3)

    KINDS = {
        "backward_outside": (acc.WindowError, "backward was called outside a micro-batch"),
        "step_too_early": (acc.WindowError, "before the window's last micro-batch"),
        "step_without_window": (acc.WindowError, "no window to step"),
        "step_inside": (acc.WindowError, "step was called inside a micro-batch"),
        "one_more_after_the_last": (acc.WindowError, r"call step\(\) before the next one"),
        "nested": (acc.WindowError, "already open"),
        "parameters_by_hand": (acc.WindowError, "parameters were changed"),
        "optimizer_step": (acc.WindowError, r"optimizer\.step\(\) was called inside a window"),
        "zero_grad": (acc.WindowError, "gradients were changed"),
        "load_in_the_middle": (acc.WindowError, "load_state_dict was called inside"),
        "save_inside": (acc.WindowError, "state_dict was called inside"),
        "no_graph": (acc.LossError, "has no graph"),
        "gradients_there": (acc.WindowError, "already have a gradient"),
        "scalar_of_unknown_size": (acc.WeightError, "num_samples="),
        "begin_twice": (acc.WindowError, "a window of 1 micro-batches is open"),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_a_sentence_of_its_own(self, accumulator, kind):
        error, says = self.KINDS[kind]
        before = snapshot(accumulator.model)
        with pytest.raises(error, match=says):
            getattr(self, kind)(accumulator)
        assert_same(before, snapshot(accumulator.model))

    def test_the_sentences_are_all_different(self):
        assert len({says for _, says in self.KINDS.values()}) == len(self.KINDS)

    def test_a_second_step(self, accumulator):
        self.one(accumulator, is_last=True)
        accumulator.step()
        before = snapshot(accumulator.model)
        with pytest.raises(acc.WindowError, match="no window to step"):
            accumulator.step()
        assert_same(before, snapshot(accumulator.model))

    def test_an_error_in_a_micro_batch_drops_the_window(self, accumulator):
        before = snapshot(accumulator.model)
        self.one(accumulator)
        with pytest.raises(KeyError), accumulator.microbatch(False):
            raise KeyError("mine")
        assert all(p.grad is None for p in accumulator.model.parameters())
        assert_same(before, snapshot(accumulator.model))
        with pytest.warns(UserWarning, match="1 micro-batches were dropped with their window, as KeyError"):
            self.one(accumulator, is_last=True)
        assert accumulator.step().num_microbatches == 1

    def test_an_error_in_backward_that_is_caught_inside_drops_the_window_too(self, accumulator):
        """Its weight is in the tallies and its gradient is not."""

        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise MemoryError("no room")

        before = snapshot(accumulator.model)
        self.one(accumulator)
        loss = token_loss(accumulator.model, tokens_batch([3]))
        bad = acc.Loss(Bad.apply(loss.sum), loss.weight)
        inside = accumulator.microbatch(True)
        with pytest.raises(acc.WindowError, match="window was dropped"), inside, contextlib.suppress(MemoryError):
            accumulator.backward(bad)
        assert all(p.grad is None for p in accumulator.model.parameters())
        assert_same(before, snapshot(accumulator.model))

    def test_a_refused_nested_one_changes_nothing_of_the_open_one(self, accumulator):
        with accumulator.microbatch(False, num_samples=4):
            with pytest.raises(acc.WindowError, match="already open"):
                accumulator.microbatch(True, num_samples=1)
            accumulator.backward(token_loss(accumulator.model, tokens_batch([3])).sum)
        assert accumulator.flush().weight == 4

    def test_zero_grad_of_one_optimizer_of_several(self):
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in model]
        for optimizer in optimizers:
            accumulator = acc.Accumulator(model, optimizers, precision="fp32")
            with accumulator.microbatch(False, num_samples=1):
                accumulator.backward((model[0](torch.ones(1, 1)) + model[1](torch.ones(1, 1))).mean())
            optimizer.zero_grad()
            with pytest.raises(acc.WindowError, match="gradients were changed"):
                accumulator.flush()

    def test_two_open_windows_that_share_a_parameter(self):
        shared = nn.Linear(1, 1)
        models = [nn.ModuleList([nn.Linear(1, 1), shared]) for _ in range(2)]
        one, other = (make(model) for model in models)
        one.begin()
        with pytest.raises(acc.WindowError, match="another open window shares parameters"):
            other.begin()
        one.flush()
        other.begin()
        other.flush()

    @pytest.mark.parametrize("size", ["4", -1, 2.0, True, torch.tensor(4)])
    def test_numbers_of_samples_that_cannot_be(self, accumulator, size):
        with pytest.raises(acc.WeightError, match="num_samples must be a number of samples"):
            accumulator.microbatch(False, num_samples=size)

    def test_a_term_given_twice_in_one_micro_batch(self, accumulator):
        with pytest.raises(acc.LossError, match="given twice"), accumulator.microbatch(True):
            for _ in range(2):
                accumulator.backward({"a": token_loss(accumulator.model, tokens_batch([3]))})

    def test_flush_inside(self, accumulator):
        with pytest.raises(acc.WindowError, match="flush was called inside"), accumulator.microbatch(False):
            accumulator.flush()

    def test_a_construction_that_failed_is_deleted_in_silence(self):
        with pytest.raises(TypeError):
            acc.Accumulator(nn.Linear(1, 1))
        gc.collect()

    def test_a_state_that_does_not_fit_changes_nothing(self, accumulator):
        self.one(accumulator)
        state = accumulator.state_dict()
        accumulator.flush()
        model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 9)).double()
        other = make(model)
        before = other.state_dict()
        bad = [
            state,
            state | {"window": {}},
            state | {"window": state["window"] | {"unit": "x"}},
            state | {"window": [1]},
        ]
        for wrong in bad:
            with pytest.raises(acc.StateError, match="does not fit"):
                other.load_state_dict(wrong)
            assert other.state_dict() == before
            assert all(p.grad is None for p in model.parameters())

    def test_copies_are_accumulators_of_their_own(self, accumulator):
        self.one(accumulator)
        accumulator.flush()
        for other in (copy.deepcopy(accumulator), pickle.loads(pickle.dumps(accumulator))):
            before = snapshot(accumulator.model)
            self.one(other, is_last=True)
            assert other.step().applied
            assert_same(before, snapshot(accumulator.model))

    def test_hooks_go_with_their_accumulators(self):
        model = tokens_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            acc.Accumulator(model, optimizer, precision="fp32")
        gc.collect()
        assert not optimizer._optimizer_step_pre_hooks

    def test_leaving_a_window_behind_warns_once_with_its_number(self):
        accumulator = make(tokens_model())
        self.one(accumulator)
        self.one(accumulator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del accumulator  # at once, without the garbage collector
        assert len(caught) == 1
        assert "left with 2 micro-batches" in str(caught[0].message)

    def test_flush_steps_what_is_there(self, accumulator):
        assert accumulator.flush() is None
        self.one(accumulator)
        self.one(accumulator)
        result = accumulator.flush()
        assert result.num_microbatches == 2
        assert accumulator.result is result
        assert accumulator.flush() is None


class TestAutocast:
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_evaluation_between_micro_batches(self, precision):
        """Case 14: a no_grad forward between two of them, inside an autocast region of its own."""
        batches = [torch.randn(4, 8) for _ in range(3)]
        found = []
        for evaluates in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
            accumulator = make(model, precision=precision, loss_scale=acc.NoScale())
            if evaluates:
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    model(batches[0])
            for x, is_last in acc.windows(batches, size=3):
                with accumulator.microbatch(is_last):
                    accumulator.backward(model(x).float().square().mean())
                if evaluates:
                    model.eval()
                    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                        model(x)
                    model.train()
            assert accumulator.step().applied
            found.append(model.state_dict())
        assert_same(found[0], found[1])

    def test_a_region_that_the_user_switched_off_stays_off_after_backward(self):
        model = nn.Linear(2, 2)
        accumulator = make(model, precision="bf16")
        with accumulator.microbatch(True, num_samples=3):
            y = model(torch.ones(3, 2))
            with torch.autocast("cpu", enabled=False):
                accumulator.backward(y.float().mean())
                assert model(torch.ones(3, 2)).dtype == torch.float32
        accumulator.step()

    def test_user_code_between_micro_batches_runs_in_full_precision(self):
        model = nn.Linear(2, 2)
        accumulator = make(model, precision="bf16")
        for x, is_last in acc.windows(torch.randn(2, 3, 2), size=2):
            with accumulator.microbatch(is_last):
                assert model(x).dtype == torch.bfloat16
                accumulator.backward(model(x).float().mean())
            assert model(x).dtype == torch.float32
        accumulator.step()

    def test_after_a_window_nothing_is_kept_cast(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        accumulator = make(model, lr=0.5, precision="bf16")
        for _ in range(2):
            with accumulator.microbatch(True):
                accumulator.backward(acc.Loss(model(torch.ones(1, 1)).float().square().sum(), 1))
            accumulator.step()
            with torch.autocast("cpu", torch.bfloat16):
                assert model(torch.ones(1, 1)).item() == 0.0
