"""The example that every newcomer starts from: the plain loop agrees where it is right, and only there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import plain_loop  # noqa: E402


def test_equal_micro_batches_agree_with_the_plain_loop_to_1e_7():
    found = plain_loop.compare((4, 4, 4, 4))
    assert found["apart"] <= 1e-7
    assert found["plain"] <= 5e-6


def test_unequal_ones_make_the_plain_loop_wrong_and_train_step_not():
    found = plain_loop.compare((7, 5, 3, 1))
    assert found["plain"] > 0.05
    assert found["TrainStep"] <= 5e-6


@pytest.mark.parametrize("pieces", [(4, 4, 4, 4), (7, 5, 3, 1)])
@pytest.mark.parametrize(("precision", "bound"), [("fp16", 2e-3), ("bf16", 1e-2)])
def test_in_low_precision_up_to_its_rounding(pieces, precision, bound):
    assert plain_loop.compare(pieces, precision)["TrainStep"] <= bound


def test_it_runs_as_a_script():
    done = subprocess.run([sys.executable, str(EXAMPLES / "plain_loop.py")], capture_output=True, text=True, check=True)
    assert "7+5+3+1" in done.stdout
    assert done.stderr == ""
