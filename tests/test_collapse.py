"""Why gradients are non-finite, by trying; and that trying leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accumulus.collapse import find_cause, untouched


@pytest.mark.parametrize(
    ("finite_from", "loss_finite", "says"),
    [
        (2.0**20, True, "run again"),
        (2.0**12, True, "only at this scale: at 4096 "),
        (2.0**-10, True, "only at this scale"),
        (0.0, True, "its gradient is not"),
        (0.0, False, "the loss itself"),
    ],
)
def test_the_cause_is_found_by_trying(finite_from, loss_finite, says):
    assert says in find_cause(lambda scale: (loss_finite, scale <= finite_from), 2.0**16)


def test_trying_leaves_buffers_and_random_states_alone():
    model = nn.BatchNorm1d(3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with untouched(model, torch.device("cpu")):
        model(torch.randn(4, 3))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())
