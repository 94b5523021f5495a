"""The benchmark of the streaming form: its sides do the same work. How fast they are is not tested."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import streaming
import timing
from overhead import NUM_SAMPLES, make_model


def assert_same_parameters(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_it_runs(capsys):
    rows = streaming.measure(rounds=1)
    assert all(row["ratio"] > 0 for row in rows)
    assert [row["bound"] for row in rows[:2]] == [1.10, 1.10]
    assert all(row["bound"] is None for row in rows[2:])
    timing.show(rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_peers_that_are_not_installed_are_left_out_with_a_note(monkeypatch, capsys):
    monkeypatch.setattr(streaming, "find_spec", lambda package: None)
    assert len(streaming.measure(rounds=1)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("is not installed") == len(streaming.PEERS)


@pytest.mark.parametrize("fused", [None, True])
def test_ours_does_what_the_loop_by_hand_does(fused):
    microbatches = streaming.make_microbatches()
    by_hand, ours = make_model(), make_model()
    optimizer = torch.optim.AdamW(by_hand.parameters(), fused=fused)
    accumulator = streaming.make_accumulator(ours, fused)
    for _ in range(3):
        loss, norm = streaming.hand_written(by_hand, optimizer, microbatches)
        result = streaming.streaming(accumulator, ours, microbatches)
        assert result.num_samples == NUM_SAMPLES
        assert float(result.loss) == pytest.approx(float(loss), rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        assert_same_parameters(ours, by_hand)


@pytest.mark.parametrize("name", streaming.PEERS)
def test_peers_do_the_same_where_all_counts_are_equal(name):
    package, make = streaming.PEERS[name]
    pytest.importorskip(package)
    microbatches = [(x, torch.arange(len(y)), len(y)) for x, y, _ in streaming.make_microbatches()]
    by_hand, theirs = make_model(), make_model()
    optimizer = torch.optim.AdamW(by_hand.parameters())
    loop = make(theirs, microbatches)
    for _ in range(3):
        loss, _ = streaming.hand_written(by_hand, optimizer, microbatches)
        assert float(loop()) == pytest.approx(float(loss), rel=1e-5)
        assert_same_parameters(theirs, by_hand)
