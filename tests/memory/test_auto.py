"""`microbatch="auto"`: the law holds while sizes are tried, what fits is kept to, the choice goes with the state."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch

import accumulus as acc
from accumulus.memory import auto
from accumulus.memory.forecast import Fit, Forecast
from accumulus.memory.tune import MAX_STEPS
from tests.reference import assert_same, relative_error, token_loss, tokens_batch, tokens_model, whole_batch


class Clock:
    """Stands in for the stopwatch: a step takes as long as a curve of speeds says."""

    def __init__(self, monkeypatch, speed):
        self.speed, self.step = speed, None
        clock = self

        class Stopwatch:
            def __init__(self, device):
                pass

            def stop(self):
                seconds = clock.num_samples / clock.speed(clock.size)
                return lambda: seconds

        monkeypatch.setattr(auto, "Stopwatch", Stopwatch)

    def watch(self, step):
        run = step.run

        def noting(batch, parts):
            result = run(batch, parts)
            self.num_samples = parts.num_samples
            self.size = parts.peak_tokens or max(parts.sizes)
            return result

        step.run = noting
        return step


def make(microbatch="auto", *, dtype=torch.float64, **options):
    model = tokens_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=microbatch, **options)


def padded(counts, length=100, seed=0):
    batch = tokens_batch(counts, length=length, seed=seed)
    batch["tokens"] = torch.where(batch["labels"] == -100, 0, batch["tokens"])
    return batch


BATCH = [30, 7, 0, 90, 12, 55, 3, 100] * 4


@pytest.fixture
def clock(monkeypatch):
    """Fastest with 8 samples; those of 4 are nearly as fast."""
    return Clock(monkeypatch, lambda size: {32: 50, 16: 80, 8: 100, 4: 97, 2: 60}.get(size, 30))


def test_auto_is_the_default_and_every_step_is_the_whole_batch(where):
    model = tokens_model()
    step = acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), token_loss, precision="fp32")
    assert step.driver is not None
    for seed in range(14):
        batch = padded(BATCH, seed=seed)
        right = whole_batch(step.model, token_loss, batch)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        result = step(batch)
        found = [old - new.detach() for old, new in zip(before, step.model.parameters(), strict=True)]
        assert relative_error(found, right.gradients) <= 1e-12
        assert float(result.loss) == pytest.approx(right.loss, rel=1e-12)
    assert result.choice.reason.startswith("the smallest within 5 % of the fastest of")
    assert result.choice.samples_per_second > 0


def test_the_smallest_that_is_nearly_the_fastest_is_kept(clock, caplog):
    caplog.set_level(logging.INFO, "accumulus")
    step = clock.watch(make())
    results = [step(padded(BATCH)) for _ in range(MAX_STEPS + 3)]
    first, last = results[0].choice, results[-1].choice
    assert first.reason == f"trying sizes, step 1 of at most {MAX_STEPS}" and first.samples_per_second is None
    assert (last.size, last.unit, last.samples_per_second) == (4, "samples", pytest.approx(97))
    assert results[-1].num_microbatches == 8
    assert results[-1].to_dict()["choice"]["size"] == 4
    assert [record.message for record in caplog.records if "micro-batches of 4" in record.message]
    assert len({result.num_microbatches for result in results}) >= 3  # it did try


def test_listeners_hear_of_the_choice_too(clock):
    heard = []
    step = clock.watch(make(on_step=heard.append))
    for _ in range(3):
        assert step(padded(BATCH)) is heard[-1]
    assert heard[-1].choice.size == 32 // heard[-1].num_microbatches


def test_it_ends_by_itself_and_no_pass_is_run_for_it(clock):
    step, calls = clock.watch(make()), []
    right = step.loss_fn

    def loss_fn(model, part):
        if not isinstance(part["tokens"], torch._subclasses.FakeTensor):
            calls.append(len(part["tokens"]))
        return right(model, part)

    step.loss_fn = loss_fn
    for index in range(1, 16):
        step(padded(BATCH))
        assert sum(calls) == 32 * index  # each sample once per step
    assert step.driver._tuning.num_steps <= MAX_STEPS


def test_only_what_fits_is_tried(monkeypatch, clock):
    step = make(dtype=torch.float32)
    curve = acc.memory.curve(step.model, step.update.optimizer, token_loss, padded(BATCH), precision="fp32")
    limit = curve.at(9).peak_bytes
    step = clock.watch(make(dtype=torch.float32, memory_limit=limit))
    results = [step(padded(BATCH)) for _ in range(12)]
    assert max(-(-32 // result.num_microbatches) for result in results) == 8
    assert "; at most 9 fit in" in results[-1].choice.reason
    again = make(dtype=torch.float32, memory_limit=limit)
    again.load_state_dict(step.state_dict())
    assert clock.watch(again)(padded(BATCH)).choice.reason == results[-1].choice.reason


def test_a_limit_that_not_one_sample_meets_is_refused_before_anything_runs():
    step = make(dtype=torch.float32, memory_limit="1kb")
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(acc.OutOfMemoryError, match=r"not even one sample fits.*training takes .* a micro-batch of 1"):
        step(padded(BATCH))
    assert_same(dict(step.model.state_dict()), dict(before))


@pytest.mark.parametrize("limit", ["lots", -1, "12parsec"])
def test_limits_that_are_none(limit):
    with pytest.raises(acc.MemoryLimitError):
        make(memory_limit=limit)


def test_a_limit_for_a_size_that_was_given_is_refused():
    with pytest.raises(acc.SplitError, match="memory_limit is for microbatch='auto'"):
        make(8, memory_limit="1GiB")


def test_an_estimate_that_fails_leaves_recovery(monkeypatch, clock):
    monkeypatch.setattr("accumulus.memory.forecast.curve", lambda *_, **__: 1 / 0)
    step = clock.watch(make())
    right = step.loss_fn

    def loss_fn(model, part):
        if len(part["tokens"]) > 2:
            raise torch.OutOfMemoryError
        return right(model, part)

    step.loss_fn = loss_fn
    results = [step(padded(BATCH)) for _ in range(12)]
    assert results[0].num_microbatches == 16
    assert results[-1].choice.size == 2 and results[-1].num_microbatches == 16


def test_the_choice_goes_with_the_state(clock):
    step = clock.watch(make())
    for _ in range(12):
        step(padded(BATCH))
    saved = json.loads(json.dumps(step.state_dict()))
    again = clock.watch(make())
    again.load_state_dict(saved)
    assert again(padded(BATCH)).choice == step(padded(BATCH)).choice

    half = clock.watch(make())
    for _ in range(3):
        half(padded(BATCH))
    resumed = clock.watch(make())
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert resumed.driver._tuning == half.driver._tuning
    for _ in range(10):  # its first step is not believed, as every process's
        last = resumed(padded(BATCH)).choice, half(padded(BATCH)).choice
    assert last[0] == last[1] and last[0].size == 4

    make(8).load_state_dict(saved)
    with pytest.raises(acc.StateError, match="microbatch='auto'"):
        make().load_state_dict(saved | {"microbatch": {"tuning": None}})


def test_it_starts_again_only_when_shapes_grow(clock):
    step = clock.watch(make())
    for _ in range(12):
        step(padded(BATCH))
    tuned = step.driver._tuning
    for batch in (padded(BATCH[:5]), padded([5] * 32, length=50), padded(BATCH, length=110), padded(BATCH)):
        step(batch)
        assert step.driver._tuning is tuned and not step.driver._is_stale
    step(padded(BATCH, length=200))
    step(padded(BATCH, length=200))
    assert step.driver._tuning is not tuned and step.driver._tuning.choice is None


def test_larger_samples_are_estimated_before_they_run(monkeypatch):
    """With a limit that 16 short samples meet, batches three times as long are cut before any failure."""
    model = make(dtype=torch.float32).model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    curve = acc.memory.curve(model, optimizer, token_loss, padded(BATCH), precision="fp32")
    step = make(dtype=torch.float32, memory_limit=curve.at(16).peak_bytes)
    ran = []
    right = step.loss_fn

    def loss_fn(model, part):
        if not isinstance(part["tokens"], torch._subclasses.FakeTensor):
            ran.append(part["tokens"].numel())
        return right(model, part)

    step.loss_fn = loss_fn
    for _ in range(12):
        step(padded(BATCH))
    for _ in range(3):
        step(padded(BATCH, length=300))
    assert max(ran) <= 16 * 100
    assert step.driver._recovery.num_failures == 0


def test_token_budgets_are_tuned_in_tokens(monkeypatch):
    clock = Clock(monkeypatch, lambda tokens: tokens / (tokens + 50) / (1 + tokens / 1000))
    step = clock.watch(make(acc.by_tokens("auto", length="labels", multiple_of=1)))
    for seed in range(13):
        batch = padded(BATCH, seed=seed)
        right = whole_batch(step.model, token_loss, batch)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        result = step(batch)
        found = [old - new.detach() for old, new in zip(before, step.model.parameters(), strict=True)]
        assert relative_error(found, right.gradients) <= 1e-12
    assert result.choice.unit == "tokens" and 100 <= result.choice.size <= 400
    assert result.num_microbatches < 32


def test_batchnorm_never_gets_a_single_sample(clock):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    with pytest.warns(UserWarning, match="BatchNorm"):
        step = acc.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, x: model(x).square().mean(),
            precision="fp32",
        )
    clock.speed = lambda size: 1 / size  # the smallest is the fastest
    clock.watch(step)
    for _ in range(12):
        result = step(torch.randn(32, 4))
    assert result.choice.size == 2


def test_copies_choose_for_themselves(clock):
    step = clock.watch(make())
    step(padded(BATCH))
    del step.run
    copied = copy.deepcopy(step)
    assert copied.driver._step is copied and copied.driver._recovery._step is copied
    copied(padded(BATCH))
    assert step.driver._tuning != copied.driver._tuning


def test_the_forecast_holds_the_estimate_against_what_there_is(monkeypatch):
    step = make(8, dtype=torch.float32)
    batch = padded(BATCH)
    curve = acc.memory.curve(step.model, step.update.optimizer, token_loss, batch, precision="fp32")
    free = int(curve.at(10).peak_bytes / 0.9) + 1
    monkeypatch.setattr("accumulus.memory.forecast.available_bytes", lambda device: free - held)
    from accumulus.memory.forecast import held_bytes

    held = held_bytes(step)
    assert held == sum(parameter.nbytes for parameter in step.model.parameters())
    fit = Forecast(step).fit(batch)
    assert isinstance(fit, Fit) and fit.samples == 10
    assert fit.bound.sample_elements == 200  # tokens and labels
    assert fit.bound.elements == 2000


def test_a_choice_in_samples_is_none_in_tokens(clock):
    step = clock.watch(make())
    for _ in range(12):
        step(padded(BATCH))
    other = make(acc.by_tokens("auto", length="labels", multiple_of=1))
    other.load_state_dict(step.state_dict())
    choice = other(padded(BATCH)).choice
    assert choice.unit == "tokens" and not choice.is_final and choice.size > 32


def test_the_short_last_batch_of_an_epoch_tells_nothing(clock):
    clock.speed = lambda size: 100
    step = clock.watch(make())
    for _ in range(20):
        result = step(padded(BATCH))
        clock.speed = lambda size: 1e-6  # as slow as can be
        step(padded(BATCH[:3]))
        clock.speed = lambda size: 100
    assert result.choice.is_final and result.choice.samples_per_second == pytest.approx(100)


def test_what_a_failure_taught_outranks_the_estimate():
    """An estimate that did not foresee a failure is not asked again, however long batches become."""
    step = make(dtype=torch.float32)
    right, failures, estimates = step.loss_fn, [], []

    def loss_fn(model, part):
        if isinstance(part["tokens"], torch._subclasses.FakeTensor):
            return right(model, part)
        if part["tokens"].numel() > 400:
            failures.append(tuple(part["tokens"].shape))
            raise torch.OutOfMemoryError
        return right(model, part)

    fit = step.driver._forecast.fit
    step.driver._forecast.fit = lambda batch: estimates.append(1) or fit(batch)
    step.loss_fn = loss_fn
    for index in range(25):
        step(padded([5] * 16, length=20 + 10 * index))
    assert len(failures) == 1
    assert len(estimates) <= 3  # the first, one for samples more than twice as long, one at the failure; then no more
    saved = step.state_dict()["microbatch"]
    again = make(dtype=torch.float32)
    again.driver.load_state_dict(saved)
    assert saved["is_learned"] and again.driver._recovery.is_learned


def test_a_batch_without_weight_tells_nothing_of_speed(clock):
    step = clock.watch(make(on_empty="skip"))
    empty = padded([0] * 32)
    for index in range(MAX_STEPS + 4):
        step(empty if index % 2 else padded(BATCH))
    assert step.driver._tuning.choice == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_load": 0},
        {"elements": float("nan")},
        {"sample_elements": -1.0},
        {"limit_bytes": "much"},
        {"tuning": {"whole": 0, "largest": 0, "smallest": 0, "speeds": [], "num_steps": 0, "choice": None}},
        {"tuning": {"whole": 8, "largest": 8, "smallest": 1, "speeds": [[3, 1, 1]], "num_steps": 1, "choice": None}},
        {"tuning": {"whole": 8, "largest": 8, "smallest": 1, "speeds": [], "num_steps": 1, "choice": -5}},
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(clock, wrong):
    step = clock.watch(make())
    step(padded(BATCH))
    saved = step.state_dict()
    with pytest.raises(acc.StateError):
        step.load_state_dict(saved | {"microbatch": saved["microbatch"] | wrong})
    assert step.state_dict() == saved


def test_what_all_samples_share_makes_no_sample_larger(clock):
    """A collate that adds a mask over the length: small micro-batches hold as much of it as large ones."""
    samples = list(torch.ones(32, 100, dtype=torch.long))
    calls = []

    def collate(chosen):
        calls.append(len(chosen))
        tokens = torch.stack(chosen)
        return {"tokens": tokens, "labels": tokens, "mask": torch.ones(100, 100)}

    step = make(dtype=torch.float32, collate=collate)
    curve = acc.memory.curve(step.model, step.update.optimizer, token_loss, samples, precision="fp32", collate=collate)
    step = clock.watch(make(dtype=torch.float32, collate=collate, memory_limit=curve.at(16).peak_bytes))
    step(samples)
    calls.clear()
    results = [step(samples) for _ in range(MAX_STEPS + 2)]
    assert results[-1].choice.size == 4
    assert len(calls) == sum(result.num_microbatches for result in results)  # each is collated once
