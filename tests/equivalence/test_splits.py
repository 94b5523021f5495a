from __future__ import annotations

import pytest
import torch

import accumulus as acc
from accumulus import pytree
from accumulus.equivalence.splits import NAMED, SPLITS, Singles, Uneven, make_splits

from . import layers as L


@pytest.mark.parametrize("num_samples", range(2, 40))
def test_sizes_cover_the_batch_and_really_cut_it(num_samples):
    for rule in (Uneven(), Singles()):
        sizes = rule.sizes(num_samples)
        assert sum(sizes) == num_samples
        assert min(sizes) >= 1
        assert len(sizes) > 1
    groups = NAMED["reordered"].groups(pytree.sliceable(torch.zeros(num_samples)))
    assert sorted(groups.order) == list(range(num_samples))
    assert groups.order != list(range(num_samples)) or num_samples == 2


def test_by_tokens_where_lengths_are_known():
    rules, notes = make_splits(SPLITS, L.tokens((2, 7, 3)), has_collate=False)
    assert list(rules) == list(SPLITS)
    assert notes == []
    rules, notes = make_splits(SPLITS, L.vectors(), has_collate=False)
    assert "by_tokens" not in rules
    assert notes == []
    rules, notes = make_splits(["uneven", "by_tokens"], L.vectors(), has_collate=False)
    assert "attention_mask" in notes[0]
    assert "by_tokens" in make_splits(SPLITS, L.sentences(), has_collate=True)[0]


def test_rules_and_numbers_get_names():
    asked = [3, acc.by_count(2), acc.by_tokens(64, length="attention_mask")]
    rules, _ = make_splits(asked, L.tokens((2, 3)), has_collate=False)
    assert list(rules) == ["3 at a time", "ByCount(count=2)", "by_tokens(64)"]
    assert list(make_splits("uneven", L.vectors(), has_collate=False)[0]) == ["uneven"]


@pytest.mark.parametrize("asked", [["halves"], [0], [2.5], ["by_tokens"], []])
def test_what_cannot_be_is_refused(asked):
    with pytest.raises(acc.SplitError):
        make_splits(asked, L.vectors(), has_collate=False)
