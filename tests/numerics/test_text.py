"""A report as text."""

from __future__ import annotations

import torch
from torch import nn

import accumulus as acc

from .models import Run, rows, squares


def test_findings_are_numbered_and_say_what_to_change():
    model = nn.Sequential(nn.Linear(8, 8), Run(lambda x: (x * 0).sqrt()), nn.Linear(8, 1))
    text = str(acc.diagnose(model, rows(), loss_fn=squares, precision="bf16", rounds=0))
    lines = text.splitlines()
    assert lines[0] == "numerics in bf16 on cpu, 3 steps: 1 finding, worst first"
    assert lines[1].startswith("1. inf made by '1', div in the backward pass")
    assert "sqrt(x + eps)" in lines[1] and lines[1].endswith("(certain)")


def test_no_finding_is_said():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    report = acc.diagnose(model, rows(), loss_fn=squares, optimizer=optimizer, precision="fp16", rounds=1)
    lines = str(report).splitlines()
    assert lines[0].endswith("no finding")
    assert lines[1].startswith("loss scale: fp16: every scale from 2^")
    assert lines[2].startswith("updates: if weights were held in bf16, ") and "would round to nothing" in lines[2]
    assert "does not pay here" in lines[3] or "pays here" in lines[3]
    assert lines[4].startswith("Ranges are of 3 steps of a copy in float32")
