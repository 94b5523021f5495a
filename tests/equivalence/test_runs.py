"""The reference and what it is compared with, against gradients taken by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.equivalence.runs import accumulated, run_piece, whole
from accumulus.equivalence.splits import Singles, Uneven

from . import layers as L
from .test_mixing import lab_of


def by_hand(model, loss):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_the_whole_batch_is_one_plain_backward_pass():
    model, batch = L.mlp(), L.vectors()
    found = whole(lab_of(model, batch=batch))
    loss = L.classify(model, batch)
    right = by_hand(model, loss)
    assert found.loss == pytest.approx(loss.item())
    assert all(torch.allclose(found.gradients[name], gradient) for name, gradient in right.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_terms_are_each_over_their_own_count():
    def loss_fn(model, batch):
        z = model(batch["x"])
        known = batch["r"] > 0.5
        return {"all": acc.Loss(z.square().sum(), z.numel()), "some": acc.Loss((z[:, 0] * known).sum(), known.sum())}

    model, batch = L.mlp(), L.vectors()
    lab = lab_of(model, loss_fn, batch)
    found = whole(lab)
    z, known = model(batch["x"]), batch["r"] > 0.5
    assert found.loss == pytest.approx((z.square().mean() + z[:, 0][known].mean()).item(), rel=1e-5)
    assert found.weights == {"all": z.numel(), "some": int(known.sum())}
    other = accumulated(lab, Uneven(), weights=found.weights)
    assert other.sizes == (5, 2, 1, 1)
    assert all(torch.allclose(other.gradients[name], g, atol=1e-6) for name, g in found.gradients.items())


def test_rows_in_another_order_are_the_same_batch():
    lab = lab_of(L.mlp())
    first, second = whole(lab), whole(lab, list(range(9))[::-1])
    assert all(torch.allclose(first.gradients[n], second.gradients[n], atol=1e-6) for n in first.gradients)


def test_a_piece_gives_each_term_by_itself():
    def loss_fn(model, batch):
        z = model(batch["x"])
        return {"one": z.square().mean(), "none": acc.Loss.mean(z.sum() * torch.nan, 0)}

    model, batch = L.mlp(), L.vectors()
    found = run_piece(lab_of(model, loss_fn, batch), batch, 9)
    right = by_hand(model, model(batch["x"]).square().mean())
    assert torch.allclose(found["one"].gradient / found["one"].weight, torch.cat([g.flatten() for g in right.values()]))
    assert found["none"].weight == 0
    assert not found["none"].gradient.any()


def test_fp16_finds_a_scale_at_which_gradients_are_finite():
    model = nn.Linear(4, 3)
    lab = lab_of(model, lambda m, b: 1e4 * m(b["x"]).sum(1).mean())
    found = accumulated(lab, Singles(), precision="fp16")
    assert all(bool(gradient.isfinite().all()) for gradient in found.gradients.values())
    assert torch.allclose(found.gradients["bias"], torch.full((3,), 1e4), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:1 BatchNorm modules")
def test_buffers_are_those_after_the_pass():
    lab = lab_of(L.mlp(nn.BatchNorm1d(8)))
    assert whole(lab).buffers["1.num_batches_tracked"] == 1
    assert accumulated(lab, acc.by_count(3)).buffers["1.num_batches_tracked"] == 3
    assert accumulated(lab.but(frozen=frozenset({"1"})), acc.by_count(3)).buffers["1.num_batches_tracked"] == 0
