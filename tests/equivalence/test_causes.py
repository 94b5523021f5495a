from __future__ import annotations

import torch
from torch import nn

import accumulus as acc
from accumulus.equivalence import Kind
from accumulus.equivalence.causes import find_causes

from . import layers as L
from . import planted as P
from .test_mixing import lab_of


def ask(model, loss_fn=L.classify, batch=None, *, unequal_buffers=(), **options):
    lab = lab_of(model.double(), loss_fn, batch, **options).but(dtype=torch.float64)
    return find_causes(lab, [acc.by_count(2)], tolerance=1e-9, unequal_buffers=unequal_buffers)


def test_what_a_model_does_is_switched_off_before_the_loss_is_looked_at():
    found = ask(L.mlp(nn.BatchNorm1d(8)), P.two_towers)
    assert [cause.kind for cause in found.causes] == [Kind.MIXING, Kind.COMPARISON]
    assert found.lab.frozen == {"1"}
    assert all(cause.is_confirmed for cause in found.causes)


def test_buffers_count_where_they_end_up_otherwise():
    assert ask(L.mlp(P.ForwardCounts()), unequal_buffers=["1.num_forwards"]).causes[0].kind is Kind.STATE
    assert ask(L.mlp(P.ForwardCounts())).causes[0].kind is Kind.UNKNOWN


def test_what_no_suspect_explains_is_called_unknown():
    found = ask(L.mlp(), lambda model, batch: L.classify(model, batch) * len(batch["x"]) ** 0.5 * (batch["y"][0] + 1))
    assert found.causes[0].kind in (Kind.STATISTIC, Kind.UNKNOWN)
    assert ask(L.mlp()).causes[0].kind is Kind.UNKNOWN  # nothing differs: it was asked for no reason
    assert not ask(L.mlp()).causes[0].is_confirmed


def test_the_weight_is_written_as_the_loss_function_calls_its_batch():
    batch = P.uneven_labels()
    found = ask(L.mlp(), lambda m, rows: L.classify(m, rows), batch)
    assert found.causes[0].remedy == 'Return acc.Loss.mean(loss, (rows["y"] != -100).sum()).'
