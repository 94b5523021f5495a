"""Several optimizers of one model, stepped as one: one norm, one scale, one decision to skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accumulus.errors import OptimizerError
from accumulus.types import Optimizer, describe

__all__ = ["Together", "as_one", "members"]


class States:
    """The states of several optimizers, to look at. A plain lookup would add empty entries to theirs."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._states = [optimizer.state for optimizer in optimizers]

    def __bool__(self) -> bool:
        return any(self._states)

    def get(self, parameter: Any) -> Any:
        """A parameter's state; None where it has none."""
        return next((state[parameter] for state in self._states if parameter in state), None)


class Together:
    """Optimizers over different parameters, behind the face of one.

    Args:
        optimizers: at least one; each keeps its own groups, state and step.

    Raises:
        OptimizerError: there is none, one is no optimizer, or two hold the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise OptimizerError("an empty list of optimizers cannot train; give at least one")
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
                raise OptimizerError(f"optimizers must have param_groups and step(), not {describe(optimizer)}")
        self.optimizers = tuple(optimizers)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(set(parameters)) != len(parameters):
            raise OptimizerError("two optimizers hold the same parameter, which both would step; give each its own")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> States:
        """The states of all."""
        return States(self.optimizers)

    def step(self) -> None:
        """Steps each."""
        for optimizer in self.optimizers:
            optimizer.step()


def as_one(optimizer: Any) -> Any:
    """A list or tuple of optimizers as one; anything else as it is."""
    return Together(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer


def members(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that really step."""
    return optimizer.optimizers if isinstance(optimizer, Together) else (optimizer,)
