"""The ledger: outcomes are settled late on a device, at once on the host, and exactly once."""

from __future__ import annotations

import pytest
import torch

import accumulus as acc
from accumulus.ledger import Ledger, Outcome


class Counter:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1


def no_problem():
    return ""


def post(ledger, all_finite, applied, *, problem=no_problem, cause=no_problem):
    ledger.post(Outcome(all_finite, applied), None, problem=problem, cause=cause)


def test_on_the_host_the_outcome_is_settled_at_once():
    scheduler = Counter()
    ledger = Ledger(acc.DynamicScale(initial=4.0), [scheduler])
    post(ledger, True, True)
    assert (ledger.num_steps, ledger.num_applied, scheduler.count) == (1, 1, 1)
    post(ledger, False, False)
    assert (ledger.num_steps, ledger.num_applied, scheduler.count) == (2, 1, 1)
    assert float(ledger.loss_scale) == 2.0


def test_on_a_device_it_is_settled_when_it_is_needed_and_once():
    scheduler = Counter()
    ledger = Ledger(acc.NoScale(), [scheduler])
    post(ledger, torch.tensor(True), torch.tensor(True))
    assert (ledger.num_steps, scheduler.count) == (0, 0)
    ledger.settle()
    ledger.settle()
    assert (ledger.num_steps, scheduler.count) == (1, 1)


def test_after_a_skip_it_is_awaited_so_that_the_cause_can_be_found():
    ledger = Ledger(acc.NoScale(max_skips=2))
    no = torch.tensor(False)
    post(ledger, no, no)
    ledger.settle()
    with pytest.raises(acc.ScaleCollapseError, match="because of the moon"):
        post(ledger, no, no, cause=lambda: "because of the moon")


def test_a_finite_step_that_was_not_applied_has_a_problem_or_none():
    ledger = Ledger(acc.DynamicScale(initial=4.0, growth_interval=1))
    post(ledger, True, False)
    assert float(ledger.loss_scale) == 4.0  # an empty batch says nothing about the scale
    with pytest.raises(acc.WeightError, match="weights"):
        post(ledger, True, False, problem=lambda: "weights")
    assert (ledger.num_steps, ledger.num_applied) == (2, 0)


def test_a_non_finite_step_that_was_applied_all_the_same_does_not_count_as_a_skip():
    ledger = Ledger(acc.NoScale(max_skips=1))
    post(ledger, False, True)
    assert ledger.loss_scale == acc.NoScale(max_skips=1)


def test_state_with_every_field_set_survives():
    ledger = Ledger(acc.DynamicScale(initial=4.0))
    for finite in (True, False, True):
        post(ledger, finite, finite)
    other = Ledger(acc.DynamicScale())
    other.load_state_dict(ledger.state_dict())
    assert other.state_dict() == ledger.state_dict() != Ledger(acc.DynamicScale()).state_dict()


def test_a_grad_scalers_state_can_stand_for_the_loss_scale():
    ledger = Ledger(acc.DynamicScale())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    ledger.load_state_dict({"loss_scale": scaler.state_dict()})
    assert float(ledger.loss_scale) == 64.0


def test_unknown_entries_are_refused():
    with pytest.raises(acc.StateError, match="tempo"):
        Ledger(acc.NoScale()).load_state_dict({"tempo": 3})
