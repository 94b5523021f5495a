from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

import accumulus as acc
from accumulus.run.doctor_table import percent, shortened, show_report


def shown(report, width=80):
    out = StringIO()
    show_report(Console(file=out, width=width), report, task="mine", num_rows=3)
    return out.getvalue()


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    return acc.diagnose(
        model,
        [torch.randn(4, 8)],
        loss_fn=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        precision="bf16",
        rounds=1,
    )


def test_it_shows_everything_in_80_columns(report):
    text = shown(report)
    assert text.startswith("mine in bf16 on cpu, 1 step\nNo finding.\n")
    for part in ("loss scale, bf16", "ranges, the 3 worst of", "casts, the costly ones first", "here: a forward"):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_names_are_shortened_in_the_middle():
    name = "encoder.layers.11.attention.query_key_value"
    assert len(shortened(name)) == 28
    assert shortened(name).startswith("encoder.l...") and shortened(name).endswith("query_key_value")
    assert shortened("short") == "short"


@pytest.mark.parametrize(("ratio", "text"), [(0.0, ""), (-1e-9, ""), (1e-5, "<0.1%"), (0.0123, "1.23%"), (1.0, "100%")])
def test_percent(ratio, text):
    assert percent(ratio) == text
