"""The estimate is the count of the real run; every model that fake tensors refuse is measured; nothing is touched."""

from __future__ import annotations

import copy
import gc
import random
import re
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

import accumulus as acc
from accumulus.memory import curve, estimate

from . import models
from .models import class_loss, images, real_count, token_loss, tokens, vectors

KINDS = {
    "transformer": (models.Transformer, tokens, token_loss),
    "untied": (lambda: models.Transformer(tied=False), tokens, token_loss),
    "dropout": (lambda: models.Transformer(dropout=0.1), tokens, token_loss),
    "checkpointing": (lambda: models.Transformer(dropout=0.1, recompute=False), tokens, token_loss),
    "reentrant checkpointing": (lambda: models.Transformer(recompute=True), tokens, token_loss),
    "images": (models.Images, images, class_loss),
    "images in groups": (lambda: models.Images(models.in_groups), images, class_loss),
    "lstm": (lambda: models.Recurrent(nn.LSTM), tokens, token_loss),
    "two-layer gru": (lambda: models.Recurrent(nn.GRU, num_layers=2, dropout=0.1), tokens, token_loss),
    "bidirectional rnn": (lambda: BothWays(), tokens, token_loss),
    "frozen": (models.Frozen, tokens, token_loss),
    "autograd function": (models.Cubes, vectors, class_loss),
}

OPTIMIZERS = {
    "adamw": AdamW,
    "adamw fused": lambda p: AdamW(p, fused=True),
    "adamw foreach": lambda p: AdamW(p, foreach=True),
    "adam amsgrad": lambda p: Adam(p, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd momentum foreach": lambda p: SGD(p, lr=1e-3, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": Adagrad,
    "adagrad fused": lambda p: Adagrad(p, fused=True),
    "rmsprop": RMSprop,
    "nadam": NAdam,
    "groups": lambda p: groups(p),
    "several": lambda p: several(p),
}


class BothWays(models.Recurrent):
    def __init__(self):
        super().__init__(nn.RNN, bidirectional=True)
        self.head = nn.Linear(2 * models.WIDTH, models.VOCABULARY)


def groups(parameters):
    small, large = split(parameters)
    return AdamW([{"params": small, "weight_decay": 0.0}, {"params": large, "lr": 1e-4}])


def several(parameters):
    small, large = split(parameters)
    return [AdamW(small), SGD(large, lr=0.1, momentum=0.9)]


def split(parameters):
    parameters = list(parameters)
    return [p for p in parameters if p.ndim < 2], [p for p in parameters if p.ndim >= 2]


def close(found, live):
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)
    assert found.peak_bytes == sum(found.parts.values())
    assert list(found.parts) == list(live.parts)
    for part, num_bytes in live.parts.items():
        assert found.parts[part] == pytest.approx(num_bytes, abs=0.01 * live.peak_bytes), part
    assert found.phase == live.phase


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(kind, "fp32") for kind in KINDS]
    + [
        (kind, name)
        for kind in ("transformer", "checkpointing", "images", "images in groups", "lstm", "frozen")
        for name in ("bf16", "fp16")
    ],
)
def test_the_estimate_is_the_count_of_the_real_run(kind, precision):
    if (kind, precision) == ("lstm", "fp16"):
        pytest.skip("oneDNN has no fp16 LSTM on many CPUs")
    make, batch, loss_fn = KINDS[kind]
    model = make()
    optimizer = AdamW(model.parameters())
    found = estimate(model, optimizer, loss_fn, batch(4), precision=precision, microbatch=3)
    assert (found.method, found.note) == ("fake", "")
    assert (found.microbatch, found.precision) == (3, precision)
    close(found, real_count(model, optimizer, loss_fn, batch(6), precision=precision, microbatch=3))


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer(make_optimizer):
    """Before its first step, and with its state there from the start."""
    model = models.Cubes()
    optimizer = make_optimizer(model.parameters())
    arguments = (model, optimizer, class_loss)
    found = estimate(*arguments, vectors(2), precision="fp32", microbatch=3)
    assert found.method == "fake"
    live = real_count(*arguments, vectors(6), precision="fp32", microbatch=3)
    close(found, live)
    close(estimate(*arguments, vectors(2), precision="fp32", microbatch=3), live)


@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum foreach", "adagrad"])
def test_the_peak_of_an_update(name):
    model = nn.Linear(400, 10)
    batch = {"x": torch.randn(2, 400), "y": torch.randint(10, (2,))}
    optimizer = OPTIMIZERS[name](model.parameters())
    found = estimate(model, optimizer, class_loss, batch, precision="fp32", microbatch=1)
    live = real_count(model, optimizer, class_loss, batch, precision="fp32", microbatch=1)
    close(found, live)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), Adagrad, lambda p: sparse_adam(p)])
def test_sparse_gradients(make):
    """Fake tensors do not know how many rows a sparse gradient has, so it is measured."""
    model = models.Transformer(tied=False, sparse=True)
    optimizer = make(model.parameters())
    found = estimate(model, optimizer, token_loss, tokens(8), precision="fp32", microbatch=4)
    assert found.method == "measured" and "depends on the data" in found.note
    close(found, real_count(model, optimizer, token_loss, tokens(8), precision="fp32", microbatch=4))


def sparse_adam(parameters):
    first, *others = parameters
    return [torch.optim.SparseAdam([first]), SGD(others, lr=0.1)]


def test_metrics_terms_and_numpy_leaves():
    def loss_fn(model, batch):
        loss = token_loss(model, {name: torch.as_tensor(value) for name, value in batch.items() if name != "ids"})
        assert len(batch["ids"]) == len(batch["tokens"])
        return {"a": acc.Loss(loss.sum, loss.weight, metrics={"m": (loss.sum, 1)}), "b": acc.Loss.mean(loss.sum, 2)}

    model = models.Transformer()
    batch = {name: value.numpy() for name, value in tokens(4).items()} | {"ids": ["a", "b", "c", "d"]}
    optimizer = SGD(model.parameters(), lr=0.1)
    found = estimate(model, optimizer, loss_fn, batch, precision="fp32", microbatch=2)
    assert found.method == "fake"
    batch["labels"][:] = 1
    close(found, real_count(model, optimizer, loss_fn, batch, precision="fp32", microbatch=2))


def test_a_list_of_samples_with_collate():
    def collate(samples):
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}

    model = models.Images()
    optimizer = AdamW(model.parameters())
    samples = [(torch.randn(3, 12, 12), i) for i in range(4)]
    for size in (2, 3):
        found = estimate(model, optimizer, class_loss, samples, precision="fp32", microbatch=size, collate=collate)
        assert found.method == "fake"
        batch = (samples * 2)[: 2 * size]
        live = real_count(model, optimizer, class_loss, batch, precision="fp32", microbatch=size, collate=collate)
        close(found, live)


@pytest.mark.parametrize("is_packed", [False, True])
def test_samples_of_different_lengths_are_measured_at_the_longest(is_packed):
    """Where collate makes what cannot be cut (all tokens in one row), micro-batches are collated as a step would."""

    def collate(samples):
        if is_packed:
            return {"tokens": torch.cat(samples)[None], "lengths": torch.tensor([len(s) for s in samples])}
        return {"tokens": nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    def loss_fn(model, batch):
        logits = model(batch["tokens"])
        return acc.Loss(logits.square().sum() * (1 if logits.sum().item() < 1e30 else 2), logits.numel())

    model = models.Transformer()
    optimizer = SGD(model.parameters(), lr=0.1)
    samples = [torch.randint(models.VOCABULARY, (length,)) for length in (3, 4, 5, 30, 30, 30, 30, 30)]
    found = estimate(model, optimizer, loss_fn, samples, precision="fp32", microbatch=4, collate=collate)
    assert found.method == "measured"
    longest = samples[:4] * 2 if is_packed else samples[4:] * 2
    close(found, real_count(model, optimizer, loss_fn, longest, precision="fp32", microbatch=4, collate=collate))


def test_channels_last_batches_stay_so():
    model = models.Images().to(memory_format=torch.channels_last)
    batch = {**images(4), "x": torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)}
    optimizer = AdamW(model.parameters())
    found = estimate(model, optimizer, class_loss, batch, precision="fp32", microbatch=2)
    close(found, real_count(model, optimizer, class_loss, batch, precision="fp32", microbatch=2))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("transformer", "bf16"), ("checkpointing", "fp32"), ("images", "fp16"), ("autograd function", "fp32")],
)
def test_the_curve_gives_sizes_that_were_not_run(kind, precision):
    make, batch, loss_fn = KINDS[kind]
    model = make()
    optimizer = AdamW(model.parameters())
    found = curve(model, optimizer, loss_fn, batch(4), precision=precision, largest=40)
    assert (found.method, found.note) == ("fake", "")
    for size in (3, 33):
        live = real_count(model, optimizer, loss_fn, batch(2 * size), precision=precision, microbatch=size)
        close(found.at(size), live)
        assert found.at(size) == estimate(model, optimizer, loss_fn, batch(4), precision=precision, microbatch=size)


def test_samples_against_samples_make_a_parabola():
    """A contrastive loss, whose logits are (samples x samples)."""

    def loss_fn(model, batch):
        features = F.normalize(model(batch["x"]))
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))

    model = models.Cubes()
    optimizer = SGD(model.parameters(), lr=0.1)
    found = curve(model, optimizer, loss_fn, vectors(4), precision="fp32", largest=500)
    for size in (3, 100, 333):
        exact = estimate(model, optimizer, loss_fn, vectors(4), precision="fp32", microbatch=size)
        assert found.at(size).peak_bytes == pytest.approx(exact.peak_bytes, rel=1e-3)


def test_the_largest_that_fits_is_found():
    model = models.Images()
    optimizer = AdamW(model.parameters())
    found = curve(model, optimizer, class_loss, images(4), precision="fp32", largest=64)
    peaks = {size: found.at(size).peak_bytes for size in range(1, 65)}
    for limit in [0, *range(peaks[1] - 1, peaks[64] + 10_000, 7_001), peaks[64]]:
        for at_most in (1, 5, 64):
            right = max([size for size in range(1, at_most + 1) if peaks[size] <= limit], default=0)
            assert found.largest(limit, at_most) == right


def test_a_loss_function_that_needs_samples_of_its_own():
    """A model that does other operators from some size on: peaks between the runs are interpolated."""

    def loss_fn(model, batch):
        x = batch["x"] if len(batch["x"]) < 20 else (batch["x"] * 2).exp()
        return F.cross_entropy(model(x), batch["y"])

    model = models.Cubes()
    optimizer = SGD(model.parameters(), lr=0.1)
    found = curve(model, optimizer, loss_fn, vectors(4), precision="fp32", largest=40)
    for size in (2, 21, 40):
        exact = estimate(model, optimizer, loss_fn, vectors(4), precision="fp32", microbatch=size)
        assert found.at(size).peak_bytes == exact.peak_bytes
    assert found.at(2).peak_bytes < found.at(10).peak_bytes < found.at(21).peak_bytes


def everything(model, optimizer):
    """Every bit that an estimate could touch."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return (
        [tensor.clone() for tensor in [*tensors, *state, torch.get_rng_state()] if isinstance(tensor, torch.Tensor)],
        [(p.requires_grad, id(p), p._version, id(p.grad)) for p in model.parameters()],
        [module.training for module in model.modules()],
        copy.deepcopy({name: value for name, value in vars(model).items() if isinstance(value, int)}),
        (random.getstate(), np.random.get_state()[1].tolist()),
        [len(hooks) for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)],
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        list(map(id, optimizer.state)),
        gc.isenabled(),
    )


def assert_same(before, after):
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:] == after[1:]


class Drawing(models.Images):
    """Draws from every source of random numbers, and counts."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        torch.randperm(3)
        factor = random.random() + np.random.rand() + 1
        return super().forward(F.dropout(x * factor, 0.1))


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("kind", [Drawing, models.Routed])
def test_nothing_is_touched(kind, has_state, has_gradients):
    model = kind()
    batch = vectors(6) if kind is models.Routed else images(6)
    model.get_submodule("norm" if kind is models.Routed else "layers.1").eval()
    optimizer = Adam(model.parameters())
    if has_state:
        real_count(model, optimizer, class_loss, batch, precision="fp32", microbatch=3)
    if has_gradients:
        class_loss(model, batch).backward()
    gc.collect()  # the guards of the steps above give back their hooks
    before = everything(model, optimizer)
    found = estimate(model, optimizer, class_loss, batch, precision="bf16", microbatch=5)
    assert found.method == ("measured" if kind is models.Routed else "fake")
    curve(model, optimizer, class_loss, batch, precision="fp16")
    assert_same(before, everything(model, optimizer))
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        acc.TrainStep(model, optimizer, class_loss, precision="fp32", microbatch=2)(batch)


@pytest.mark.parametrize("kind", [Drawing, models.Routed])
def test_nothing_is_touched_by_an_error(kind):
    model = kind()
    batch = vectors(6) if kind is models.Routed else images(6)
    optimizer = Adam(model.parameters())

    def loss_fn(model, batch):
        class_loss(model, batch).backward()
        raise ZeroDivisionError("a mistake of the user's")

    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="mistake"):
        estimate(model, optimizer, loss_fn, batch, precision="fp32", microbatch=5)
    assert_same(before, everything(model, optimizer))


def test_around_it_may_be_autocast_or_no_gradients():
    model = models.Cubes()
    optimizer = SGD(model.parameters(), lr=0.1)
    batch = vectors(4)
    right = estimate(model, optimizer, class_loss, batch, precision="fp32", microbatch=2)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(batch["x"])
        assert estimate(model, optimizer, class_loss, batch, precision="fp32", microbatch=2) == right
        low = estimate(model, optimizer, class_loss, batch, precision="fp16", microbatch=2)
        assert torch.equal(model(batch["x"]), before)  # no fake or fp16 copy of a weight is left in its cache
    assert low == estimate(model, optimizer, class_loss, batch, precision="fp16", microbatch=2)
    with torch.inference_mode():
        assert estimate(model, optimizer, class_loss, batch, precision="fp32", microbatch=2) == right


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.usefixtures("accelerator")
def test_the_code_of_an_accelerator(precision, fused):
    """Numbers that the host does not read stay tensors, and the update is skipped on the device."""
    model = models.Transformer()
    optimizer = AdamW(model.parameters(), fused=fused)
    found = estimate(model, optimizer, token_loss, tokens(4), precision=precision, microbatch=3)
    assert found.method == "fake"
    close(found, real_count(model, optimizer, token_loss, tokens(6), precision=precision, microbatch=3))


def test_no_warning_is_given_and_none_is_used_up():
    model = models.Images()
    optimizer = Adam(model.parameters())
    estimate(model, optimizer, class_loss, images(4), precision="fp32", microbatch=2)
    with pytest.warns(UserWarning, match="BatchNorm"):
        acc.TrainStep(model, optimizer, class_loss, precision="fp32", microbatch=2)


def read_value(model, batch):
    loss = class_loss(model, batch)
    return loss * 2 if loss.item() > 1e9 else loss


def find_rows(model, batch):
    rows = (batch["y"] > -1).nonzero()[:, 0]
    return F.cross_entropy(model(batch["x"])[rows], batch["y"][rows])


def own_function_reads(model, batch):
    return Reading.apply(class_loss(model, batch))


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(gradient.isfinite().item())


DEPENDENT = {
    "item": (models.Cubes, read_value, "_local_scalar_dense"),
    "nonzero": (models.Cubes, find_rows, "nonzero"),
    "item in backward": (models.Cubes, own_function_reads, "_local_scalar_dense"),
    "indexing": (models.Routed, class_loss, "aten.(index|nonzero)"),
}


@pytest.mark.parametrize("make_optimizer", [AdamW, lambda p: several(p)], ids=["adamw", "several"])
@pytest.mark.parametrize("kind", DEPENDENT)
def test_models_that_depend_on_data_are_measured_and_it_says_so(kind, make_optimizer):
    make, loss_fn, operator = DEPENDENT[kind]
    model = make()
    optimizer = make_optimizer(model.parameters())
    found = estimate(model, optimizer, loss_fn, vectors(8), precision="fp32", microbatch=30)
    assert found.method == "measured"
    assert "2 and 4 real samples" in found.note and "depends on the data" in found.note
    assert re.search(operator, found.note)
    line = curve(model, optimizer, loss_fn, vectors(8), precision="fp32")
    assert (line.method, line.note) == (found.method, found.note)
    assert line.at(30) == found
    live = real_count(model, optimizer, loss_fn, vectors(60), precision="fp32", microbatch=30)
    close(found, live)
    small = estimate(model, optimizer, loss_fn, vectors(8), precision="fp32", microbatch=3)
    close(small, real_count(model, optimizer, loss_fn, vectors(6), precision="fp32", microbatch=3))


def test_an_optimizer_may_read_what_it_likes():
    class Reader(SGD):
        def step(self, closure=None):
            assert all(p.grad.norm().item() >= 0 for group in self.param_groups for p in group["params"])
            super().step(closure)

    model = models.Cubes()
    found = estimate(model, Reader(model.parameters()), class_loss, vectors(4), precision="fp32", microbatch=2)
    assert found.method == "fake"


def test_a_loss_function_that_uses_the_model_itself():
    model = models.Cubes()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(_, batch):
        return class_loss(model, batch)

    found = estimate(model, optimizer, loss_fn, vectors(8), precision="fp32", microbatch=4)
    assert found.method == "measured" and "model itself" in found.note
    assert all(p.grad is None for p in model.parameters())
    close(found, real_count(model, optimizer, loss_fn, vectors(8), precision="fp32", microbatch=4))


def test_a_model_that_goes_to_a_device_that_is_not_here():
    """torch would end the process; so the fake run stops before, and the real one fails as a step would."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = models.Cubes()

    def loss_fn(model, batch):
        return class_loss(model, {name: value.to("cuda") for name, value in batch.items()})

    with pytest.raises((AssertionError, RuntimeError), match="(?i)cuda"):
        estimate(model, SGD(model.parameters()), loss_fn, vectors(4), precision="fp32", microbatch=2)


def test_models_that_cannot_be_copied_are_measured():
    class Locked(models.Cubes):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model = Locked()
    optimizer = AdamW(model.parameters())
    found = estimate(model, optimizer, class_loss, vectors(8), precision="fp32", microbatch=4)
    assert found.method == "measured" and "cannot pickle" in found.note
    close(found, real_count(model, optimizer, class_loss, vectors(8), precision="fp32", microbatch=4))


def test_a_compiled_model_is_counted_as_if_it_were_not():
    model = models.Cubes()
    compiled = torch.compile(model, backend="eager")
    plain = estimate(model, SGD(model.parameters()), class_loss, vectors(4), precision="fp32", microbatch=2)
    found = estimate(compiled, SGD(model.parameters()), class_loss, vectors(4), precision="fp32", microbatch=2)
    assert found == plain


def test_what_a_loss_function_holds_is_copied_with_the_model():
    class WithTeacher:
        def __init__(self):
            self.teacher, self.num_calls = models.Cubes(), 0
            self.weight = torch.ones(10)

        def __call__(self, model, batch):
            self.num_calls += 1
            with torch.no_grad():
                target = self.teacher(batch["x"]).softmax(1)
            return F.cross_entropy(model(batch["x"]), target, weight=self.weight)

    model, loss_fn = models.Cubes(), WithTeacher()
    optimizer = SGD(model.parameters(), lr=0.1)
    found = estimate(model, optimizer, loss_fn, vectors(4), precision="fp32", microbatch=2)
    assert (found.method, loss_fn.num_calls) == ("fake", 0)
    close(found, real_count(model, optimizer, loss_fn, vectors(4), precision="fp32", microbatch=2))


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_any_size_takes_the_same_work_and_no_memory():
    """At the largest size a single activation would take 2 TB."""
    model = models.Transformer()
    optimizer = AdamW(model.parameters())
    counts = set()
    for size in (2, 64, 10**9):
        with Operators() as operators:
            found = estimate(model, optimizer, token_loss, tokens(2), precision="fp32", microbatch=size)
        counts.add(operators.count)
    assert found.method == "fake"
    assert found.peak_bytes > 10**12
    assert len(counts) == 1, counts


def test_a_device_that_is_not_here_is_stood_for():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = models.Transformer()
    optimizer = AdamW(model.parameters())
    found = estimate(model, optimizer, token_loss, tokens(4), precision="bf16", microbatch=2, device="cuda")
    assert found.method == "fake" and "no cuda device is here" in found.note
    here = estimate(model, optimizer, token_loss, tokens(4), precision="bf16", microbatch=2)
    assert found.parts["parameters"] >= here.parts["parameters"]  # in blocks of 512 bytes
    assert all(num_bytes % 512 == 0 for num_bytes in found.parts.values())
    with pytest.raises(acc.PrecisionError, match="no cuda device is here; name one"):
        estimate(model, optimizer, token_loss, tokens(4), microbatch=2, device="cuda")


def test_a_model_on_the_meta_device_is_what_it_would_be_here():
    with torch.device("meta"):
        planned = models.Transformer()
    model = models.Transformer()
    found, right = (
        estimate(m, AdamW(m.parameters()), token_loss, tokens(4), precision="bf16", microbatch=3)
        for m in (planned, model)
    )
    assert found == right
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6)
    found = estimate(huge, SGD(huge.parameters()), lambda m, x: m(x).mean(), torch.zeros(1, 10**6), microbatch=8)
    assert found.parts["parameters"] == 4 * (10**12 + 10**6)
    with pytest.raises(acc.UnsupportedError, match="depends on the data; and a model on the meta device has no data"):
        estimate(planned, SGD(planned.parameters()), read_tokens, tokens(4), precision="fp32", microbatch=2)


def read_tokens(model, batch):
    loss = token_loss(model, batch)
    return loss if loss.sum.item() < 1e30 else None


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"microbatch": 0}, acc.SplitError, "integer of at least 1, not 0"),
        ({"microbatch": "auto"}, acc.SplitError, "integer of at least 1"),
        ({"precision": "fp12"}, acc.PrecisionError, "unknown precision"),
        ({"loss_fn": 3}, acc.LossError, "must be a function"),
        ({"model": 3}, acc.OptimizerError, "torch.nn.Module"),
        ({"optimizer": SimpleNamespace()}, acc.OptimizerError, "param_groups"),
        ({"batch": {"x": 3}}, acc.BatchError, "no tensor"),
        ({"batch": torch.zeros(2), "collate": torch.stack}, acc.BatchError, "list of samples"),
        ({"loss_fn": lambda model, batch: model(batch["x"])}, acc.LossError, "one element"),
    ],
)
def test_bad_input_gets_a_sentence(changes, error, text):
    model = models.Cubes()
    good = {
        "model": model,
        "optimizer": SGD(model.parameters(), lr=0.1),
        "loss_fn": class_loss,
        "batch": vectors(4),
        "precision": "fp32",
        "microbatch": 2,
    }
    arguments = {**good, **changes}
    positional = [arguments.pop(name) for name in ("model", "optimizer", "loss_fn", "batch")]
    with pytest.raises(error, match=text):
        estimate(*positional, **arguments)
