from __future__ import annotations

import pytest
import torch
from torch import nn

from accumulus.equivalence.lab import Lab
from accumulus.equivalence.mixing import find_mixing, perturbed, probe_rows, spaced
from accumulus.equivalence.replica import replicate_original
from accumulus.rng import States

from . import layers as L
from .planted import GhostNorm, Neighbour


def lab_of(model, loss_fn=L.classify, batch=None, **options):
    device = torch.device("cpu")
    return Lab(
        prototype=replicate_original(model, loss_fn, None),
        batch=L.vectors() if batch is None else batch,
        collate=options.get("collate"),
        device=device,
        dtype=None,
        states=States.now(device),
    )


def test_probes_are_spread_over_the_batch():
    assert probe_rows(lab_of(L.mlp())) == [0, 1, 3, 5, 7]
    assert spaced(100, 4) == [0, 25, 50, 75]
    assert spaced(2, 2) == [0, 1]


def test_one_sample_is_exchanged_and_the_others_are_as_before():
    part = {"x": torch.arange(6.0).reshape(3, 2), "y": torch.tensor([5, 6, 7]), "names": ["a", "b", "c"], "n": 3}
    made = perturbed(part, 1)
    assert torch.equal(made["x"][[0, 2]], part["x"][[0, 2]])
    assert not torch.equal(made["x"][1], part["x"][1])
    assert made["y"].tolist() == [5, 7, 7]
    assert made["names"] == ["a", "c", "c"]
    assert made["n"] == 3
    assert part["y"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), GhostNorm(), Neighbour()])
def test_the_module_that_mixes_is_named(layer):
    lab = lab_of(L.mlp(layer))
    found = find_mixing(lab, probe_rows(lab))
    assert found.modules == ("1",)
    assert found.shares[0] > 0.5


def test_those_behind_another_are_named_too():
    lab = lab_of(L.Residual(nn.BatchNorm2d), batch=L.pictures())
    assert find_mixing(lab, probe_rows(lab)).modules == ("stem_norm", "norm1", "norm2")


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Softmax(-1), nn.BatchNorm1d(8).eval()])
def test_modules_that_leave_samples_alone_are_not(layer):
    lab = lab_of(L.mlp(layer))
    assert not find_mixing(lab, probe_rows(lab))


def test_a_dimension_that_has_as_many_entries_as_there_are_samples_is_no_matter():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.inner(x.transpose(0, 1))[0][-1])

    batch = {"x": torch.randn(5, 5, 4), "y": torch.arange(5) % 3}
    lab = lab_of(Turned(), batch=batch)
    assert not find_mixing(lab, probe_rows(lab))


def test_a_model_that_returns_its_own_loss_is_not_accused():
    from .honest import OwnLoss, own_loss

    lab = lab_of(OwnLoss(), own_loss)
    assert not find_mixing(lab, probe_rows(lab))


def test_what_has_no_rows_cannot_be_looked_at():
    def collate(samples):
        return {"x": torch.randn(2 * len(samples) + 1, 4), "y": torch.zeros(2 * len(samples) + 1, dtype=torch.int64)}

    lab = lab_of(L.mlp(), batch=[1, 2, 3], collate=collate)
    assert not find_mixing(lab, [0, 1])


def test_samples_that_are_laid_end_to_end_are_changed_before_they_are_collated():
    sizes = (2, 5, 3, 4)
    batch = [torch.randn(size, 4, generator=torch.Generator().manual_seed(size)) for size in sizes]

    def collate(samples):
        graph = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(s) for s in samples]))
        return {"x": torch.cat(samples), "graph": graph, "num_graphs": len(samples)}

    class Graphs(nn.Module):
        def __init__(self, *inside):
            super().__init__()
            self.nodes = L.mlp(*inside)

        def forward(self, batch):
            return torch.zeros(batch["num_graphs"], 3).index_add(0, batch["graph"], self.nodes(batch["x"]))

    def loss_fn(model, batch):
        return model(batch).square().mean()

    assert not find_mixing(lab_of(Graphs(), loss_fn, batch, collate=collate), [0, 1, 2, 3])
    mixed = find_mixing(lab_of(Graphs(nn.BatchNorm1d(8)), loss_fn, batch, collate=collate), [0, 1, 2, 3])
    assert mixed.modules == ("nodes.1",)
