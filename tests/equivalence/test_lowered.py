from __future__ import annotations

import pytest
import torch

import accumulus as acc
from accumulus.equivalence.lowered import measure_precision
from accumulus.equivalence.runs import whole
from accumulus.equivalence.splits import Singles

from . import layers as L
from .test_mixing import lab_of


@pytest.mark.parametrize(
    ("name", "at_least", "at_most"), [("bf16", 1e-4, 5e-2), ("fp16", 1e-5, 5e-3), ("tf32", 0.0, 1e-5)]
)
def test_errors_are_those_of_the_precision(name, at_least, at_most):
    lab = lab_of(L.mlp()).but(dtype=torch.float32)
    right = whole(lab_of(L.mlp().double()).but(dtype=torch.float64))
    total, rows = measure_precision(lab, right, acc.Precision.parse(name), [acc.by_count(2), Singles()])
    assert at_least <= total.whole <= at_most
    assert at_least <= total.accumulated <= at_most
    assert [row.name for row in rows] == [row.name for row in sorted(rows, key=lambda row: -row.accumulated)]
    assert len(rows) == 4
