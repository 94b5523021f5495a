"""The benchmarks run, and their table says what they measured. How fast anything is, is not tested."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import auto
import doctor
import low_precision
import memory
import norm
import overhead
import run_all
import timing
import tokens
import update


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(update, "SHAPES", [(16, 16), (16,)])
    monkeypatch.setattr(norm, "NUM_ELEMENTS", 1000)
    monkeypatch.setattr(low_precision, "WIDTH", 32)
    monkeypatch.setattr(low_precision, "NUM_BLOCKS", 1)
    monkeypatch.setattr(low_precision, "LENGTH", 4)
    monkeypatch.setattr(tokens, "SIZES", {"d_model": 8, "num_layers": 1, "num_heads": 2})
    monkeypatch.setattr(tokens, "BATCH_SIZE", 8)
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2048)
    monkeypatch.setattr(tokens, "load_samples", lambda: [b"x" * length for length in range(1, 1000, 31)])
    monkeypatch.setattr(auto, "SIZES", {"max_length": 8, "d_model": 8, "num_layers": 1, "num_heads": 2})
    monkeypatch.setattr(auto, "BATCH_SIZE", 4)
    monkeypatch.setattr(auto, "NUM_STEPS", 15)
    monkeypatch.setattr(auto, "SETTLED", 12)
    monkeypatch.setattr(doctor, "SIZES", {"max_length": 8, "d_model": 8, "num_layers": 1, "num_heads": 2})
    monkeypatch.setattr(doctor, "BATCH_SIZE", 4)
    monkeypatch.setattr(memory, "NUM_LAYERS", 1)
    monkeypatch.setattr(memory, "WIDTH", 16)
    monkeypatch.setattr(memory, "LENGTH", 4)


@pytest.mark.parametrize(
    "script", [overhead, update, norm, low_precision, tokens, memory, auto, doctor], ids=lambda script: script.__name__
)
def test_every_benchmark_runs(script, capsys):
    rows = script.measure(rounds=1)
    assert all(row["ratio"] > 0 for row in rows)
    timing.show(rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_both_sides_of_the_overhead_do_the_same():
    import torch

    import accumulus as acc

    batch = overhead.make_batch()
    for loss_fn in (overhead.with_counts, overhead.counting_labels):
        by_hand, ours = overhead.make_model(), overhead.make_model()
        loss, norm = overhead.hand_written(
            by_hand, torch.optim.AdamW(by_hand.parameters()), batch, counts_labels=loss_fn is overhead.counting_labels
        )
        step = acc.TrainStep(
            ours, torch.optim.AdamW(ours.parameters()), loss_fn, precision="fp32", microbatch=4, max_grad_norm=1.0
        )
        result = step(batch)
        assert float(result.loss) == pytest.approx(float(loss), rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        for a, b in zip(ours.parameters(), by_hand.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_the_table_holds_every_row():
    rows = [{"what": "this", "against": "that", "ratio": 0.5, "bound": None}]
    results = {"rows": rows, "cpu": "some CPU", "num_threads": 2, "torch": "2", "why": "because"}
    assert "| this | that | **0.50** |  |" in run_all.table(results)


def test_every_script_is_measured_by_make_bench():
    scripts = {path.stem for path in Path(run_all.__file__).parent.glob("*.py")} - {"run_all", "timing"}
    assert set(run_all.SCRIPTS) == scripts
