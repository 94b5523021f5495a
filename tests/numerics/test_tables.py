"""Cells are what their heads say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumulus as acc
from accumulus.numerics.formats import FP16
from accumulus.numerics.tables import (
    DTYPE_HEADS,
    RANGE_HEADS,
    cast_cells,
    describe_updates,
    percent,
    range_cells,
    use_cells,
)

from .models import rows, squares


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[1].weight.fill_(1e5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return acc.diagnose(model, rows(1), loss_fn=squares, optimizer=optimizer, precision="bf16", rounds=0)


def test_every_row_has_a_cell_for_every_head(report):
    assert all(len(range_cells(row, 2.0**16)) == len(RANGE_HEADS) for row in report.rows)
    assert all(len(use_cells(use)) == len(DTYPE_HEADS) for use in report.trace.uses)
    assert all(len(cast_cells(cast)) == len(DTYPE_HEADS) for cast in report.trace.casts)


def test_cells_hold_the_rows_numbers(report):
    row = next(row for row in report.rows if row.kind == "activation" and row.name == "1")
    cells = dict(zip(RANGE_HEADS[:7], range_cells(row, 1.0)[:7], strict=True))
    assert cells["layer"] == "1" and float(cells["largest"]) == pytest.approx(row.histogram.largest, rel=1e-2)
    assert cells["beyond"] == percent(row.histogram.overflow_ratio(FP16))


def test_updates_in_a_sentence(report):
    text = describe_updates(report.rows)
    assert text == report.updates
    assert text.startswith("updates: if weights were held in bf16, ") and "would round to nothing" in text
    assert describe_updates([]) == ""


@pytest.mark.parametrize(("ratio", "text"), [(0.0, ""), (1e-5, "<0.1%"), (0.0123, "1.23%"), (1.0, "100%")])
def test_percent(ratio, text):
    assert percent(ratio) == text
