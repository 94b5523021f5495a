"""The window: its reference changes no bit, passes on, and what comes back from a loss function is understood."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.terms import as_terms
from accumulus.window import Window, WindowRules

from .reference import applied_gradients, token_loss, tokens_batch, tokens_model


def make_step(model, loss_fn=token_loss, *, fused=False, **options):
    options = {"precision": "fp32", "microbatch": 1} | options
    return acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), loss_fn, **options)


def units(step):
    """S / R of each window from now on, as it was when its last micro-batch was done."""
    seen = []
    totals = Window.totals

    def spy(window):
        seen.append(float(window._unit))
        return totals(window)

    step.window.open = lambda *a, **k: _spied(WindowRules.open(step.window, *a, **k), spy)
    return seen


def _spied(window, spy):
    window.totals = lambda: spy(window)
    return window


def test_the_reference_is_the_last_windows_weight_per_sample_as_a_power_of_two(where):
    step = make_step(tokens_model())
    seen = units(step)
    step(tokens_batch([3, 9, 40]))
    step(tokens_batch([30, 10, 12]))
    step(tokens_batch([17] * 6))
    # The first planned 3 labels for each of 3 samples; then 52 for three, and 104 for six.
    assert seen == [1 / 8, 1 / 32, 1 / 64]
    assert step.state_dict()["reference"] == 17.0


def test_the_reference_is_exact_where_the_weights_are_counted():
    step = make_step(tokens_model(), weigh=lambda batch: (batch["labels"] != -100).sum())
    seen = units(step)
    step(tokens_batch([1, 1, 40]))
    assert seen == [1 / 32]


def test_a_full_batch_after_a_short_one_does_not_overflow_fp16(where):
    """Its gradients are as large as those of the whole batch's mean, however small the batch before was."""
    model = nn.Linear(4, 1, bias=False)
    step = acc.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=1e-6), lambda m, b: acc.Loss(m(b).float().sum(), len(b)),
        precision="fp16", microbatch=512, loss_scale=acc.DynamicScale(initial=2.0**12),
    )  # fmt: skip
    for size in (512, 2, 512, 2, 512):
        assert step(torch.ones(size, 4)).applied
    assert float(step.loss_scale) == 2.0**12


def test_a_wildly_different_window_does_not_trust_the_last_one():
    model = nn.Linear(1, 1, bias=False)
    step = make_step(model, lambda m, b: acc.Loss(m(b).sum() * float(b), float(b)), fused=False)
    for weight in (1e-20, 1e20, 1.0, 2.0**20, 1e-12):
        found = applied_gradients(step, torch.full((1, 1), weight))
        assert found[0].item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("reference", [2.0**-8, 1.0, 2.0**20])
@pytest.mark.parametrize("scale", [2.0**-6, 2.0**10])
def test_neither_reference_nor_scale_changes_a_bit(reference, scale):
    batch = tokens_batch([3, 9, 40])
    plain = make_step(tokens_model(torch.float32))
    right = applied_gradients(plain, batch)
    step = make_step(tokens_model(torch.float32), loss_scale=acc.StaticScale(scale))
    step.window.reference = reference
    found = applied_gradients(step, batch)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_one_loss_term_keeps_the_name_of_its_own():
    assert as_terms({"tokens": torch.tensor(2.0, requires_grad=True)}, 5)[0][0] == "tokens"
    ((name, loss),) = as_terms(torch.tensor(2.0, requires_grad=True), 5)
    assert (name, loss.weight, loss.sum.item()) == ("loss", 5, 10.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_of_one_element_in_any_shape(shape, where):
    model = nn.Linear(1, 1, bias=False)
    step = make_step(model, lambda m, b: acc.Loss(m(b).sum().reshape(shape), len(b)))
    found = applied_gradients(step, torch.full((3, 1), 2.0))
    assert found[0].item() == 2.0
    assert step.last.loss.shape == ()


def test_half_precision_losses_are_summed_in_float32(where):
    """The weight times the mean, 70,000, is beyond float16."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    step = make_step(model, lambda m, b: acc.Loss.mean(m(b).half().mean(), 70_000))
    found = applied_gradients(step, torch.ones(2, 1))
    assert found[0].item() == pytest.approx(1.0, rel=1e-3)  # the loss itself is in float16
    assert float(step.last.loss) == 1.0


def test_metrics_of_numbers_and_tensors(where):
    model = nn.Linear(1, 1)

    def loss_fn(model, batch):
        metrics = {"number": (3.0, 2), "tensor": (batch.sum(), batch.sum()), "never": (0.0, 0)}
        return acc.Loss(model(batch).sum(), len(batch), metrics=metrics)

    found = make_step(model, loss_fn)(torch.ones(3, 1)).to_dict()["metrics"]
    assert found["number"] == 1.5
    assert found["tensor"] == 1.0
    assert math.isnan(found["never"])


def test_a_nan_sum_of_weight_zero_reaches_nothing(where):
    """A mean over no element is NaN, on the device too."""
    model = nn.Linear(1, 1, bias=False)

    def loss_fn(model, batch):
        mask = batch > 0
        mean = (model(batch) * mask).sum() / mask.sum()
        return acc.Loss.mean(mean, mask.sum(), metrics={"mean": (mean * mask.sum(), mask.sum())})

    step = make_step(model, loss_fn)
    before = model.weight.item()
    found = applied_gradients(step, torch.tensor([[2.0], [-1.0], [4.0]]))
    assert found[0].item() == 3.0
    assert step.last.to_dict()["metrics"]["mean"] == pytest.approx(3.0 * before, rel=1e-6)


def test_the_region_is_left_when_the_loss_function_fails():
    model = tokens_model(torch.float32)

    def fail(model, batch):
        raise KeyError("mine")

    step = make_step(model, fail, precision="bf16")
    for _ in range(2):
        with pytest.raises(KeyError):
            step(tokens_batch([1]))
        assert not torch.is_autocast_enabled("cpu")


def test_unknown_totals_from_weigh():
    for bad in (-1, math.nan, torch.ones(2), "three"):
        with pytest.raises(acc.WeightError):
            make_step(tokens_model(), weigh=lambda batch, bad=bad: bad)(tokens_batch([1]))


@pytest.mark.parametrize("where", ["__enter__", "__exit__", "cache", "drop"])
def test_an_interrupt_at_the_edge_of_a_window_leaves_the_step_usable(monkeypatch, where):
    """Ctrl-C in the window's own code: no window stays open, no gradient lies about."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = acc.TrainStep(model, optimizer, lambda model, x: model(x).square().mean(), precision="fp32", microbatch=2)
    armed = [True]

    def interrupt(*_):
        if armed:
            armed.pop()
            raise KeyboardInterrupt

    if where == "cache":
        clear = torch.clear_autocast_cache
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (interrupt(), clear()))
    elif where == "drop":
        guard = step.window.guard
        drop = guard._drop
        monkeypatch.setattr(guard, "_drop", lambda: (interrupt(), drop()))
    else:

        class Region:
            def __enter__(self):
                if where == "__enter__":
                    interrupt()

            def __exit__(self, *_):
                if where == "__exit__":
                    interrupt()

        step.window.region = Region()
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(4, 2))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not step.window.is_open
    assert step(torch.ones(4, 2)).applied
