"""Which module runs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accumulus.whereabouts import OperatorWatch, Place, Whereabouts, operator_name, tensors_in


class Log(OperatorWatch):
    def __init__(self, model):
        super().__init__(model)
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((self.whereabouts.here, operator_name(func)))
        return func(*args, **(kwargs or {}))


class Inner(nn.Module):
    def forward(self, x):
        return x.sin()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return {"out": self.inner(x.exp()).tanh()}


def test_forward_and_backward_of_nested_modules():
    model, x = Outer(), torch.randn(3, requires_grad=True)
    with Log(model) as log:
        loss = model(x)["out"].sum()
        log.whereabouts.note(loss)
        loss.backward()
    seen = {name: place for place, name in log.seen}
    assert seen["exp"] == Place("Outer", False)
    assert seen["sin"] == Place("inner", False)
    assert seen["tanh"] == Place("Outer", False)
    assert seen["sum"] == Place("", False)
    assert seen["tanh_backward"] == Place("Outer", True)
    assert seen["cos"] == Place("inner", True)
    assert str(Place("", False)) == "the loss function"


def test_an_error_leaves_no_hook_and_no_place():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Identity(), Fails())
    whereabouts = Whereabouts(model)
    whereabouts.install()
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(1))
    assert whereabouts.here == Place("", False)
    whereabouts.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_shared_modules_and_parameters():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    for _ in range(2):  # nodes of parameters outlive a pass, and must not collect notes
        with Log(model) as log:
            loss = model(torch.randn(1, 2)).sum()
            log.whereabouts.note(loss)
            loss.backward()
        assert Place("0", True) in {place for place, _ in log.seen}


def test_tensors_in_all_kinds_of_trees():
    @dataclass
    class Pair:
        first: torch.Tensor
        second: object

    one, two = torch.ones(1), torch.ones(2)
    assert list(tensors_in({"a": [one, (two, None, 3)], "b": Pair(one, "text")})) == [one, two, one]
    assert list(tensors_in(Pair)) == []
