from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from accumulus.equivalence.modes import Draws, Widened

DRAWS = {
    "rand": lambda shape: torch.rand(shape),
    "randn": lambda shape: torch.randn(shape),
    "randint": lambda shape: torch.randint(3, 9, shape),
    "rand_like": lambda shape: torch.rand_like(torch.zeros(shape)),
    "dropout": lambda shape: F.dropout(torch.ones(shape)),
    "bernoulli": lambda shape: torch.bernoulli(torch.full(shape, 0.3)),
    "bernoulli_": lambda shape: torch.zeros(shape).bernoulli_(0.3),
    "uniform_": lambda shape: torch.zeros(shape).uniform_(-2, 3),
    "normal_": lambda shape: torch.zeros(shape).normal_(1.0, 2.0),
    "exponential_": lambda shape: torch.zeros(shape).exponential_(2.0),
    "gumbel": lambda shape: F.gumbel_softmax(torch.zeros(shape)),
    "own generator": lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_neither_the_number_of_samples_nor_the_padding(name):
    with Draws(by_mean=False):
        torch.manual_seed(5)
        large, after_large = DRAWS[name]((6, 8)), torch.rand(2, 3)
        torch.manual_seed(5)
        small, after_small = DRAWS[name]((2, 8)), torch.rand(2, 3)
        torch.manual_seed(5)
        short = DRAWS[name]((6, 5))
    assert torch.equal(large[:2], small)
    assert torch.equal(after_large, after_small)
    if name != "gumbel":  # a softmax over the length
        assert torch.equal(large[:, :5], short)
    assert len(large[0].unique()) > 1


@pytest.mark.parametrize(("name", "mean"), [("rand", 0.5), ("randn", 0.0), ("dropout", 1.0), ("uniform_", 0.5)])
def test_draws_at_their_mean(name, mean):
    with Draws(by_mean=True):
        assert torch.allclose(DRAWS[name]((6, 8)), torch.tensor(mean))


def test_draws_have_the_distribution_that_was_asked_for():
    torch.manual_seed(0)
    with Draws(by_mean=False):
        uniform, normal = torch.rand(1, 200_000), torch.zeros(1, 200_000).normal_(1.0, 2.0)
        flips, waits = torch.zeros(1, 200_000).bernoulli_(0.3), torch.zeros(1, 200_000).exponential_(2.0)
        faces = torch.randint(0, 6, (1, 60_000))
        picks = torch.multinomial(torch.tensor([[1.0, 3.0]]), 10_000, replacement=True)
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(uniform.var()) == pytest.approx(1 / 12, abs=0.01)
    assert float(normal.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(normal.std()) == pytest.approx(2.0, abs=0.02)
    assert float(flips.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(waits.mean()) == pytest.approx(0.5, abs=0.01)
    assert float((picks == 1).double().mean()) == pytest.approx(0.75, abs=0.02)
    assert torch.bincount(faces[0]).tolist() == pytest.approx([10_000] * 6, rel=0.05)


def test_a_permutation_still_exchanges_samples():
    with Draws(by_mean=False):
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]


def test_casts_widen():
    with Widened():
        x = torch.ones(2, dtype=torch.float64)
        assert x.float().dtype is torch.float64
        assert x.to(torch.float32).dtype is torch.float64
        assert x.to(dtype=torch.bfloat16).dtype is torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype is torch.float64
        assert x.to(torch.int32).dtype is torch.int32
