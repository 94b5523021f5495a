"""Several optimizers of one model, stepped as one: one norm, one scale, one decision to skip."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from accumulus.errors import OptimizerError
from accumulus.types import Optimizer

__all__ = ["Together", "as_one"]


class Together:
    """Optimizers over different parameters, behind the face of one.

    Args:
        optimizers: at least one; each keeps its own groups, state and step.

    Raises:
        OptimizerError: there is none, or two hold the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise OptimizerError("an empty list of optimizers cannot train; give at least one")
        self.optimizers = tuple(optimizers)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(set(parameters)) != len(parameters):
            raise OptimizerError("two optimizers hold the same parameter, which both would step; give each its own")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:
        """The state of all; to look at, not to change."""
        return ChainMap(*[optimizer.state for optimizer in self.optimizers])

    def step(self) -> None:
        """Steps each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def register_step_pre_hook(self, hook: Any) -> None:
        """Registers a hook with each that takes one."""
        for optimizer in self.optimizers:
            register = getattr(optimizer, "register_step_pre_hook", None)
            if register is not None:
                register(hook)


def as_one(optimizer: Any) -> Any:
    """A list or tuple of optimizers as one; anything else as it is."""
    return Together(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer
