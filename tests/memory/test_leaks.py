"""What a run on fake tensors leaves in caches is taken out, so that the training after it computes with real ones."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import accumulus as acc


class WithCache(nn.Module):
    """Its forward pass multiplies by a table that is made once, and kept where no copy of the model reaches."""

    def __init__(self, table) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.table = table

    def forward(self, x):
        return self.linear(x @ self.table(x.shape[1]))


def in_a_dict():
    tables: dict[int, torch.Tensor] = {}

    def table(size):
        if size not in tables:
            tables[size] = torch.ones(size, size).tril()
        return tables[size]

    return table


def in_an_lru_cache():
    return functools.lru_cache(lambda size: torch.ones(size, size).tril())


def in_an_endless_cache_of_tuples():
    pair = functools.lru_cache(maxsize=None)(lambda size: (torch.ones(size, size).tril(), [torch.ones(size)]))
    return lambda size: pair(size)[0] * pair(size)[1][0]


@pytest.mark.parametrize("make_table", [in_a_dict, in_an_lru_cache, in_an_endless_cache_of_tuples])
def test_training_after_an_estimate_finds_no_fake_tensor_in_a_cache(make_table, caplog):
    def trained(microbatch):
        torch.manual_seed(0)
        model = WithCache(make_table())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = acc.TrainStep(
            model, optimizer, lambda model, x: model(x).square().mean(), precision="fp32", microbatch=microbatch
        )
        step(torch.ones(8, 4))
        return model.linear.weight

    assert torch.allclose(trained("auto"), trained(8))
    assert not caplog.records


def test_what_stays_in_a_variable_is_said(caplog):
    kept = []
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, x):
        loss = model(x).square().mean()
        kept.append(loss.detach())
        return loss

    acc.memory.estimate(model, optimizer, loss_fn, torch.ones(8, 4), precision="fp32", microbatch=8)
    assert "are held in variables" in caplog.text
