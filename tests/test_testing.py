import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.testing import assert_split_invariant


def loss_fn(model, rows):
    return model(rows).square().mean()


def test_it_passes_and_gives_the_report():
    report = assert_split_invariant(nn.Linear(4, 1), loss_fn, torch.randn(6, 4))
    assert report
    assert isinstance(report, acc.EquivalenceReport)


def test_it_fails_with_the_reason():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(AssertionError, match=r"module mixes samples: 1 \(BatchNorm1d\)"):
        acc.testing.assert_split_invariant(model, loss_fn, torch.randn(6, 4))
