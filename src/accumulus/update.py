"""The update: one norm, one finite test, one multiplier, one optimizer step. The only place that changes a parameter.

The gradient buffers hold the true gradient times `divisor`. Clipping and dividing make one multiplier, and the
optimizer's own kernel applies it where it can, so the gradients are read once for the norm and once by the optimizer.

It comes in two halves: `measure` changes nothing, so that whatever fails in it, or before the second half, can be run
again; `apply` steps the optimizer.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from accumulus import host
from accumulus.errors import OptimizerError, PrecisionError, UnsupportedError
from accumulus.guard import Guard, StepRefusal
from accumulus.host import Flag, Scalar
from accumulus.norm import multiply_, norm_of
from accumulus.together import members
from accumulus.types import HALF_DTYPES, Model, Optimizer, describe

__all__ = ["Measured", "Update", "check_optimizer"]

FOLDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused kernels take `grad_scale` and `found_inf`."""

Protect = Callable[[Sequence[Parameter]], AbstractContextManager[object]]
"""Makes the context that the optimizer steps in, from the parameters that it is about to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one update is about to do: numbers and flags, or tensors without dimensions that may still be computing.

    Args:
        grad_norm: norm of the true gradient before clipping; None where it was not taken.
        clipped: bool: the gradient is to be clipped.
        all_finite: bool: every gradient is finite (True where that was not tested).
        applied: bool: the optimizer's step is to take effect.
        lr: learning rate of the first parameter group.
        parameters: those that have a gradient.
        gradients: their dense values.
        multiplier: what the gradients are to be multiplied by.
    """

    grad_norm: Scalar | None = 0.0
    clipped: Flag = False
    all_finite: Flag = True
    applied: Flag = False
    lr: Scalar
    parameters: Sequence[Parameter] = ()
    gradients: Sequence[Tensor] = ()
    multiplier: Scalar = 1.0


class Update:
    """Turns the gradient buffers of a window into one optimizer step.

    Args:
        model: the module to train.
        optimizer: any optimizer that updates from `.grad`.
        guard: drops the gradients after each step.
        max_grad_norm: clip the 2-norm of the true gradient to this.
        max_grad_value: clip each element of the true gradient to this, after `max_grad_norm`.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite.
        needs_loss_scale: the loss scale must learn whether the gradients were finite.
        veto: from the true norm to whether to leave everything as it is.

    Raises:
        OptimizerError: the optimizer holds none of the model's parameters, or a bound is not positive.
        PrecisionError: a parameter of the optimizer is 16-bit.
        UnsupportedError: the optimizer needs a closure, or a parameter is complex.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        guard: Guard,
        *,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        skip_nonfinite: bool = True,
        needs_loss_scale: bool = False,
        veto: Callable[[Any], Any] | None = None,
    ) -> None:
        for name, bound in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
                raise OptimizerError(f"{name} must be above 0, or None for no clipping, not {describe(bound)}")
        check_optimizer(model, optimizer)
        self.optimizer = optimizer
        self._model = model
        self._guard = guard
        self.max_grad_norm = max_grad_norm
        self._max_value = max_grad_value
        if veto is not None and not callable(veto):
            raise OptimizerError(f"veto must be a function of the gradient norm, not {describe(veto)}")
        self._skips = skip_nonfinite or needs_loss_scale
        self._veto = veto
        self._stepped: set[Parameter] = set()
        self._is_stateful = False
        self.protect: Protect = _unprotected

    def __call__(self, divisor: Scalar, is_valid: Flag) -> Measured:
        """Both halves: applies the gradients that lie in the buffers, and drops them.

        Args:
            divisor: what the buffers must be divided by.
            is_valid: whether there is an update to make; a tensor where the host does not know.

        Returns:
            What was done.

        Cost:
            One read of the gradients for the norm, and the optimizer's own passes. The host waits for the device
            only in a parameter's first step (its optimizer state must not be made for a skipped step), and with
            optimizers that cannot skip on the device.
        """
        try:
            measured = self.measure(divisor, is_valid)
            self.apply(measured)
            return measured
        finally:
            self._guard.discard()

    def measure(self, divisor: Scalar, is_valid: Flag) -> Measured:
        """The first half: norm, finite test and multiplier. Changes nothing.

        Args:
            divisor: what the buffers must be divided by.
            is_valid: whether there is an update to make.

        Returns:
            What `apply` takes.
        """
        parameters = self._participants()
        lr = self._learning_rate()
        if is_valid is False:
            return Measured(lr=lr)
        if not parameters:
            self._note_no_gradients()
            return Measured(lr=lr)
        gradients = dense_values(parameters)
        norm, all_finite, clipped, multiplier = self._measure(gradients, divisor)
        applied = is_valid & all_finite if self._skips else is_valid
        if self._veto is not None:
            applied = applied & host.negate(self._ask(norm))
        return Measured(
            grad_norm=norm,
            clipped=clipped,
            all_finite=all_finite,
            applied=applied,
            lr=lr,
            parameters=parameters,
            gradients=gradients,
            multiplier=multiplier,
        )

    def apply(self, measured: Measured) -> None:
        """The second half: steps the optimizer, unless that is to be skipped. The gradients stay, multiplied.

        Args:
            measured: what was just measured.
        """
        applied, parameters = measured.applied, measured.parameters
        if isinstance(applied, Tensor) and self._folds and self.has_state(parameters):
            self._step(measured, applied)
        elif host.wait_for(applied):
            self._step(measured, None)
            self._stepped.update(parameters)
            self._is_stateful = bool(self.optimizer.state)

    def is_finite(self) -> bool:
        """Whether the gradients that lie in the buffers are all finite. Waits for the device."""
        parameters = self._participants()
        return not parameters or host.wait_for(host.is_finite(norm_of(dense_values(parameters))))

    def _participants(self) -> list[Parameter]:
        """The parameters that have a gradient; once each, even where they stand in the optimizer twice."""
        held = (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        return list(dict.fromkeys(held))

    def _learning_rate(self) -> Scalar:
        rates = [group.get("lr") for group in self.optimizer.param_groups[:1]]
        if not rates or rates[0] is None:  # some optimizers choose it themselves
            return math.nan
        return host.value_of(rates[0]) if isinstance(rates[0], Tensor) else float(rates[0])

    def _note_no_gradients(self) -> None:
        _check_parameters(self._model, self.optimizer)
        warnings.warn("no parameter of the optimizer took part in this window: nothing updated", stacklevel=4)

    def _ask(self, norm: Scalar | None) -> Any:
        assert self._veto is not None
        assert norm is not None  # a veto needs it, so it was taken
        answer = self._veto(norm)
        if isinstance(answer, Tensor) and answer.numel() != 1:
            raise OptimizerError(f"veto must answer with one flag, not {describe(answer)}")
        return answer

    def _measure(self, gradients: list[Tensor], divisor: Scalar) -> tuple[Scalar | None, Flag, Flag, Scalar]:
        """The true norm, whether all is finite, whether clipping bites, and the one multiplier."""
        multiplier: Scalar = 1.0 / divisor
        if not (self._skips or self.max_grad_norm or self._max_value or self._veto):
            return None, True, False, multiplier
        norm = norm_of(gradients) / divisor
        all_finite = host.is_finite(norm)
        clipped: Flag = False
        if self.max_grad_norm is not None:
            clipped = norm > self.max_grad_norm
            # In this form neither a norm of zero nor a bound of infinity ("only measure") makes a NaN.
            multiplier = 1.0 / (divisor * host.at_least(norm / self.max_grad_norm, 1.0))
        if self._max_value is not None:
            clipped = (norm_of(gradients, order=math.inf) * multiplier > self._max_value) | clipped
        return norm, all_finite, all_finite & clipped, multiplier

    def has_state(self, parameters: Sequence[Parameter]) -> bool:
        """Whether a step would make no new optimizer state: a skipped one must leave none behind."""
        state = self.optimizer.state
        return self._stepped.issuperset(parameters) and not (
            self._is_stateful and any(not state.get(p) for p in parameters)
        )

    @property
    def _folds(self) -> bool:
        """Whether the optimizer's kernel takes the multiplier and a flag that makes it skip.

        Hooks on its step would see multiplied gradients too late and skipped steps as real ones, so with them it is
        driven as any other optimizer.
        """
        return all(_folds(optimizer) for optimizer in members(self.optimizer))

    def _step(self, measured: Measured, applied: Tensor | None) -> None:
        """Steps the optimizer on the multiplied gradients; with `applied`, only if that is true on the device."""
        flags: dict[str, Tensor] = {}
        gradients, multiplier = list(measured.gradients), measured.multiplier
        # grad_scale is float32 in the kernels: too coarse for float64, and value clipping needs the true gradient.
        if self._folds and self._max_value is None and all(g.dtype == torch.float32 for g in gradients):
            flags["grad_scale"] = host.as_tensor(1.0 / multiplier, gradients[0], torch.float32)
        else:
            multiply_(gradients, multiplier)
            self._clip_values_(gradients)
        if applied is not None:
            flags["found_inf"] = (~applied).float()
        optimizers = members(self.optimizer) if flags else ()
        for optimizer in optimizers:
            optimizer.__dict__.update(flags)
        try:
            with self.protect(measured.parameters):
                self.optimizer.step()
        finally:
            for optimizer in optimizers:
                for name in flags:
                    optimizer.__dict__.pop(name, None)

    def _clip_values_(self, gradients: list[Tensor]) -> None:
        if self._max_value is not None:
            torch._foreach_clamp_min_(gradients, -self._max_value)
            torch._foreach_clamp_max_(gradients, self._max_value)


_NOTHING: AbstractContextManager[object] = nullcontext()


def _unprotected(parameters: Sequence[Parameter]) -> AbstractContextManager[object]:
    return _NOTHING


def _folds(optimizer: Any) -> bool:
    if type(optimizer) not in FOLDING or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    before = optimizer.__dict__.get("_optimizer_step_pre_hooks", {}).values()
    after = optimizer.__dict__.get("_optimizer_step_post_hooks")
    everyones = getattr(sys.modules.get("torch.optim.optimizer"), "_global_optimizer_post_hooks", None)
    return not (after or everyones or any(type(hook) is not StepRefusal for hook in before))


def dense_values(parameters: list[Parameter]) -> list[Tensor]:
    """The gradients as dense tensors; of a sparse one, its values, after duplicates of a row have been summed."""
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None  # the caller keeps only those that have one
        if gradient.dtype in HALF_DTYPES:  # the model was cast after the step was made
            raise PrecisionError(f"a gradient is {gradient.dtype}, whose sums lose gradient; use model.float()")
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        values.append(gradient)
    return values


def check_optimizer(model: Model, optimizer: Optimizer) -> None:
    """Refuses an optimizer that cannot train the model from gradients that are already there.

    Raises:
        OptimizerError, PrecisionError, UnsupportedError: as `Update`.
    """
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise OptimizerError(
            f"optimizer must have param_groups and step(), as torch.optim's have, not {type(optimizer).__name__}"
        )
    for member in members(optimizer):
        # LBFGS among them: its closure has no default, as it cannot step without one.
        closure = inspect.signature(member.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        raise UnsupportedError(
            f"{type(member).__name__} evaluates the loss itself, through a closure, several times a step; "
            "accumulus needs an optimizer that updates from .grad, such as AdamW or SGD"
        )
    _check_parameters(model, optimizer)


def _check_parameters(model: Model, optimizer: Optimizer) -> None:
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if own.isdisjoint(model.parameters()):
        raise OptimizerError("the optimizer holds none of the model's parameters; make it from model.parameters()")
    for parameter in own:
        if parameter.is_complex():
            raise UnsupportedError("complex parameters are not supported; use pairs of reals")
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES:
            raise PrecisionError(
                f"the optimizer holds a {parameter.dtype} parameter, whose sums lose gradient; use model.float()"
            )
