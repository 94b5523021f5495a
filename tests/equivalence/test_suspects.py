from __future__ import annotations

import torch
from torch import nn

from accumulus.equivalence.splits import make_splits
from accumulus.equivalence.suspects import (
    changed_buffers,
    find_draws,
    find_noise,
    find_padding,
    find_state,
    strides,
    thirds,
)

from . import layers as L
from . import planted as P
from .test_mixing import lab_of

ROWS = [0, 1, 2]


def test_who_draws():
    assert find_draws(lab_of(L.mlp(nn.Dropout(0.5)))) == ("1 (Dropout)",)
    assert find_draws(lab_of(L.mlp(nn.Dropout(0.5).eval()))) == ()
    assert find_draws(lab_of(L.mlp(), lambda m, b: L.classify(m, b) * torch.rand(()))) == ("the loss function",)
    assert find_draws(lab_of(L.mlp(P.Unseeded()))) == ()  # another generator than the process's own

    def collate(samples):
        return {"x": torch.randn(len(samples), 4), "y": torch.zeros(len(samples), dtype=torch.int64)}

    assert find_draws(lab_of(L.mlp(), batch=[1, 2, 3], collate=collate)) == ("the collate function",)


def test_what_differs_between_equal_runs():
    assert find_noise(lab_of(L.mlp(P.Clock())), ROWS, 1e-9).where == ("1 (Clock)",)
    assert find_noise(lab_of(L.mlp(nn.Dropout(0.5))), ROWS, 1e-9) is None
    assert find_noise(lab_of(L.mlp(P.Counter())), ROWS, 1e-9) is None


def test_what_is_carried_over():
    assert find_state(lab_of(L.mlp(P.Counter())), ROWS, 1e-9).where == ("1 (Counter)",)
    assert find_state(lab_of(L.mlp(), P.moving_baseline()), ROWS, 1e-9).where == ("the loss function",)
    assert find_state(lab_of(L.mlp(nn.BatchNorm1d(8))), ROWS, 1e-9) is None
    assert set(changed_buffers(lab_of(L.mlp(P.ForwardCounts())), ROWS)) == {"1.num_forwards"}


def test_what_looks_at_padding():
    lists = {"batch": L.sentences(), "collate": L.pad}
    found = find_padding(lab_of(P.Pooled(), P.pooled_loss, **lists), [], 1e-6)
    assert found.where == ("the model (Pooled)",)
    assert find_padding(lab_of(L.Transformer(), P.counted_loss, **lists), [], 1e-4) is None
    same = {"batch": L.sentences((4, 4, 4)), "collate": L.pad}
    assert find_padding(lab_of(P.Pooled(), P.pooled_loss, **same), [], 1e-6) is None


def test_padded_tensors_are_looked_at_where_a_split_trims_them():
    text = L.tokens((2, 7, 3, 5))
    rules = list(make_splits(["by_tokens"], text, has_collate=False)[0].values())
    assert find_padding(lab_of(P.Pooled(), P.pooled_loss, text), rules, 1e-6).where == ("the model (Pooled)",)
    assert find_padding(lab_of(P.Pooled(), P.pooled_loss, text), [], 1e-6) is None


def test_groups_cover_the_batch():
    for count in range(2, 30):
        for groups in (thirds(count), strides(count)):
            assert sorted(row for group in groups for row in group) == list(range(count))
            assert len(groups) >= 2
