from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from accumulus.equivalence.loss import LossView, find_meeting

from . import layers as L
from . import planted as P
from .honest import OwnLoss, advantage_given, contrast_within, dice_by_sample, own_loss
from .test_mixing import lab_of

ROWS = list(range(12))


def meeting(loss_fn, model=None, term="loss", batch=None):
    lab = lab_of((model or L.mlp()).double(), loss_fn, batch or L.vectors(12))
    lab = lab.but(dtype=torch.float64)
    return find_meeting(lab, ROWS, term)


@pytest.mark.parametrize(
    ("loss_fn", "through", "is_comparison"),
    [
        (P.two_towers, "outputs", True),
        (P.symmetric_pairs, "outputs", True),
        (P.ranking, "outputs", True),
        (P.margin_ranking, "outputs", True),
        (P.hardest_triplet, "outputs", True),
        (P.dice, "outputs", False),
        (P.f_score, "outputs", False),
        (P.whitened, "outputs", False),
        (P.advantages, "data", False),
        (P.class_balance, "data", False),
    ],
)
def test_how_samples_meet(loss_fn, through, is_comparison):
    found = meeting(loss_fn)
    assert (found.through, found.is_comparison) == (through, is_comparison)
    assert 0 < found.share <= 1


@pytest.mark.parametrize("loss_fn", [L.classify, dice_by_sample, advantage_given, P.weighted_mean, P.sum_as_scalar])
def test_samples_that_do_not_meet(loss_fn):
    assert meeting(loss_fn) is None


def test_a_mean_over_counts_that_differ_is_but_a_factor():
    batch = L.vectors(12)
    batch["y"] = torch.where(torch.arange(12) % 3 == 0, -100, batch["y"])
    assert meeting(L.classify, batch=batch) is None


def test_negatives_of_ones_own_are_no_meeting():
    assert meeting(contrast_within, batch=L.vectors(12) | {"negatives": torch.randn(12, 3, 4)}) is None


def test_only_the_term_that_meets():
    assert meeting(P.two_terms, term="labels") is None
    assert meeting(P.two_terms, term="pairs").is_comparison


def test_balance_losses_are_seen_in_the_routers_output():
    assert "(MoE).1" in meeting(P.with_balance, P.MoE(), term="balance").where[0]
    assert any("MoE" in place for place in meeting(P.with_hidden_balance, P.HiddenBalance()).where)


def test_a_model_that_returns_its_own_loss_is_opened():
    view = LossView(lab_of(OwnLoss(), own_loss), ROWS[:5])
    assert [slot.shown for slot in view.slots] == ["inner (Sequential)"]
    direct = F.cross_entropy(view.slots[0].value, view.part["y"])
    assert torch.allclose(view.terms([view.slots[0].value], view.part)["loss"], direct)
