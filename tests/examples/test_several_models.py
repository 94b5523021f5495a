"""The example with several models: each player keeps a scale of its own, and one optimizer serves two models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import several_models  # noqa: E402


def test_an_overflow_of_one_player_is_not_the_other_ones():
    found = several_models.play(num_rounds=4)
    assert (found["discriminator scale"], found["generator scale"]) == (2.0**9, 2.0**10)
    assert (found["discriminator skipped"], found["generator skipped"]) == (1, 0)


@pytest.mark.parametrize("learner", ["generator", "discriminator"])
def test_only_the_one_that_learns_changes_and_no_gradient_is_left(learner):
    game = several_models.Game()
    players = {"generator": game.generator, "discriminator": game.discriminator}
    before = {name: [p.detach().clone() for p in player.model.parameters()] for name, player in players.items()}
    assert game.learn(players[learner], several_models.real_points(128)).applied
    for name, player in players.items():
        after = list(player.model.parameters())
        changed = [not torch.equal(a, b) for a, b in zip(after, before[name], strict=True)]
        assert changed == [name == learner] * len(after)
        assert all(p.grad is None and p.requires_grad for p in after)


@pytest.mark.parametrize("pieces", [(128,), (32, 32, 32, 32), (50, 13, 64, 1)])
def test_one_optimizer_for_two_models_is_whole_batch_training(pieces):
    found = several_models.learn_together(pieces)
    assert found["apart"] <= 1e-4
    assert found["last"] < 0.5 * found["first"]


def test_it_runs_as_a_script():
    script = EXAMPLES / "several_models.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "discriminator" in done.stdout
    assert done.stderr == ""
