"""The update: one norm, one finite test, one multiplier, one optimizer step. The only place that changes a parameter.

The gradient buffers hold the true gradient times `divisor`. Clipping and dividing make one multiplier, and the
optimizer's own kernel applies it where it can, so the gradients are read once for the norm and once by the optimizer.
"""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from accumulus import host
from accumulus.errors import OptimizerError, PrecisionError, UnsupportedError, WindowError
from accumulus.host import Flag, Scalar
from accumulus.types import HALF_DTYPES, Model, Optimizer

__all__ = ["Report", "Update"]

FOLDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused kernels take `grad_scale` and `found_inf`."""

BLAS_ELEMENTS = 2**20
"""Elements summed in float32 before float64 takes over: a sum of 40 million in one go is off by 5e-5, this by 1e-8."""

BLAS_DTYPES = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one update did: numbers and flags, or tensors without dimensions that may still be computing.

    Args:
        grad_norm: norm of the true gradient before clipping; None where it was not taken.
        clipped: bool: the gradient was clipped.
        all_finite: bool: every gradient was finite (True where that was not tested).
        applied: bool: the optimizer's step took effect.
        lr: learning rate of the first parameter group.
    """

    grad_norm: Scalar | None
    clipped: Flag
    all_finite: Flag
    applied: Flag
    lr: float


class Update:
    """Turns the gradient buffers of a window into one optimizer step.

    Args:
        model: whose gradients to drop after each step, those that the optimizer does not use included.
        optimizer: any optimizer that updates from `.grad`.
        max_grad_norm: clip the 2-norm of the true gradient to this.
        max_grad_value: clip each element of the true gradient to this, after `max_grad_norm`.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite.
        needs_loss_scale: the loss scale must learn whether the gradients were finite.

    Raises:
        OptimizerError: the optimizer holds none of the model's parameters, or a bound is not positive.
        PrecisionError: a parameter of the optimizer is 16-bit.
        UnsupportedError: the optimizer needs a closure, or a parameter is complex.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        skip_nonfinite: bool = True,
        needs_loss_scale: bool = False,
    ) -> None:
        for name, bound in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            if bound is not None and not bound > 0:
                raise OptimizerError(f"{name} must be above 0, or None for no clipping, not {bound}")
        _check_optimizer(model, optimizer)
        self.optimizer = optimizer
        self._model = model
        self._model_parameters = tuple(model.parameters())
        self._max_norm = max_grad_norm
        self._max_value = max_grad_value
        self._skips = skip_nonfinite or needs_loss_scale
        self._stepped: set[Parameter] = set()  # have been through the optimizer: their state exists

    def __call__(self, divisor: Scalar, is_valid: Flag) -> Report:
        """Applies the gradients that lie in the buffers, and drops them.

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
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        try:
            if is_valid is False:
                return Report(grad_norm=0.0, clipped=False, all_finite=True, applied=False, lr=lr)
            if not parameters:
                warnings.warn("no parameter of the optimizer took part in this window: nothing updated", stacklevel=3)
                return Report(grad_norm=0.0, clipped=False, all_finite=True, applied=False, lr=lr)
            return self._apply(parameters, divisor, is_valid, lr)
        finally:
            self.discard()

    def discard(self) -> None:
        """Drops all gradients, of parameters that the optimizer does not hold too."""
        for parameter in self._model_parameters:
            parameter.grad = None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def is_finite(self) -> bool:
        """Whether the gradients that lie in the buffers are all finite. Waits for the device."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return not parameters or host.wait_for(host.is_finite(norm_of(dense_values(parameters))))

    def check_no_gradients(self) -> None:
        """Refuses to begin a window on top of gradients from elsewhere.

        Raises:
            WindowError: a parameter already has a gradient.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    raise WindowError(self._describe_gradients())

    def _apply(self, parameters: list[Parameter], divisor: Scalar, is_valid: Flag, lr: float) -> Report:
        gradients = dense_values(parameters)
        norm, all_finite, clipped, multiplier = self._measure(gradients, divisor)
        applied = is_valid & all_finite if self._skips else is_valid
        if isinstance(applied, Tensor) and self._folds and self._stepped.issuperset(parameters):
            self._step(gradients, multiplier, applied)
        elif host.wait_for(applied):
            self._step(gradients, multiplier, None)
            self._stepped.update(parameters)
        return Report(grad_norm=norm, clipped=clipped, all_finite=all_finite, applied=applied, lr=lr)

    def _measure(self, gradients: list[Tensor], divisor: Scalar) -> tuple[Scalar | None, Flag, Flag, Scalar]:
        """The true norm, whether all is finite, whether clipping bites, and the one multiplier."""
        multiplier: Scalar = 1.0 / divisor
        if not self._skips and self._max_norm is None and self._max_value is None:
            return None, True, False, multiplier
        norm = norm_of(gradients) / divisor
        all_finite = host.is_finite(norm)
        clipped: Flag = False
        if self._max_norm is not None:
            clipped = norm > self._max_norm
            # The bound keeps a norm of zero from dividing.
            multiplier = self._max_norm / host.at_least(norm, self._max_norm) / divisor
        if self._max_value is not None:
            clipped = (norm_of(gradients, order=math.inf) * multiplier > self._max_value) | clipped
        return norm, all_finite, all_finite & clipped, multiplier

    @property
    def _folds(self) -> bool:
        """Whether the optimizer's kernel takes the multiplier and a flag that makes it skip."""
        return type(self.optimizer) in FOLDING and all(group.get("fused") for group in self.optimizer.param_groups)

    def _step(self, gradients: list[Tensor], multiplier: Scalar, applied: Tensor | None) -> None:
        """Steps the optimizer on the multiplied gradients; with `applied`, only if that is true on the device."""
        optimizer: Any = self.optimizer
        # grad_scale is float32 in the kernels: too coarse for float64, and value clipping needs the true gradient.
        if self._folds and self._max_value is None and all(g.dtype == torch.float32 for g in gradients):
            optimizer.grad_scale = host.as_tensor(1.0 / multiplier, gradients[0], torch.float32)
        else:
            multiply_(gradients, multiplier)
            self._clip_values_(gradients)
        if applied is not None:
            optimizer.found_inf = (~applied).float()
        try:
            optimizer.step()
        finally:
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)

    def _clip_values_(self, gradients: list[Tensor]) -> None:
        if self._max_value is not None:
            torch._foreach_clamp_min_(gradients, -self._max_value)
            torch._foreach_clamp_max_(gradients, self._max_value)

    def _describe_gradients(self) -> str:
        held = {p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}
        names = [name for name, p in self._model.named_parameters() if p in held]
        example = f" ({names[0]!r} among them)" if names else ""
        return (
            f"{len(held)} parameters{example} already have a gradient, from another backward pass, which would be "
            "added to this batch's; call optimizer.zero_grad() first, or return that loss as a term of this one"
        )


def norm_of(gradients: list[Tensor], order: float = 2.0) -> Scalar:
    """The norm of all gradients as one vector; NaN or infinite where they hold such a value, or where it overflows.

    Args:
        gradients: dense real tensors of any floating dtypes and devices, at least one.
        order: 2 or infinity.

    Returns:
        A number, or a tensor without dimensions on the first gradient's device.

    Cost:
        One read of the gradients. 16-bit ones are summed in float32, so their squares cannot overflow.
    """
    first = gradients[0].device
    if order == 2 and all(g.is_cpu and g.dtype in BLAS_DTYPES for g in gradients) and host.reads_freely(first):
        # BLAS reads a contiguous gradient 2.5 times as fast as the norm kernel does.
        return math.sqrt(sum(map(_square, gradients)))
    parts: list[Tensor] = []
    for group in by_kind(gradients):
        dtype = torch.float32 if group[0].dtype in HALF_DTYPES else None
        norms = torch._foreach_norm(group, order, dtype=dtype)
        parts.extend(norm.to(first, non_blocking=True) for norm in norms)
    if len({part.dtype for part in parts}) > 1:
        parts = [part.double() for part in parts]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(parts), order)
    return host.value_of(whole)


def _square(gradient: Tensor) -> float:
    total: Any = math.inf
    if gradient.is_contiguous():
        total = sum(_square_of_piece(piece) for piece in torch.split(gradient.view(-1), BLAS_ELEMENTS))
    if not math.isfinite(total):  # strided, or large values whose squares do not fit in float32, or truly not finite
        total = torch.linalg.vector_norm(gradient, dtype=torch.float64).tolist() ** 2
    return float(total)


def _square_of_piece(piece: Tensor) -> float:
    square: Any = torch.dot(piece, piece).tolist()
    return float(square)


def multiply_(gradients: list[Tensor], multiplier: Scalar) -> None:
    """Multiplies all gradients in place, each kind by the multiplier in its own dtype and on its own device."""
    if not isinstance(multiplier, Tensor) and multiplier == 1.0:
        return
    for group in by_kind(gradients):
        first = group[0]
        factor = multiplier.to(first.device, first.dtype) if isinstance(multiplier, Tensor) else multiplier
        torch._foreach_mul_(group, factor)


def by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device and dtype, as the foreach kernels want them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def dense_values(parameters: list[Parameter]) -> list[Tensor]:
    """The gradients as dense tensors; of a sparse one, its values, after duplicates of a row have been summed."""
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None  # the caller keeps only those that have one
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        values.append(gradient)
    return values


def _check_optimizer(model: Model, optimizer: Optimizer) -> None:
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise OptimizerError(
            f"optimizer must have param_groups and step(), as torch.optim's have, not {type(optimizer).__name__}"
        )
    # LBFGS among them: its closure has no default, as it cannot step without one.
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the loss itself, through a closure, several times a step; "
            "accumulus needs an optimizer that updates from .grad, such as AdamW or SGD"
        )
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
