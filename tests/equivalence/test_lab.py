from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from accumulus.equivalence.lab import undisturbed
from accumulus.rng import States

from . import layers as L
from .test_mixing import lab_of


def test_the_process_is_as_before_even_after_an_error():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), undisturbed(torch.device("cpu")):
        assert torch.is_grad_enabled()
        torch.set_default_dtype(torch.float64)
        torch.rand(3), random.random(), np.random.rand()
        raise ZeroDivisionError
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.get_default_dtype() is torch.float32


def test_every_run_begins_with_the_same_random_states():
    lab = lab_of(L.mlp())
    drawn = []
    for _ in range(2):
        with lab.conditions():
            drawn.append((float(torch.rand(())), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_in_float64_new_tensors_are_float64():
    with lab_of(L.mlp()).but(dtype=torch.float64).conditions():
        assert torch.zeros(2).dtype is torch.float64
        assert torch.zeros(2).float().dtype is torch.float64
    assert torch.zeros(2).dtype is torch.float32


def test_an_autocast_of_the_users_is_off_inside():
    with torch.autocast("cpu", torch.bfloat16), lab_of(L.mlp()).conditions():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_micro_batches_belong_to_nobody_else():
    batch = L.vectors()
    lab = lab_of(L.mlp(), batch=batch).but(dtype=torch.float64)
    part = lab.part([2, 0])
    assert part["x"].dtype is torch.float64
    assert torch.equal(part["y"], batch["y"][[2, 0]])
    part["x"].zero_()
    lab.part()["y"].zero_()
    assert batch["x"].any()
    assert batch["y"].any()


def test_frozen_modules_run_in_evaluation_mode_and_recurrent_ones_without_dropout():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LSTM(4, 4, num_layers=2, dropout=0.5))
    lab = lab_of(model)
    made = lab.but(frozen=frozenset({"0"}), draws="mean").fresh().model
    assert (made[0].training, made[1].training, made[1].dropout) == (False, True, 0.0)
    assert (model[0].training, model[1].dropout) == (True, 0.5)


def test_states_come_back():
    states = States.now(torch.device("cpu"))
    first = torch.rand(2)
    states.restore()
    assert torch.equal(first, torch.rand(2))
