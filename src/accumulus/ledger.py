"""What the host must know of past steps: the loss scale, the scheduler, the counters.

On an accelerator a step's outcome is still being computed when the step returns. It is copied to page-locked memory
without waiting, and read at the latest moment before it is needed: just before the next backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import (
    OptimizerError,
    PrecisionError,
    ScaleCollapseError,
    StateError,
    WeightError,
)
from accumulus.host import Flag
from accumulus.scaling import LossScale
from accumulus.types import Scheduler, StepResult, describe

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
        schedulers: stepped once per applied step; one that steps on a measure, as ReduceLROnPlateau, on the loss.
        on_step: called with each step's result.

    Raises:
        PrecisionError, OptimizerError: `loss_scale` is no scale, or `scheduler` no scheduler.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        schedulers: Sequence[Scheduler] = (),
        on_step: Sequence[Callable[[StepResult], object]] = (),
    ) -> None:
        if not callable(getattr(loss_scale, "next", None)):
            raise PrecisionError(f"loss_scale must be a scale, such as StaticScale(1024.0), not {describe(loss_scale)}")
        for scheduler in schedulers:
            if not callable(getattr(scheduler, "step", None)):
                raise OptimizerError(f"scheduler must have a step method, not {describe(scheduler)}")
        for function in on_step:
            if not callable(function):
                raise OptimizerError(f"on_step must be a function of the StepResult, not {describe(function)}")
        self._loss_scale = loss_scale
        self._schedulers = [(scheduler, _needs_argument(scheduler.step)) for scheduler in schedulers]
        self._on_step = tuple(on_step)
        self._pending: tuple[Outcome, StepResult, Callable[[], str]] | None = None
        self.num_steps = 0
        self.num_applied = 0
        self.num_posted = 0  # steps that were started in this process; what fails from then on is no part of the step

    @property
    def loss_scale(self) -> LossScale:
        """The scale that the next step will use. Waits for the last step where it is still running."""
        self.settle()
        return self._loss_scale

    def scale_now(self) -> float:
        """The next step's scale as a number. Waits for the last step where it is still running."""
        return float(self.loss_scale)

    def settle_for_listeners(self) -> None:
        """Before a window: functions that hear of a step may change the model, so they must before its first pass."""
        if self._on_step:
            self.settle()

    def post(
        self,
        outcome: Outcome,
        result: StepResult,
        *,
        problem: Callable[[], str],
        cause: Callable[[], str] | None,
    ) -> None:
        """Takes note of a step that was just started.

        Args:
            outcome: on its way to the host.
            result: what the caller gets.
            problem: says why a step that was finite was not applied; empty where that is in order.
            cause: finds out why gradients are non-finite, when training is about to stop.

        Raises:
            ScaleCollapseError, WeightError: as `settle`, where the outcome is already known.
        """
        self.num_posted += 1
        try:
            self.settle()  # a window without any weight asked for no scale, so the one before it may still be open
        finally:
            self._pending = (outcome, result, problem)
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
        (outcome, result, problem), self._pending = self._pending, None
        all_finite, applied = outcome.read()
        self.num_steps += 1
        if all_finite and not applied:
            if text := problem():
                raise WeightError(text)
        else:
            self._advance_scale(all_finite or applied, cause)
        if applied:
            self.num_applied += 1
            self._advance_schedulers(result)  # after the scale: it is the user's, and may raise
        for function in self._on_step:
            function(result)

    def _advance_scale(self, all_finite: bool, cause: Callable[[], str] | None) -> None:
        try:
            self._loss_scale = self._loss_scale.next(all_finite)
        except ScaleCollapseError as error:
            raise ScaleCollapseError(f"{error}; {_explain(cause)}") from None

    def _advance_schedulers(self, result: StepResult) -> None:
        for scheduler, needs_loss in self._schedulers:
            step: Callable[..., Any] = scheduler.step
            step(float(result.loss)) if needs_loss else step()

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
        if "_growth_tracker" in state:  # a whole torch.amp.GradScaler's
            state = {"loss_scale": state}
        unknown = state.keys() - {"loss_scale", *COUNTERS}
        if unknown:
            raise StateError(f"unknown entries {sorted(unknown)} in the saved state of a step")
        try:  # everything first, so that a bad state changes nothing
            saved = state.get("loss_scale")
            loss_scale = self._loss_scale if saved is None else self._loss_scale.load_state_dict(saved)
            counters = {name: int(state.get(name, 0)) for name in COUNTERS}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StateError(f"not the saved state of a step: {error}") from error
        self._pending = None
        self._loss_scale = loss_scale
        for name, value in counters.items():
            setattr(self, name, value)


def _needs_argument(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind not in optional for p in parameters)


def _explain(cause: Callable[[], str] | None) -> str:
    if cause is None:
        return "lower the learning rate or look for NaN"
    try:
        return cause()
    except Exception as error:  # it runs the user's code again, and must not hide what is being raised
        return f"the batch could not be run again to find the cause ({type(error).__name__}: {error})"
