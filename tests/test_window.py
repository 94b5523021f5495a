"""The window: its reference changes no bit, passes on, and what comes back from a loss function is understood."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.window import as_terms

from .reference import applied_gradients, token_loss, tokens_batch, tokens_model


def make_step(model, loss_fn=token_loss, **options):
    options = {"precision": "fp32", "microbatch": 1} | options
    return acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, **options)


def test_the_reference_is_the_last_windows_total_as_a_power_of_two(where):
    step = make_step(tokens_model())
    step(tokens_batch([3, 9, 40]))
    assert step.state_dict()["reference"] == 32.0  # of 52
    step(tokens_batch([64, 64]))
    assert step.state_dict()["reference"] == 128.0
    step(tokens_batch([100]))
    assert step.state_dict()["reference"] == 64.0


def test_the_first_reference_is_planned_or_weighed():
    seen = []
    model = tokens_model()
    step = make_step(model)
    step.window.region = _Spy(lambda: seen.append(step.window.reference))
    step(tokens_batch([3, 9, 40]))
    weighed = make_step(tokens_model(), weigh=lambda batch: (batch["labels"] != -100).sum())
    weighed(tokens_batch([3, 9, 40]))
    assert seen == [8.0] or seen == [32.0]  # 3 labels in each of three micro-batches were planned
    assert weighed.window.reference == 32.0


class _Spy:
    def __init__(self, at_exit):
        self._at_exit = at_exit

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._at_exit()


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
    found = applied_gradients(step, torch.tensor([[2.0], [-1.0], [4.0]]))
    assert found[0].item() == 3.0
    assert step.last.to_dict()["metrics"]["mean"] == pytest.approx(3.0 * model.weight.item() + 9.0 * 1, abs=100)


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
