"""What `TrainStep` and `Accumulator` share: the parts, put together, and what becomes of a window's totals."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accumulus import host
from accumulus.dist.sync import choose_sync
from accumulus.errors import OptimizerError, StateError
from accumulus.guard import Guard
from accumulus.ledger import Ledger, Outcome
from accumulus.precision import Precision
from accumulus.scaling import DynamicScale, LossScale, NoScale
from accumulus.together import as_one
from accumulus.types import Choice, Optimizer, Scheduler, StepResult, describe
from accumulus.update import Measured, Update
from accumulus.window import Totals, Window, WindowRules

__all__ = ["Engine"]


class Engine:
    """Model, optimizer and everything between a window's gradients and an applied update.

    Args:
        model: the module to train.
        optimizer: updates from `.grad`; or several, over different parameters.
        precision: by name, or a `Precision`.
        max_grad_norm: bound of the true gradient's 2-norm.
        max_grad_value: bound of its elements.
        scheduler: stepped once per applied step; or several.
        weigh: counts the weights of a whole batch.
        loss_scale: by default dynamic for fp16, none for the others.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite.
        on_empty: "raise" or "skip": what a window whose weights are all zero does.
        veto: from the true gradient norm to whether to skip the step.
        on_step: called with each step's result once it is known whether it was applied.
        device: where the model computes.

    Raises:
        AccumulusError: an argument that cannot work.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        precision: str | Precision,
        max_grad_norm: float | None,
        max_grad_value: float | None,
        scheduler: Scheduler | Sequence[Scheduler] | None,
        weigh: Callable[[Any], Any] | None,
        loss_scale: LossScale | None,
        skip_nonfinite: bool,
        on_empty: str,
        veto: Callable[[Any], Any] | None,
        on_step: Callable[[StepResult], object] | Sequence[Callable[[StepResult], object]],
        device: torch.device | str | None,
    ) -> None:
        if not callable(getattr(model, "named_modules", None)):
            raise OptimizerError(f"model must be a torch.nn.Module, not {describe(model)}")
        self.describe_choice: Callable[[], Choice | None] | None = None  # of whoever chooses micro-batch sizes
        self.model, self.sync = model, choose_sync(model)
        self.device = device_of(model, device)
        self.precision = Precision.parse(precision, self.device)
        self.precision.check(model)
        warn_of_mixing(model)
        default = DynamicScale() if self.precision.needs_loss_scale else NoScale()
        scale = default if loss_scale is None else loss_scale
        self.ledger = Ledger(scale, as_list(scheduler), as_list(on_step))
        whole: Optimizer = as_one(optimizer)
        guard = Guard(model, whole)
        self.update = Update(
            model,
            whole,
            guard,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            skip_nonfinite=skip_nonfinite,
            needs_loss_scale=not isinstance(scale, NoScale),
            veto=veto,
        )
        self.window = WindowRules(
            self.precision.region(self.device),
            autocast_device=self.device.type if self.precision.compute else None,
            scale=self.ledger.scale_now,  # bound, not a lambda: a deep copy of the step must read its own
            guard=guard,
            before_open=self.ledger.settle_for_listeners,
            weigh=weigh,
            on_empty=on_empty,
        )

    @property
    def loss_scale(self) -> LossScale:
        """The scale that the next step will use; `float(step.loss_scale)` is its value. Waits for the last step."""
        return self.ledger.loss_scale

    def settle(self) -> None:
        """Waits for the last step and acts on its outcome: advances the scheduler and the loss scale.

        On a CPU this has happened when a step returns. On an accelerator it happens before the next backward pass; call
        this before you read or save the scheduler or the optimizer's learning rates.

        Raises:
            ScaleCollapseError, WeightError: as a step.
        """
        self.ledger.settle()

    def state_dict(self) -> dict[str, Any]:
        """What a step carries on to the next: loss scale, reference weight and counters. Waits for the last step.

        Returns:
            Plain values, which `torch.save` and JSON both take. Model, optimizer and scheduler have their own.
        """
        reference = self.window.reference
        return {**self.ledger.state_dict(), "reference": None if reference is None else float(reference)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state.

        Args:
            state: from `state_dict`; without `loss_scale` the scale starts anew. Or a `torch.amp.GradScaler`'s, for
                its scale.

        Raises:
            StateError: it is not such a state, or of another kind of loss scale.
        """
        reference = state.get("reference")
        if reference is not None and not 0 < float(reference) < math.inf:
            raise StateError(f"the saved reference weight must be above 0 and finite, not {reference}")
        self.ledger.load_state_dict({name: value for name, value in state.items() if name != "reference"})
        self.window.reference = reference

    def _finish(
        self, window: Window, totals: Totals, *, num_samples: int, started: float, cause: Callable[[], str] | None
    ) -> StepResult:
        """Applies a window's gradients, and posts what came of it."""
        try:
            measured = self.update.measure(totals.divisor, totals.is_valid)
            # Before the parameters change: until here all can be run again, and afterwards nothing needs memory.
            choice = None if self.describe_choice is None else self.describe_choice()
            result = make_result(totals, measured, window.scale, num_samples=num_samples, choice=choice)
            outcome = Outcome(measured.all_finite, measured.applied)
            self.update.apply(measured)  # the only change of a parameter
        finally:
            self.window.guard.discard()
        object.__setattr__(result, "seconds", time.perf_counter() - started)  # frozen for those who get it
        self.ledger.post(
            outcome,
            result,
            problem=window.terms.explain if totals.is_valid is not True else str,
            cause=cause,
        )
        return result


def as_list(value: Any) -> list[Any]:
    """None as no item, a list or tuple as its items, anything else as one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def make_result(
    totals: Totals, measured: Measured, scale: float, *, num_samples: int, choice: Choice | None
) -> StepResult:
    """The result of a step, from what its window added up to and what its update is about to do."""
    like = totals.like
    return StepResult(
        loss=host.as_tensor(totals.loss, like, like.dtype),
        grad_norm=None if measured.grad_norm is None else host.as_tensor(measured.grad_norm, like, like.dtype),
        clipped=host.as_flag(measured.clipped, like),
        all_finite=host.as_flag(measured.all_finite, like),
        applied=host.as_flag(measured.applied, like),
        loss_scale=scale,
        weight=totals.weight,
        num_microbatches=totals.num_microbatches,
        num_samples=num_samples,
        metrics={name: host.as_tensor(value, like) for name, value in totals.metrics.items()},
        lr=measured.lr,
        seconds=0.0,
        choice=choice,
    )


def warn_of_mixing(model: Any) -> None:
    """Warns of modules whose output for one sample depends on the others that go through with it."""
    mixing = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if mixing:
        warnings.warn(
            f"{len(mixing)} BatchNorm modules ({mixing[0]!r} among them) normalise over the samples that go through "
            "together, so results depend on how a batch is cut, whoever accumulates; use GroupNorm, or freeze them "
            "with .eval() before making the step",
            stacklevel=4,
        )


def device_of(model: Any, device: torch.device | str | None) -> torch.device:
    """The device that was named, or else the first parameter's."""
    if device is not None:
        return torch.device(device)
    first = next(iter(model.parameters()), None)
    if first is None:
        raise OptimizerError(f"the model ({type(model).__name__}) has no parameters to train")
    found: torch.device = first.device
    return found
