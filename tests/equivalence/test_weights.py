from __future__ import annotations

import pytest
import torch

from accumulus.equivalence.runs import Piece
from accumulus.equivalence.weights import candidates, find_weighting

GRADIENTS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def pieces(shares, weights=(1.0, 1.0, 1.0)):
    """Three micro-batches whose means, so weighted, are the whole one's."""
    means = GRADIENTS
    total = sum(shares)
    whole = sum(share * mean for share, mean in zip(shares, means, strict=True)) / total
    losses = [1.0, 2.0, 3.0]
    loss = sum(share * value for share, value in zip(shares, losses, strict=True)) / total
    parts = [Piece(v * w, w, g * w) for v, g, w in zip(losses, means, weights, strict=True)]
    return Piece(loss * sum(weights), sum(weights), whole * sum(weights)), parts


def test_everything_that_a_micro_batch_offers_is_counted():
    part = {
        "labels": torch.tensor([[1, -100, 2], [-100, -100, 3]]),
        "mask": torch.tensor([True, False]),
        "scores": torch.tensor([0.5, 1.5]),
        "num_bytes": 17,
        "name": "text",
    }
    counted = candidates(part, 2)
    assert counted["the number of samples"] == 2
    assert counted['(batch["labels"] != -100).sum()'] == 3
    assert counted['(batch["labels"][:, 1:] != -100).sum()'] == 2
    assert counted['batch["labels"].numel()'] == 6
    assert counted['batch["mask"].sum()'] == 1
    assert counted['batch["scores"].sum()'] == 2.0
    assert counted['batch["num_bytes"]'] == 17
    assert candidates(torch.zeros(3, 2), 3)["batch.numel()"] == 6
    assert candidates([torch.ones(3, 2)], 3)["batch[0].numel()"] == 6


def test_the_right_count_is_found_and_labels_come_before_others():
    whole, parts = pieces((4, 2, 1))
    counted = [{"batch['x'].sum()": n, "batch['labels']": n, "samples": 2.0} for n in (4.0, 2.0, 1.0)]
    found = find_weighting(whole, parts, counted, 1e-9)
    assert (found.expression, found.form) == ("batch['labels']", "mean")
    assert found.shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_weights_that_nothing_counts_are_solved_for():
    whole, parts = pieces((4, 2, 1))
    found = find_weighting(whole, parts, [{"samples": 2.0}] * 3, 1e-9)
    assert (found.expression, found.form) == ("", "ratio")
    assert found.shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_what_is_no_weighted_mean_has_no_weights():
    whole, parts = pieces((4, 2, 1))
    odd = Piece(whole.total, whole.weight, whole.gradient + 0.1)
    assert find_weighting(odd, parts, [{"samples": 2.0}] * 3, 1e-9) is None
    negative, parts = pieces((4, -2, 1))
    assert find_weighting(negative, parts, [{"samples": 2.0}] * 3, 1e-9) is None


def test_a_sum_that_was_returned_as_a_mean():
    _, parts = pieces((1, 1, 1))
    whole = Piece(6.0 * 3, 3.0, GRADIENTS.sum(0) * 3)
    assert find_weighting(whole, parts, [{"samples": 2.0}] * 3, 1e-9).form == "sum"
