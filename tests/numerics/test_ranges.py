"""What a watch counts, against hooks written by hand; and that it leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.numerics.histogram import NUM_BUCKETS, buckets_of
from accumulus.numerics.ranges import KINDS, RangeWatch, rows_of, sampled, stands_still


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def counts_of(*tensors):
    return sum(torch.bincount(buckets_of(t.detach().float().flatten()), minlength=NUM_BUCKETS) for t in tensors)


def hooks_of(model, optimizer):
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    tensors = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return modules + tensors + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_counts_against_a_plain_loop():
    model, optimizer = make()
    expected = {}

    def count(kind, name, tensor):
        expected[kind, name] = expected.get((kind, name), 0) + counts_of(tensor)

    with RangeWatch(model, optimizer) as watch:
        for _ in range(3):
            hidden = torch.randn(4, 6)
            outputs = []
            for name, module in model.named_children():
                hidden = module(hidden)
                hidden.retain_grad()
                outputs.append((name, hidden))
            optimizer.zero_grad()
            hidden.square().sum().backward()
            for name, output in outputs:
                count("activation", name, output)
                count("activation gradient", name, output.grad)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                count("weight", name, parameter)
                count("weight gradient", name, parameter.grad)
            optimizer.step()
            for name, parameter in model.named_parameters():
                count("update", name, parameter.detach() - before[name])
        rows = watch.rows()
    assert {(row.kind, row.name) for row in rows} == set(expected)
    for row in rows:
        assert row.histogram.counts.tolist() == expected[row.kind, row.name].tolist(), (row.kind, row.name)


def test_a_sample_is_spread_and_the_largest_is_of_all():
    layer = nn.Identity()
    x = torch.rand(64, 1024)
    x[17, 3] = 1000.0
    with RangeWatch(layer, sample=1000) as watch:
        layer(x)
    (row,) = watch.rows()
    assert row.histogram.largest == 1000.0
    assert 500 <= row.histogram.num_counted <= 1000


@pytest.mark.parametrize("shape", [(10,), (64, 64), (7, 11, 13), (1000, 3)])
@pytest.mark.parametrize("limit", [1, 16, 100, 10**6])
def test_samples_meet_every_column(shape, limit):
    tensor = torch.arange(math.prod(shape)).view(shape)
    found = sampled(tensor, limit)
    assert len(found) <= max(limit, 1) or tensor.numel() <= limit
    assert len(set(found.tolist())) == len(found)
    if limit == 100 and len(shape) > 1 and tensor.numel() > 100 * shape[-1]:
        assert len({value % shape[-1] for value in found.tolist()}) == min(shape[-1], len(found))


def test_removing_leaves_nothing():
    model, optimizer = make()
    before = hooks_of(model, optimizer)
    watch = RangeWatch(model, optimizer)
    assert hooks_of(model, optimizer) > before
    loss = model(torch.randn(3, 6)).sum()
    watch.remove()
    assert hooks_of(model, optimizer) == before
    num_rows = len(watch.rows())
    loss.backward()  # the graph still has its hooks, which count no more
    optimizer.step()
    assert len(watch.rows()) == num_rows
    assert rows_of(watch.rows(), "activation gradient") == []


def test_every_third_pass():
    model, _ = make()
    with RangeWatch(model, every=3) as watch:
        for _ in range(7):
            model(torch.randn(2, 6)).sum().backward()
    for row in watch.rows():
        if row.kind in ("activation", "activation gradient"):
            assert row.histogram.num_counted == 3 * 2 * (2 if row.name == "2" else 5)


def test_rounding_to_nothing_against_real_bf16_weights():
    weights, changes = torch.randn(1000), torch.randn(1000) * 1e-3
    changes[:100] = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        held = weights.to(dtype)
        moved = (held.float() + changes).to(dtype)
        assert int(stands_still(weights, changes, dtype)) == int(((moved == held) & (changes != 0)).sum())


def test_share_of_weights_that_stand_still():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with RangeWatch(model, optimizer) as watch:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    (row,) = rows_of(watch.rows(), "update")
    assert row.still_ratio(torch.bfloat16) == row.still_ratio(torch.float16) == 1.0
    assert row.to_dict(1.0)["still_in_bf16"] == 1.0


def test_under_a_real_step_in_low_precision():
    model, optimizer = make()
    step = acc.TrainStep(model, optimizer, lambda m, x: m(x).float().square().mean(), precision="bf16", microbatch=2)
    with RangeWatch(model, optimizer) as watch:
        step(torch.randn(6, 6))
    rows = watch.rows()
    assert {row.kind for row in rows} == set(KINDS)
    assert rows_of(rows, "activation")[0].dtype == torch.bfloat16
    assert rows_of(rows, "activation")[0].histogram.num_counted == 6 * 5


def test_nan_is_an_answer():
    layer = nn.Identity()
    with RangeWatch(layer) as watch:
        layer(torch.tensor([1.0, math.nan]))
        layer(torch.tensor([2.0, 3.0]))
    (row,) = watch.rows()
    assert math.isnan(row.histogram.largest)
    assert row.histogram.num_nonfinite == 1
    assert row.to_dict(1.0)["largest"] == "nan"


def test_an_optimizer_without_hooks():
    class Plain:
        param_groups = []

        def step(self):
            pass

    model, optimizer = make()
    before = hooks_of(model, optimizer)
    with pytest.raises(acc.UnsupportedError, match="leave the optimizer out"):
        RangeWatch(model, Plain())
    assert hooks_of(model, optimizer) == before


def test_it_counts_in_pieces(monkeypatch):
    model, _ = make()
    x = torch.randn(5, 6)
    with RangeWatch(model) as whole:
        model(x).sum().backward()
    monkeypatch.setattr("accumulus.numerics.ranges.FLUSH_AT", 1)
    with RangeWatch(model) as pieces:
        model(x).sum().backward()
    for left, right in zip(whole.rows(), pieces.rows(), strict=True):
        assert left.histogram.counts.tolist() == right.histogram.counts.tolist()
        assert left.histogram.largest == right.histogram.largest
