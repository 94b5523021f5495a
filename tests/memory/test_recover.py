"""Out of memory anywhere in a step: what comes of it is bit for bit the smaller micro-batch from the start."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import accumulus as acc
from accumulus.memory.forecast import Forecast
from accumulus.memory.recover import Recovery
from accumulus.microbatch import BySize, Groups
from tests.reference import assert_same, relative_error, token_loss, tokens_batch, tokens_model, whole_batch

pytestmark = pytest.mark.filterwarnings("ignore:1 BatchNorm modules")


class FailAt(TorchDispatchMode):
    """Runs out of memory at the k-th operator."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.count, self.operator = k, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.k:
            self.operator = func.__name__
            raise torch.OutOfMemoryError(f"injected at {func}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def uninformed(monkeypatch):
    """Without an estimate, which would say that all fits: sizes are halved."""
    monkeypatch.setattr(Forecast, "fit", lambda self, batch: None)


OPTIMIZERS = {
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "sgd fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, foreach=False),
}


def mixing_model() -> nn.Module:
    """Everything that a failed attempt might leave behind: statistics, a drawn mask, gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def make(
    optimizer: str = "adamw fused", *, precision: str = "fp32", microbatch: Any = 4, groups: int = 1
) -> acc.TrainStep:
    model = mixing_model()
    parameters = list(model.parameters())
    chosen = [{"params": parameters[index::groups]} for index in range(groups)]

    def loss_fn(model: nn.Module, part: Any) -> Any:
        return F.cross_entropy(model(part["x"]), part["y"])

    return acc.TrainStep(
        model,
        OPTIMIZERS[optimizer](chosen),
        loss_fn,
        precision=precision,
        microbatch=microbatch,
        max_grad_norm=1.0,
        loss_scale=acc.StaticScale(256.0) if precision == "fp16" else None,
    )


def batch(num_samples: int = 8, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 4, generator=generator),
        "y": torch.randint(3, (num_samples,), generator=generator),
    }


def everything(step: acc.TrainStep) -> Any:
    """What the steps to come depend on, random states included."""
    return [
        dict(step.model.state_dict()),
        step.update.optimizer.state_dict(),
        {name: value for name, value in step.state_dict().items() if name != "microbatch"},
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


def warmed(num_steps: int, **options: Any) -> acc.TrainStep:
    step = make(**options)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for index in range(num_steps):
        step(batch(seed=index))
    return step


def clean(sizes: Any, num_steps: int, **options: Any) -> dict[int, Any]:
    """What each final size would have given from the start, by its number of micro-batches."""
    found = {}
    for size in sizes:
        step = warmed(num_steps, **options)
        found[8 // size] = everything(recovered(step, size, batch()))
    return found


def recovered(step: acc.TrainStep, size: int, samples: Any) -> acc.TrainStep:
    step.run(samples, step.split(samples, BySize(size)))
    return step


class TestTheLawOfEveryOperator:
    """A failure at the k-th operator, for every k of a step, its own copies and the update included."""

    @pytest.mark.parametrize("num_steps", [0, 1], ids=["first step", "later step"])
    @pytest.mark.parametrize(
        ("optimizer", "precision", "groups"),
        [
            ("adamw fused", "fp32", 1),
            ("adamw fused", "fp16", 1),
            ("sgd fused", "fp32", 2),
            ("adamw foreach", "fp32", 1),
            ("rmsprop", "fp16", 1),
        ],
    )
    def test_as_if_begun_with_the_smaller_size(self, uninformed, optimizer, precision, groups, num_steps):
        options = {"optimizer": optimizer, "precision": precision, "groups": groups}
        right = clean((4, 2), num_steps, **options)
        num_corrupt, seen = 0, set()
        for k in range(1, 1000):
            step = acc.recover_from_oom(warmed(num_steps, **options))
            fault, samples = FailAt(k), batch()
            try:
                with fault:
                    result = step(samples)
            except acc.CorruptStepError:
                num_corrupt += 1
                seen.add(fault.operator)
                continue
            if fault.count < k:
                break
            assert_same(everything(step), right[result.num_microbatches])
        assert k > 90  # every operator of a step, not of an empty one
        self.check_corrupt(optimizer, groups, num_steps, num_corrupt, seen)

    @staticmethod
    def check_corrupt(optimizer, groups, num_steps, num_corrupt, seen):
        """What cannot be undone is refused, and only where the optimizer has begun to change parameters."""
        if num_steps == 0:
            assert num_corrupt == 0  # copied beforehand
        elif "fused" in optimizer:
            assert num_corrupt <= 2 * groups  # what follows the kernel itself
            assert all(name.startswith(("_fused", "_record", "_foreach_sub")) for name in seen), seen
        else:
            assert num_corrupt > 0
            assert not seen & {"addmm.default", "native_batch_norm.default", "_log_softmax.default"}

    def test_on_a_device_that_the_host_does_not_read(self, uninformed, accelerator):
        options = {"optimizer": "adamw fused", "precision": "fp16"}
        right = clean((4, 2), 1, **options)
        for k in range(1, 1000):
            step = acc.recover_from_oom(warmed(1, **options))
            fault, samples = FailAt(k), batch()
            try:
                with fault:
                    result = step(samples)
            except acc.CorruptStepError:
                assert fault.operator.startswith(("_fused", "_record", "_foreach_sub")), fault.operator
                continue
            if fault.count < k:
                break
            assert_same(everything(step), right[result.num_microbatches])

    def test_a_corrupt_step_says_what_to_do(self, uninformed):
        step = acc.recover_from_oom(warmed(1, optimizer="adamw foreach"))
        with pytest.raises(acc.CorruptStepError, match="half way .*load the last state.*fused=True"):
            while True:  # until the failure falls where it cannot be undone
                TestTheLawOfEveryOperator.fail_in_update(step)

    @staticmethod
    def fail_in_update(step):
        optimizer, take_step = step.update.optimizer, step.update.optimizer.step

        def broken() -> None:
            with FailAt(8):
                take_step()

        optimizer.step = broken
        try:
            step(batch())
        finally:
            del optimizer.step


def test_case_20_failure_half_way_through_a_backward_pass(uninformed):
    """Case 20: after half of the parameters had their gradient added; BatchNorm and dropout present."""
    right = clean((2,), 0)[4]
    step = acc.recover_from_oom(make(microbatch=acc.by_count(3)))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    seen: list[int] = []

    def fail(gradient: torch.Tensor) -> None:
        seen.append(len(seen))
        if len(seen) == 2:
            raise torch.OutOfMemoryError("half way through the backward pass")

    step.model[0].weight.register_hook(fail)  # the last one to get its gradient: the others have theirs
    result = step(batch())
    assert result.num_microbatches == 4
    assert_same(everything(step), right)
    assert int(step.model[1].num_batches_tracked) == 4  # as these count from the start, and not those that failed


@pytest.mark.parametrize("kind", ["type", "memory error", "cpu allocator", "bad_alloc", "cause"])
def test_errors_are_told_by_what_they_are(uninformed, kind):
    step, calls = acc.recover_from_oom(make(microbatch=4)), []

    def loss_fn(model, part):
        calls.append(len(part["x"]))
        if len(calls) == 2:
            if kind == "type":
                raise torch.OutOfMemoryError("any text")
            if kind == "memory error":
                raise MemoryError
            if kind == "cpu allocator":
                torch.empty(2**59, dtype=torch.uint8)
            if kind == "bad_alloc":
                raise RuntimeError("std::bad_alloc")
            raise KeyError("wrapped by someone") from torch.OutOfMemoryError("inside")
        return F.cross_entropy(model(part["x"]), part["y"])

    step.loss_fn = loss_fn
    assert step(batch()).num_microbatches == 4
    assert calls == [4, 4, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory, says a text"), ValueError("no"), acc.LossError("out of memory")]
)
def test_other_errors_pass(uninformed, error):
    step = acc.recover_from_oom(make())

    def loss_fn(model, part):
        raise error

    step.loss_fn = loss_fn
    with pytest.raises(type(error)) as raised:
        step(batch())
    assert raised.value is error


def test_the_failed_frames_are_dropped(uninformed):
    """What the failed forward pass held is freed before the next attempt begins."""
    import weakref

    step, held = acc.recover_from_oom(make()), []

    def loss_fn(model, part):
        activation = model(part["x"])
        if not held:
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError
        assert held[0]() is None
        return F.cross_entropy(activation, part["y"])

    step.loss_fn = loss_fn
    gc.disable()
    try:
        step(batch())
    finally:
        gc.enable()


def test_one_sample_that_does_not_fit_says_what_it_is_made_of():
    step = acc.recover_from_oom(warmed(1, microbatch=2))
    before = everything(step)
    right = step.loss_fn

    def loss_fn(model, part):
        if isinstance(part["x"], torch._subclasses.FakeTensor):  # the estimate
            return right(model, part)
        model(part["x"])  # draws a mask, and changes the statistics
        raise torch.OutOfMemoryError

    step.loss_fn = loss_fn
    with pytest.raises(
        acc.OutOfMemoryError, match=r"micro-batch of 2.*nothing was changed.*parameters [\d.]+ .*would help"
    ):
        step(batch())
    assert_same(everything(step), before)
    step.loss_fn = right
    step(batch())  # and it goes on
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_the_estimate_informs_the_size(monkeypatch):
    """Of 64 samples those that fit, and not 32."""
    samples = batch(64)
    step = make(microbatch=64)
    curve = acc.memory.curve(step.model, step.update.optimizer, step.loss_fn, samples, precision="fp32")
    monkeypatch.setattr("accumulus.memory.forecast.available_bytes", lambda device: 0)
    monkeypatch.setattr("accumulus.memory.forecast.held_bytes", lambda step: curve.at(13).peak_bytes / 0.9 + 100)
    step, calls, right = acc.recover_from_oom(step), [], step.loss_fn

    def loss_fn(model, part):
        if isinstance(part["x"], torch._subclasses.FakeTensor):
            return right(model, part)
        calls.append(len(part["x"]))
        if calls[-1] > 13:
            raise torch.OutOfMemoryError
        return right(model, part)

    step.loss_fn = loss_fn
    step(samples)
    assert calls == [64, 13, 13, 13, 13, 12]
    step(samples)  # and it begins with that
    assert calls[6:] == [13, 13, 13, 13, 12]


def fails_above(step: acc.TrainStep, elements: int) -> list[tuple[int, ...]]:
    """Lets a step run out of memory beyond a number of tokens; the list takes the shapes that were run."""
    ran: list[tuple[int, ...]] = []

    def loss_fn(model, part):
        shape = tuple(part["tokens"].shape)
        ran.append(shape)
        if part["tokens"].numel() > elements:
            raise torch.OutOfMemoryError
        return token_loss(model, part)

    step.loss_fn = loss_fn
    return ran


def token_step(microbatch: Any, **options: Any) -> acc.TrainStep:
    model = tokens_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=microbatch, **options)


def test_longer_batches_are_cut_smaller_before_they_run_and_shorter_ones_grow_again(uninformed):
    step = acc.recover_from_oom(token_step(16))
    ran = fails_above(step, 400)
    step(tokens_batch([30] * 16, length=40))
    assert ran == [(16, 40), (8, 40), (8, 40)]
    ran.clear()
    step(tokens_batch([30] * 16, length=80))  # twice as long may need four times the memory: no failure is needed
    assert ran == [(2, 80)] * 8
    ran.clear()
    for _ in range(3):
        step(tokens_batch([5] * 16, length=10))
    assert ran[-1] == (16, 10)
    assert max(rows * length for rows, length in ran) <= 400


def test_a_list_of_samples_is_looked_at_when_it_is_collated(uninformed):
    def collate(samples):
        return {"tokens": torch.stack(samples), "labels": torch.stack(samples)}

    step = acc.recover_from_oom(token_step(8, collate=collate))
    ran = fails_above(step, 200)
    step([torch.ones(40, dtype=torch.long)] * 8)
    step([torch.ones(80, dtype=torch.long)] * 8)
    assert [shape[0] * shape[1] > 200 for shape in ran].count(True) == 1
    assert ran[-1] == (1, 80)


@pytest.mark.parametrize(
    "rule",
    [acc.by_count(2), acc.by_tokens(1600, length="labels", multiple_of=1), "own"],
    ids=["by_count", "by_tokens", "own"],
)
def test_every_rule_can_be_made_smaller(uninformed, rule):
    class Own:
        def groups(self, tree):
            return Groups(order=list(range(tree.length))[::-1], sizes=[tree.length - 1, 1])

    samples = tokens_batch([100, 3, 50, 70, 8, 90, 20, 100])
    samples["tokens"] = torch.where(samples["labels"] == -100, 0, samples["tokens"])
    step = acc.recover_from_oom(token_step(Own() if rule == "own" else rule))
    right = whole_batch(step.model, token_loss, samples)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    ran = fails_above(step, 300)
    result = step(samples)
    found = [old - new.detach() for old, new in zip(before, step.model.parameters(), strict=True)]
    assert relative_error(found, right.gradients) <= 1e-12
    assert max(rows * length for rows, length in ran[-result.num_microbatches :]) <= 300


def test_the_optimizer_is_as_before_where_its_first_step_fails(uninformed):
    """Its state is made parameter by parameter; a failure between two leaves no half of it."""
    step = acc.recover_from_oom(make("adamw foreach", groups=2))
    optimizer, make_state = step.update.optimizer, step.update.optimizer._init_group
    before = optimizer.state_dict()
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # the first group has been updated
            assert optimizer.state
            raise torch.OutOfMemoryError
        return make_state(*args, **kwargs)

    optimizer._init_group = failing
    step.driver._give_way = lambda *_: (_ for _ in ()).throw(StopIteration)
    with pytest.raises(RuntimeError):
        step(batch())
    assert_same(optimizer.state_dict(), before)
    for parameter, kept in zip(step.model.parameters(), mixing_model().parameters(), strict=True):
        assert torch.equal(parameter, kept)


def test_large_buffers_are_copied_once_they_are_seen_to_change(uninformed, monkeypatch):
    monkeypatch.setattr("accumulus.memory.undo.SMALL_BYTES", 8)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("table", torch.ones(4))
            self.register_buffer("replaced", torch.zeros(4))

        def forward(self, x):
            self.seen += x.detach().sum(0) * self.table
            self.replaced = self.replaced + 1
            return self.linear(x)

    def make_step(microbatch):
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return acc.TrainStep(
            model,
            optimizer,
            lambda model, part: F.cross_entropy(model(part["x"]), part["y"]),
            precision="fp32",
            microbatch=microbatch,
        )

    plain = make_step(4)
    plain(batch())
    recovered(plain, 2, batch())
    step = acc.recover_from_oom(make_step(4))
    step(batch())
    assert step.driver._changing == {"seen"}
    right, calls = step.loss_fn, []

    def loss_fn(model, part):
        loss = right(model, part)
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return loss

    step.loss_fn = loss_fn
    step(batch())
    assert_same(dict(step.model.state_dict()), dict(plain.model.state_dict()))

    step = acc.recover_from_oom(make_step(4))
    calls.clear()
    step.loss_fn = loss_fn
    with pytest.raises(acc.CorruptStepError, match="buffer 'seen'.*smaller micro-batch"):
        step(batch())


def test_what_was_learned_goes_with_the_state(uninformed):
    step = acc.recover_from_oom(token_step(16))
    fails_above(step, 400)
    step(tokens_batch([30] * 16, length=40))
    saved = step.state_dict()
    again = acc.recover_from_oom(token_step(16))
    again.load_state_dict(saved)
    ran = fails_above(again, 400)
    again(tokens_batch([30] * 16, length=40))
    assert ran == [(8, 40)] * 2
    token_step(16).load_state_dict(saved)  # a step with a size of its own leaves it out
    for wrong in ({}, {"max_load": "x", "elements": 1.0, "sample_elements": 1.0}):
        with pytest.raises(acc.StateError, match="not the saved state"):
            again.load_state_dict(saved | {"microbatch": wrong})


def test_the_wrapped_step_is_the_same_training():
    plain = make()
    step = acc.recover_from_oom(plain)
    assert isinstance(step, acc.TrainStep) and step.model is plain.model
    assert acc.recover_from_oom(step) is step
    assert isinstance(step.driver, Recovery)
    step(batch())
    assert plain.state_dict()["num_steps"] == 1 == step.state_dict()["num_steps"]


@pytest.mark.slow
def test_a_real_limit_on_the_address_space():
    """The allocator really fails, in a process of its own; the update is the one of small micro-batches."""
    code = """
        import resource, sys, warnings
        import psutil, torch
        import accumulus as acc
        from accumulus.memory.sizing import Even
        torch.set_num_threads(1)

        def train(limited):
            torch.manual_seed(0)
            layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
            model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.2))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            def loss_fn(model, part):
                return model(part).square().mean()
            step = acc.TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=16384 if limited else 512)
            batch = torch.randn(16384, 256, generator=torch.Generator().manual_seed(1))
            if limited:
                step = acc.recover_from_oom(step)
                step(batch[:64])  # libraries that are loaded late need address space too
                torch.manual_seed(7)
                room = psutil.Process().memory_info().vms + 120 * 2**20
                resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
                result = step(batch)
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                return model, -(-16384 // result.num_microbatches)
            step(batch[:64])
            torch.manual_seed(7)
            step.run(batch, step.split(batch, Even(int(sys.argv[1]))))
            return model, None

        model, size = train(True)
        sys.argv.append(str(size))
        right, _ = train(False)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), right.parameters()))
        print(size, same)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    size, same = done.stdout.split()
    assert 1 <= int(size) < 16384
    assert same == "True"


@pytest.mark.parametrize("who", ["on_step", "scheduler"])
@pytest.mark.parametrize("is_applied", [True, False])
def test_a_batch_that_was_learned_from_is_not_run_again(uninformed, who, is_applied):
    """A function of the user's that runs out of memory after the update is no reason for a second update."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("of the user's own")

    def make_step(**options: Any) -> acc.TrainStep:
        model = mixing_model()
        veto = None if is_applied else lambda norm: True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return acc.TrainStep(model, optimizer, loss, precision="fp32", microbatch=4, veto=veto, **options)

    def loss(model: nn.Module, part: Any) -> Any:
        return F.cross_entropy(model(part["x"]), part["y"])

    class Failing:
        step = staticmethod(lambda: fail())

    step = acc.recover_from_oom(make_step(**{who: fail if who == "on_step" else Failing()}))
    plain = make_step()
    torch.manual_seed(1)
    plain(batch())
    right = everything(plain)
    torch.manual_seed(1)
    if who == "on_step" or is_applied:
        with pytest.raises(torch.OutOfMemoryError, match="of the user's own"):
            step(batch())
        assert len(calls) == 1
    else:
        step(batch())
    assert_same(everything(step), right)


def _expanded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if "mask" not in model._buffers:
        model.register_buffer("mask", torch.ones(1).expand(4))
    return x * model.mask


def _empty_buffer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if model.center is None:
        model.center = x.detach().mean(0)
    return x - model.center


def _lazy_attribute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "shift"):
        model.shift = x.detach().mean(0)
    return x - model.shift


def _counter(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.num_calls += 1
    return x * model.num_calls


def _attribute_in_place(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.seen += x.detach().sum(0)
    return x + model.seen


def _generators(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=model.own) * model.rng.random() * model.numpy_rng.random()
    return x + noise


def _list_of_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.losses.append(float(x.detach().sum()))
    return x * len(model.losses)


def _mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.train(not model.training)
    return x if model.training else x * 2


def _inference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * model.made_in_inference


def _sparse(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(model.sparse, x.t()).t()


class Habits(nn.Module):
    """A model that keeps more than parameters and buffers."""

    def __init__(self, habit: Any) -> None:
        super().__init__()
        self.habit, self.linear = habit, nn.Linear(4, 3)
        self.register_buffer("center", None)
        self.register_buffer("wide", torch.ones(1, 1).expand(3, 4))
        self.num_calls, self.seen, self.losses = 0, torch.zeros(4), []
        self.own = torch.Generator().manual_seed(1)
        self.rng, self.numpy_rng = random.Random(1), np.random.default_rng(1)
        if habit is _inference:
            with torch.inference_mode():
                self.register_buffer("made_in_inference", torch.ones(4))
        if habit is _sparse:
            self.register_buffer("sparse", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.habit(self, x))


@pytest.mark.parametrize(
    "habit",
    [
        _expanded,
        _empty_buffer,
        _lazy_attribute,
        _counter,
        _attribute_in_place,
        _generators,
        _list_of_losses,
        _mode,
        _inference,
        _sparse,
    ],
)
def test_what_modules_keep_is_put_back(uninformed, habit):
    def make_step(microbatch: int) -> acc.TrainStep:
        torch.manual_seed(0)
        model = Habits(habit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = lambda model, part: F.cross_entropy(model(part["x"]), part["y"])  # noqa: E731
        return acc.TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=microbatch)

    plain, step = make_step(2), acc.recover_from_oom(make_step(4))
    right, calls = step.loss_fn, []

    def loss_fn(model: nn.Module, part: Any) -> Any:
        loss = right(model, part)
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return loss

    step.loss_fn = loss_fn
    plain(batch())
    step(batch())
    for found, expected in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_all_that_an_optimizer_keeps_is_put_back(uninformed):
    """Counters in groups and in the optimizer itself, lists, and states that belong to no parameter."""

    class Keeping(torch.optim.Optimizer):
        fails = True

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "k": 0, "history": []})
            self.state["all"] = {"count": torch.zeros(())}
            self.num_calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.num_calls += 1
            self.state["all"]["count"] += 1
            for group in self.param_groups:
                group["k"] += 1
                group["history"].append(group["k"])
                group["last"] = group["k"]
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("moments", [torch.zeros_like(parameter)])[0].add_(parameter.grad)
                    parameter.sub_(state["moments"][0], alpha=group["lr"])
                    if Keeping.fails:
                        Keeping.fails = False
                        raise torch.OutOfMemoryError

    def make_step(microbatch: int) -> acc.TrainStep:
        model = mixing_model()
        loss_fn = lambda model, part: F.cross_entropy(model(part["x"]), part["y"])  # noqa: E731
        return acc.TrainStep(model, Keeping(model.parameters()), loss_fn, precision="fp32", microbatch=microbatch)

    step = acc.recover_from_oom(make_step(4))
    torch.manual_seed(1)
    step(batch())
    plain = make_step(2)
    torch.manual_seed(1)
    plain(batch())
    assert_same(everything(step), everything(plain))
    assert step.update.optimizer.num_calls == plain.update.optimizer.num_calls == 1
