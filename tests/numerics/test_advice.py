"""Each planted fault is named, with its module; honest models get no finding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc

from .models import Attention, Run, classes, fully_masked, honest, rows, squares


def diagnose(model, batches, loss_fn=squares, **options):
    return acc.diagnose(model, batches, loss_fn=loss_fn, **{"rounds": 0, "max_steps": 3} | options)


def named(report, kind):
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, f"no {kind!r} in {[str(finding) for finding in report.findings]}"
    assert found[0].figure and found[0].change and found[0].sureness in ("certain", "likely", "possible")
    return found[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", list(honest()))
def test_honest_models_get_no_finding(name, precision):
    model, loss_fn, batches = honest()[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = diagnose(model, batches, loss_fn, optimizer=optimizer, precision=precision)
    assert [str(finding) for finding in report.findings] == []
    assert report.origin is None
    assert "no finding" in str(report)


def test_fp16_logits_at_1e5():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    nn.init.constant_(model[2].weight, 4000.0)
    model[2].bias.data.fill_(1e5)
    batches = [(torch.randn(16, 8), torch.randint(0, 5, (16,))) for _ in range(2)]
    finding = named(diagnose(model, batches, classes, precision="fp16"), "non-finite")
    assert finding.module == "2"
    assert "inf made by '2'" in finding.text and "float16" in finding.text
    assert diagnose(model, batches, classes, precision="bf16").origin is None


def test_fp16_activations_close_to_the_end():
    model = nn.Sequential(nn.Linear(8, 8), Run(lambda x: x / x.abs().max() * 4e4), nn.Linear(8, 1))
    finding = named(diagnose(model, rows()), "near overflow")
    assert finding.module == "1" and finding.sureness == "possible"


def test_softmax_of_fp16_logits_with_a_large_spread():
    model = nn.Sequential(nn.Linear(8, 16), Run(lambda x: (x.half() * 900).softmax(-1)), nn.Linear(16, 1))
    finding = named(diagnose(model, rows()), "softmax in 16 bits")
    assert finding.module == "1" and "float32" in finding.change and "spread" in finding.figure
    calm = nn.Sequential(nn.Linear(8, 16), Run(lambda x: x.half().softmax(-1)), nn.Linear(16, 1))
    assert diagnose(calm, rows()).findings == ()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_log_of_zero_in_one_layers_backward(precision):
    """x * log(x) with `where` around it: the loss is finite, and the gradient has 0 * -inf."""

    def entropy(x):
        x = x.float() * (x > 0)
        return torch.where(x > 0, x * x.log(), 0.0)

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Run(entropy), nn.Linear(8, 1))
    finding = named(diagnose(model, rows(), precision=precision), "non-finite")
    assert finding.module == "2"
    assert "made by '2', log" in finding.text


class LogInBackward(torch.autograd.Function):
    """The identity, whose derivative takes a log of zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].mul(0).log()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_log_of_zero_in_the_backward_pass_only(precision):
    model = nn.Sequential(nn.Linear(8, 8), Run(LogInBackward.apply), nn.Tanh(), nn.Linear(8, 1))
    finding = named(diagnose(model, rows(), precision=precision), "non-finite")
    assert finding.module == "1"
    assert "-inf made by '1', log in the backward pass" in finding.text


@pytest.mark.parametrize("size", [1e-9, 1e-12])
def test_gradients_that_vanish_below_the_least_of_fp16(size):
    model = nn.Sequential(
        nn.Linear(8, 8), Run(lambda x: x * size + (x * (1 - size)).detach()), nn.Linear(8, 4), nn.Linear(4, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = acc.TrainStep(model, optimizer, squares, precision="fp16", microbatch=8, loss_scale=acc.StaticScale(1.0))
    finding = named(acc.diagnose(step, rows(), rounds=0), "vanishing gradient")
    assert finding.module == "0"
    assert "100%" in finding.figure and "scale" in finding.change


def test_one_scale_cannot_serve_all_layers():
    model = nn.Sequential(nn.Linear(8, 8), Run(lambda x: x * 1e-14 + x.detach()), nn.Linear(8, 1))
    report = diagnose(model, rows(), lambda m, b: (m(b).float() * 1e4).sum())
    assert report.scales is not None and not report.scales.one_serves_all
    assert report.scales.needs_most.layer == "0"
    finding = named(report, "vanishing gradient")
    assert finding.module == "0" and "No scale serves all layers" in finding.change


def test_a_static_scale_that_overflows():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def make(scale):
        return acc.TrainStep(
            model, optimizer, lambda m, b: m(b).float().sum() * 100, precision="fp16", microbatch=16, loss_scale=scale
        )

    report = acc.diagnose(make(acc.StaticScale(2.0**24)), rows(), rounds=0)
    finding = named(report, "non-finite")
    assert report.only_above == 2.0**24 and "At loss scale 2^24" in finding.text and "StaticScale" in finding.change
    report = acc.diagnose(make(acc.DynamicScale(initial=2.0**24)), rows(), rounds=0)
    assert report.findings == () and report.only_above == 2.0**24  # it comes down by itself


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_an_epsilon_of_adam_that_fp16_cannot_hold(eps):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), eps=eps)
    report = diagnose(model, [row.half() for row in rows()], optimizer=optimizer)
    if eps == 1e-8:
        finding = named(report, "optimizer epsilon")
        assert finding.module == "0.weight" and "1e-08" in finding.figure
    else:
        assert not any(finding.kind == "optimizer epsilon" for finding in report.findings)


@pytest.mark.parametrize("lr", [1e-5, 0.1])
def test_bf16_weights_that_a_small_rate_does_not_move(lr):
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1)).bfloat16()
    report = diagnose(model, [row.bfloat16() for row in rows()], optimizer=torch.optim.AdamW(model.parameters(), lr=lr))
    if lr == 1e-5:
        finding = named(report, "weights stand still")
        assert finding.module in ("0.weight", "1.weight", "0.bias", "1.bias")
        assert "bf16" in finding.text and "learning rate" in finding.change
    else:
        assert report.findings == ()


def test_masks_with_the_wrong_minimum():
    """float32's minimum is no number of fp16: it becomes -inf, and a row without an open position NaN."""
    lowest = torch.finfo(torch.float32).min
    model = nn.Sequential(Attention(fully_masked(lowest)), nn.Linear(16, 1))
    finding = named(diagnose(model, rows(2, 4, 6, 16)), "non-finite")
    assert finding.module.startswith("0") and "torch.finfo" in finding.change
    right = nn.Sequential(Attention(fully_masked(torch.finfo(torch.float16).min / 2)), nn.Linear(16, 1))
    assert diagnose(right, rows(2, 4, 6, 16)).findings == ()


def test_a_wrong_minimum_that_does_no_harm_yet():
    def mask(query):
        length = query.shape[-2]
        return (torch.ones(length, length).triu(1) * torch.finfo(torch.float32).min).to(query.dtype)

    model = nn.Sequential(Attention(mask), nn.Linear(16, 1))
    report = diagnose(model, rows(2, 4, 6, 16))
    assert report.origin is None
    assert named(report, "mask minimum").module.startswith("0")


def test_a_row_that_masks_everything():
    def mask(query):
        length = query.shape[-2]
        return torch.full((length, length), -math.inf, dtype=query.dtype)

    finding = named(diagnose(nn.Sequential(Attention(mask), nn.Linear(16, 1)), rows(2, 4, 6, 16)), "non-finite")
    assert finding.module == "0.scores" and "softmax" in finding.text and "masked" in finding.text


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / (x.half() * 600).square().mean(-1, keepdim=True).add(1e-6).sqrt(),  # a norm in fp16
        lambda x: (x.half().abs() * -9e4).softmax(-1).float(),
    ],
)
def test_an_overflow_that_what_follows_hides(function):
    model = nn.Sequential(nn.Linear(8, 8), Run(function), nn.Linear(8, 1))
    finding = named(diagnose(model, rows(), precision="fp16"), "hidden overflow")
    assert finding.module == "1" and "inf made by '1'" in finding.text and "float32" in finding.change


def test_at_most_ten_worst_first():
    report = diagnose(
        nn.Sequential(
            *(
                nn.Sequential(nn.Linear(8, 8), Run(lambda x: (x * 900).half().softmax(-1).float() * 2))
                for _ in range(14)
            ),
            nn.Linear(8, 1),
        ),
        rows(),
        precision="fp32",
    )
    assert len(report.findings) == 10
    severities = [finding.severity for finding in report.findings]
    assert severities == sorted(severities, reverse=True)
