"""Operators with the dtypes in which they really ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accumulus.numerics.trace import DtypeTrace

from .models import Run


def trace(model, x, dtype=torch.bfloat16):
    with DtypeTrace(model) as watch, torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(x).float().square().mean()
        watch.whereabouts.note(loss)
        loss.backward()
    return watch.table()


def test_which_operator_ran_in_which_dtype():
    table = trace(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(3, 8))
    uses = {(use.module, use.operator, use.is_backward): use for use in table.uses}
    assert uses["0", "addmm", False].output == "bfloat16"
    assert uses["0", "addmm", False].num_bytes == 3 * 4 * 2
    assert uses["0", "mm", True].output == "bfloat16" and uses["0", "mm", True].count == 1  # the input needs none
    assert table.outputs["0"] == "bfloat16" and table.outputs["2"] == "bfloat16"
    assert uses["", "mean", False].output == "float32"


def test_casts_and_their_bytes():
    table = trace(nn.Sequential(nn.Linear(8, 4, bias=False)), torch.randn(3, 8))
    forward = [cast for cast in table.casts if cast.module == "0" and not cast.is_backward]
    assert [(cast.source, cast.target, cast.count) for cast in forward] == [("float32", "bfloat16", 2)]
    assert forward[0].num_bytes == (3 * 8 + 8 * 4) * (4 + 2)
    sizes = [cast.num_bytes for cast in table.casts]
    assert sizes == sorted(sizes, reverse=True)
    assert trace(nn.Linear(8, 4), torch.randn(3, 8), dtype=None).casts == ()


def test_products_and_their_sizes():
    table = trace(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.randn(3, 8), dtype=None)
    found = {(p.rows, p.inner, p.columns): p.count for p in table.products}
    assert found == {(3, 8, 4): 1, (3, 4, 2): 1, (3, 2, 4): 1, (4, 3, 8): 1, (2, 3, 4): 1}
    assert sum(p.num_operations for p in table.products) == 2 * (96 + 24 + 24 + 96 + 24)


def test_convolutions_and_batches_of_products():
    table = trace(nn.Conv2d(3, 5, 3), torch.randn(2, 3, 6, 6), dtype=None)
    assert [(p.rows, p.inner, p.columns) for p in table.products] == [(2 * 16, 27, 5)]
    table = trace(Run(lambda x: x @ x.transpose(1, 2)), torch.randn(7, 4, 5, requires_grad=True), dtype=None)
    assert table.products[0].count == 7


def test_what_runs_in_16_bits_and_should_not():
    model = nn.Sequential(
        nn.Linear(4, 4),
        Run(lambda x: x.bfloat16().exp()),
        Run(lambda x: x.log_softmax(-1)),
        Run(lambda x: x.repeat(1, 10_000).sum(1, keepdim=True)),
    )
    found = {(use.module, use.operator) for use in trace(model, torch.randn(3, 4)).sensitive if not use.is_backward}
    assert {("1", "exp"), ("3", "large sum")} <= found
    (peak,) = trace(nn.Sequential(model[0], Run(lambda x: (x * 0 + 300).half().softmax(-1))), torch.randn(3, 4)).peaks
    assert (peak.module, peak.largest, peak.spread, peak.dtype) == ("1", 300.0, 0.0, "float16")


def test_what_runs_in_float32_and_need_not():
    model = nn.Sequential(
        Run(lambda x: (x.float() + 1).relu()),
        nn.Linear(4, 2),
        Run(lambda x: x.float() * x.float().square().mean().rsqrt()),
    )
    found = {(use.module, use.operator) for use in trace(model, torch.randn(3, 4)).needless if not use.is_backward}
    assert ("0", "relu") in found
    assert not any(module == "2" for module, _ in found)  # a norm belongs in float32


def test_masks_do_not_count_as_logits():
    def masked(x):
        rows = torch.arange(len(x))[:, None]
        return x.half().masked_fill(rows == 0, -6e4).softmax(-1)

    (peak,) = trace(nn.Sequential(nn.Linear(4, 4), Run(masked)), torch.randn(3, 4)).peaks
    assert peak.largest < 10


def test_hooks_are_gone_afterwards():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), DtypeTrace(model):
        model(torch.randn(3, 5))
    assert not model._forward_hooks and not model._forward_pre_hooks
