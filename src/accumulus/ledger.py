"""What the host must know of past steps: the loss scale, the scheduler, the counters.

On an accelerator a step's outcome is still being computed when the step returns. It is copied to page-locked memory
without waiting, and read at the latest moment before it is needed: just before the next backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import ScaleCollapseError, StateError, UnsupportedError, WeightError
from accumulus.host import Flag
from accumulus.scaling import LossScale
from accumulus.types import Scheduler

__all__ = ["Ledger", "Outcome"]

COUNTERS = ("num_steps", "num_applied")


class Outcome:
    """Whether a step was finite and applied, on its way to the host.

    Args:
        all_finite: every gradient was finite.
        applied: parameters were updated.
    """

    __slots__ = ("_copied", "_flags", "is_known")

    def __init__(self, all_finite: Flag, applied: Flag) -> None:
        self._copied: torch.cuda.Event | None = None
        self._flags: Any = (all_finite, applied)
        tensors = [flag for flag in self._flags if isinstance(flag, Tensor)]
        self.is_known = not tensors
        if tensors and tensors[0].is_cuda:
            flags = torch.stack([host.as_tensor(flag, tensors[0], torch.bool) for flag in self._flags])
            self._flags = torch.empty(2, dtype=torch.bool, pin_memory=True).copy_(flags, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(flags.device))

    def read(self) -> tuple[bool, bool]:
        """Waits for the step and returns `(all_finite, applied)`."""
        if self._copied is not None:
            self._copied.synchronize()
        all_finite, applied = (host.wait_for(flag) for flag in self._flags)
        return all_finite, applied


class Ledger:
    """Settles each step's outcome: advances the scheduler after an applied one, and the loss scale after every one.

    Args:
        loss_scale: scale of the first step.
        scheduler: stepped once per applied step.

    Raises:
        UnsupportedError: the scheduler needs a measure to step.
    """

    def __init__(self, loss_scale: LossScale, scheduler: Scheduler | None = None) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                "ReduceLROnPlateau steps on a measure; call scheduler.step(measure) in your own loop"
            )
        self._loss_scale = loss_scale
        self._scheduler = scheduler
        self._pending: tuple[Outcome, Callable[[], str]] | None = None
        self.num_steps = 0
        self.num_applied = 0

    @property
    def loss_scale(self) -> LossScale:
        """The scale that the next step will use. Waits for the last step where it is still running."""
        self.settle()
        return self._loss_scale

    def post(self, outcome: Outcome, *, problem: Callable[[], str], cause: Callable[[], str]) -> None:
        """Takes note of a step that was just started.

        Args:
            outcome: on its way to the host.
            problem: says why a step that was finite was not applied; empty where that is in order.
            cause: finds out why gradients are non-finite, when training is about to stop.

        Raises:
            ScaleCollapseError, WeightError: as `settle`, where the outcome is already known.
        """
        self._pending = (outcome, problem)
        # After a skipped step the outcome is awaited, so that the batch is still there when the cause is asked for.
        if outcome.is_known or self._loss_scale.num_skips > 0:
            self.settle(cause)

    def settle(self, cause: Callable[[], str] | None = None) -> None:
        """Reads the last step's outcome, if that has not been done, and acts on it.

        Args:
            cause: finds out why gradients are non-finite.

        Raises:
            ScaleCollapseError: too many steps in a row were non-finite.
            WeightError: the last batch's weights, which lay on the device, gave no mean. Nothing was changed.
        """
        if self._pending is None:
            return
        (outcome, problem), self._pending = self._pending, None
        all_finite, applied = outcome.read()
        self.num_steps += 1
        if applied:
            self.num_applied += 1
            if self._scheduler is not None:
                self._scheduler.step()
        elif all_finite:
            if text := problem():
                raise WeightError(text)
            return
        try:
            self._loss_scale = self._loss_scale.next(all_finite or applied)
        except ScaleCollapseError as error:
            raise ScaleCollapseError(
                f"{error}; {cause() if cause else 'lower the learning rate or look for NaN'}"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """The scale and the counters, after settling."""
        self.settle()
        return {
            "loss_scale": self._loss_scale.state_dict(),
            **{name: getattr(self, name) for name in COUNTERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state.

        Args:
            state: from `state_dict`. `loss_scale` may be left out to start it anew, or be a GradScaler's.

        Raises:
            StateError: it is of another kind.
        """
        unknown = state.keys() - {"loss_scale", *COUNTERS}
        if unknown:
            raise StateError(f"unknown entries {sorted(unknown)} in the saved state of a step")
        self._pending = None
        if "loss_scale" in state:
            self._loss_scale = self._loss_scale.load_state_dict(state["loss_scale"])
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, 0)))
