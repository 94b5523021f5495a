"""Random states: taken and put back, so that a run that was stopped draws what it would have drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["States", "random_state", "set_random_state"]


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


@dataclass(frozen=True, slots=True)
class States:
    """All random states of the process, to be put back: torch's on the CPU and a device, Python's, numpy's."""

    device: torch.device
    torch_state: dict[str, Any]
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls, device: torch.device) -> States:
        """What they are.

        Args:
            device: whose state to take, with the CPU's.
        """
        return cls(device, random_state(device), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Puts them back."""
        set_random_state(self.torch_state, self.device)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
