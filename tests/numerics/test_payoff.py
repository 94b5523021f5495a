"""Whether a precision pays: measured, with reasons that can be checked."""

from __future__ import annotations

import torch
from torch import nn

import accumulus as acc
from accumulus.numerics.payoff import Payoff, small_ratio
from accumulus.numerics.trace import Product, TraceTable

from .models import squares


def table(*products):
    return TraceTable(uses=(), casts=(), products=products, peaks=(), outputs={})


def product(rows, inner, columns, count=1):
    return Product(rows=rows, inner=inner, columns=columns, dtype="float32", count=count)


def test_small_products_are_those_with_a_short_side_or_little_to_do():
    large, thin, short = product(512, 512, 512), product(4096, 4096, 8), product(64, 64, 64)
    assert small_ratio(table(large)) == 0.0
    assert small_ratio(table(thin)) == small_ratio(table(short)) == 1.0
    total = large.num_operations + thin.num_operations
    assert small_ratio(table(large, thin)) == thin.num_operations / total
    assert small_ratio(table()) == 1.0


def payoff(seconds, fp32_seconds, reasons=()):
    return Payoff(precision="bf16", seconds=seconds, fp32_seconds=fp32_seconds, small_ratio=0.0, reasons=reasons)


def test_it_says_whether_it_pays_and_why_not():
    assert payoff(0.5, 1.0).pays and "bf16 pays here" in str(payoff(0.5, 1.0))
    slow = payoff(1.5, 1.0, ("too small",))
    assert not slow.pays
    assert "took 1.50 of float32's time" in str(slow) and str(slow).endswith("(too small)")
    assert slow.to_dict()["time_ratio"] == 1.5


def test_a_tiny_model_has_its_reasons():
    report = acc.diagnose(nn.Linear(8, 1), [torch.randn(4, 8)], loss_fn=squares, precision="bf16", rounds=1)
    assert report.payoff.small_ratio == 1.0
    assert any("matrix products" in reason for reason in report.payoff.reasons)
    assert report.payoff.seconds > 0 and report.payoff.fp32_seconds > 0


def test_without_low_precision_there_is_nothing_to_time():
    assert acc.diagnose(nn.Linear(8, 1), [torch.randn(4, 8)], loss_fn=squares, precision="fp32").payoff is None
