"""Random states: taken and put back, so that a run that was stopped draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device) -> dict[str, Any]:
    """The random state of the CPU and of the device.

    Args:
        device: where the model computes.

    Returns:
        Tensors, by kind of device.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what `random_state` gave, as far as this machine has it.

    Args:
        state: from `random_state`.
        device: where the model computes.
    """
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
