from __future__ import annotations

import torch
from torch import nn

from accumulus.equivalence.trace import changed, first_differences, fits, labelled, run_traced, watched_draws

from . import layers as L
from .honest import OwnLoss, own_loss
from .test_mixing import lab_of


def trace(model, loss_fn=L.classify, **options):
    lab = lab_of(model, loss_fn)
    return run_traced(lab, lab.fresh(), lab.part(), **options)


def test_calls_are_written_down_in_the_order_in_which_they_begin():
    found = trace(OwnLoss(), own_loss)
    assert [(call.name, call.parent) for call in found.calls] == [
        ("", -1),
        ("inner", 0),
        ("inner.0", 1),
        ("inner.1", 1),
        ("inner.2", 1),
    ]
    assert [label for label, _ in found.calls[0].outputs] == ["loss", "logits"]
    assert [call.name for call in found.inside(1)] == ["inner.0", "inner.1", "inner.2"]
    assert found.calls[1].shown == "inner (Sequential)"
    assert found.calls[0].shown == "the model (OwnLoss)"


def test_an_output_can_be_replaced():
    plain, other = trace(L.mlp()), trace(L.mlp(), overrides={0: torch.zeros_like})
    assert other.returned.item() != plain.returned.item()
    assert not other.calls[0].outputs[0][1].any()


def test_a_graph_only_where_it_is_wanted():
    assert not trace(L.mlp()).calls[0].outputs[0][1].requires_grad
    assert trace(L.mlp(), with_graph=True).calls[0].outputs[0][1].requires_grad


def test_who_draws_is_the_innermost_module():
    model = nn.Sequential(L.mlp(nn.Dropout(0.5)), nn.Identity())
    assert trace(model, watch_draws=True).draws == ["0.1 (Dropout)"]
    seen = []
    with watched_draws(lambda: seen.append(1)):
        torch.rand(2, generator=torch.Generator())
    assert seen == []


def test_what_changed_is_more_than_rounding():
    one = torch.tensor([1.0, 2.0, torch.nan, torch.inf], dtype=torch.float64)
    assert changed(one, one.clone()).tolist() == [False] * 4
    assert changed(one, one + 1e-14).tolist() == [False] * 4
    assert changed(one, torch.tensor([1.0, 2.1, 0.0, torch.inf], dtype=torch.float64)).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert changed(torch.zeros(2), torch.zeros(3)) is None
    assert changed(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, True]


def test_the_first_module_that_differs_is_named():
    one, two = trace(L.mlp()), trace(L.mlp(), overrides={1: lambda out: out + 1})
    assert fits(one, two)
    assert [call.name for call in first_differences(one, two)] == ["0"]
    assert first_differences(one, trace(nn.Linear(4, 3))) == []


def test_tensors_of_a_tree_have_names():
    tree = {"a": torch.zeros(1), "b": [torch.zeros(2), "text"], "c": (torch.zeros(3),)}
    assert [label for label, _ in labelled(tree)] == ["a", "b.0", "c.0"]
