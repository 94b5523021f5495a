"""Rules with another size cover the batch, keep to the size and to the rule's own order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc
from accumulus.memory.sizing import Even, at_most, load_of, resized, sample_load_of, smallest_of, unit_of
from accumulus.microbatch import BySize, Groups, Microbatches
from tests.reference import token_loss, tokens_batch, tokens_model


class Own:
    def sizes(self, num_samples):
        return [num_samples - 1, 1] if num_samples > 1 else [1]


class OwnGroups:
    def groups(self, batch):
        num_samples = len(batch) if isinstance(batch, list) else batch.length
        return Groups(order=list(range(num_samples))[::-1], sizes=Own().sizes(num_samples))


def cut(rule, num_samples, collate=None):
    batch = torch.arange(num_samples) if collate is None else list(range(num_samples))
    return Microbatches(batch, rule, torch.device("cpu"), collate=collate)


@given(
    rule=st.one_of(
        st.builds(BySize, st.integers(1, 50)),
        st.builds(acc.by_count, st.integers(1, 50)),
        st.just(Own()),
        st.just(OwnGroups()),
        st.builds(Even, st.integers(1, 50)),
    ),
    num_samples=st.integers(1, 60),
    load=st.integers(1, 60),
    collated=st.booleans(),
)
def test_no_micro_batch_is_larger_and_none_is_missing(rule, num_samples, load, collated):
    parts = cut(at_most(rule, load), num_samples, (lambda samples: torch.tensor(samples)) if collated else None)
    assert load_of(parts) == max(parts.sizes) <= load
    seen = torch.cat([part for part, _ in parts]).tolist()
    right = list(range(num_samples))[::-1] if isinstance(rule, OwnGroups) else list(range(num_samples))
    assert seen == right
    twice = cut(at_most(at_most(rule, load), load), num_samples)
    assert list(twice.sizes) == list(parts.sizes)


@given(num_samples=st.integers(1, 100), size=st.integers(1, 100))
def test_even_sizes_differ_by_one_at_most(num_samples, size):
    sizes = Even(size).sizes(num_samples)
    assert sum(sizes) == num_samples and max(sizes) - min(sizes) <= 1 and max(sizes) <= size
    assert len(sizes) == -(-num_samples // size)


def test_token_budgets_stay_token_budgets():
    rule = acc.by_tokens(100, length="labels", multiple_of=1, strict=True)
    batch = tokens_batch([30, 30, 10, 10])
    batch["tokens"] = torch.where(batch["labels"] == -100, 0, batch["tokens"])
    smaller = at_most(rule, 20)  # below the longest sample, which is no longer the user's fault
    parts = Microbatches(batch, smaller, torch.device("cpu"), collate=None)
    assert parts.sizes == [1, 1, 2] and load_of(parts) == 30 and sample_load_of(parts) == 30
    assert at_most(rule, 500).max_tokens == 100
    assert resized(rule, 500).max_tokens == 500
    assert unit_of(rule) == unit_of(smaller) == "tokens" and unit_of(BySize(3)) == unit_of(Own()) == "samples"


def test_trimmed_columns_follow_their_micro_batch():
    rule = acc.by_tokens(200, length="labels", multiple_of=1)
    batch = tokens_batch([50, 40, 20, 10])
    batch["tokens"] = torch.where(batch["labels"] == -100, 0, batch["tokens"])

    class Wrapped:
        def groups(self, tree):
            return rule.groups(tree)

    parts = Microbatches(batch, at_most(Wrapped(), 1), torch.device("cpu"), collate=None)
    whole = Microbatches(batch, rule, torch.device("cpu"), collate=None)
    width = {
        row: part["labels"].shape[1] for (part, _), rows in zip(whole, rows_of(whole), strict=True) for row in rows
    }
    for (part, _), (row,) in zip(parts, rows_of(parts), strict=True):
        assert part["labels"].shape == (1, width[row])


def rows_of(parts):
    rows = iter(parts.order)
    return [[next(rows) for _ in range(size)] for size in parts.sizes]


@pytest.mark.filterwarnings("ignore:1 BatchNorm")
@pytest.mark.parametrize(("training", "smallest"), [(True, 2), (False, 1)])
def test_batchnorm_needs_two(training, smallest):
    model = torch.nn.Sequential(tokens_model(), torch.nn.BatchNorm1d(17))
    model.train(training)
    step = acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, precision="fp32", microbatch=1)
    assert smallest_of(step) == smallest
