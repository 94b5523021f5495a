"""What is diagnosed: a model, how it learns and from what. Copies of it are run, so that the real one never is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accumulus import pytree
from accumulus.engine import device_of
from accumulus.errors import LossError, OptimizerError, PrecisionError, UnsupportedError
from accumulus.guard import Guard
from accumulus.microbatch import Microbatches, Split, choose_split
from accumulus.precision import Precision
from accumulus.rng import States
from accumulus.scaling import DynamicScale, NoScale
from accumulus.step import TrainStep
from accumulus.together import as_one, members
from accumulus.types import HALF_DTYPES, LossFn, describe
from accumulus.update import Update
from accumulus.window import Totals, WindowRules

__all__ = ["Subject", "all_as_before", "make_subject"]

Look = Callable[[Any], object]


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model and everything that a window of it needs.

    Args:
        model: the module.
        optimizer: its optimizer; None where updates are not looked at.
        loss_fn: of model and micro-batch.
        precision: to compute in.
        split: how a batch is cut.
        device: where the model lies.
        collate: makes a micro-batch of samples.
        weigh: counts the weights of a whole batch.
        scale: the loss scale now.
        adapts: the loss scale adapts itself.
        max_grad_norm: clips the update.
        original_dtypes: of the parameters, by name, before any copy was widened.
    """

    model: nn.Module
    optimizer: Any
    loss_fn: LossFn
    precision: Precision
    split: Split
    device: torch.device
    collate: Callable[[Any], Any] | None
    weigh: Callable[[Any], Any] | None
    scale: float
    adapts: bool
    max_grad_norm: float | None
    original_dtypes: dict[str, torch.dtype]

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype that it computes in: autocast's, or else its parameters'."""
        if self.precision.compute in HALF_DTYPES:
            return self.precision.compute
        return next((dtype for dtype in self.original_dtypes.values() if dtype in HALF_DTYPES), None)

    def copied(self) -> Subject:
        """The same on deep copies of model and optimizer, without gradients.

        Raises:
            UnsupportedError: they cannot be copied.
        """
        try:
            model, optimizer = copy.deepcopy((self.model, self.optimizer))
        except Exception as error:  # whatever the user's classes raise
            raise UnsupportedError(
                f"the model cannot be copied ({type(error).__name__}: {error}), and is not run itself: it must stay as "
                "it is; make it support copy.deepcopy, by keeping no computed tensors as attributes"
            ) from error
        for parameter in model.parameters():
            parameter.grad = None
        return replace(self, model=model, optimizer=optimizer)

    @torch.no_grad()
    def widened(self) -> Subject:
        """A copy in float32, without autocast: what the numbers are before 16 bits round them."""
        wide = self.copied()
        for tensor in (*wide.model.parameters(), *wide.model.buffers()):
            if tensor.dtype in HALF_DTYPES:
                tensor.data = tensor.data.float()
        for member in () if wide.optimizer is None else members(wide.optimizer):
            for state in member.state.values():
                state.update({name: widen(value) for name, value in state.items()})
        loss_fn, is_narrow = self.loss_fn, any(dtype in HALF_DTYPES for dtype in self.original_dtypes.values())

        def widened_loss(model: Any, microbatch: Any) -> Any:
            return loss_fn(model, pytree.map_tensors(widen, microbatch))

        return replace(
            wide, precision=Precision.parse("fp32"), loss_fn=widened_loss if is_narrow else loss_fn, scale=1.0
        )

    def run(self, batch: Any, *, scale: float, look: Look = lambda _: None) -> Totals:
        """Runs a batch forward and backward, and leaves its gradients.

        Args:
            batch: as for a step.
            scale: the loss scale.
            look: sees what each loss function returned, before its backward pass.

        Returns:
            The window's totals.
        """
        parts = Microbatches(batch, self.split, self.device, collate=self.collate)
        optimizer = self.optimizer if self.optimizer is not None else torch.optim.SGD(self.model.parameters(), lr=0.0)
        rules = WindowRules(
            self.precision.region(self.device),
            autocast_device=self.device.type if self.precision.compute else None,
            scale=lambda: scale,
            guard=Guard(self.model, optimizer),
            before_open=lambda: None,
            weigh=self.weigh,
            on_empty="skip",
        )
        with rules.open(parts.sizes, batch, order=parts.order) as window:
            for part, _ in parts:
                returned = self.loss_fn(self.model, part)
                look(returned)
                window.backward(returned)
            totals = window.totals()
        if not self.gradients():
            raise LossError(
                "no gradient reached the model that loss_fn was given; use its first argument, not a model from outside"
            )
        return totals

    def learn(self, batch: Any) -> None:
        """One step of a copy, without 16-bit rounding; a step that is not finite is left out."""
        if self.optimizer is None:
            self.run(batch, scale=1.0)
            self.drop_gradients()
            return
        update = Update(self.model, self.optimizer, Guard(self.model, self.optimizer), max_grad_norm=self.max_grad_norm)
        totals = self.run(batch, scale=1.0)
        update(totals.divisor, totals.is_valid)

    def gradients(self) -> list[Tensor]:
        """Those that the last window left."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Forgets them."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def is_finite(self, batch: Any, scale: float) -> bool:
        """Whether a batch's loss and gradients are finite at a loss scale."""
        losses: list[bool] = []
        totals = self.run(batch, scale=scale)
        losses.append(bool(torch.as_tensor(totals.loss).isfinite()))
        finite = losses[0] and all(bool(torch.isfinite(values_of(gradient)).all()) for gradient in self.gradients())
        self.drop_gradients()
        return finite


def make_subject(
    step_or_model: Any,
    *,
    loss_fn: LossFn | None,
    optimizer: Any,
    precision: str | Precision | None,
    microbatch: Any,
    collate: Callable[[Any], Any] | None,
) -> Subject:
    """What is diagnosed, from a step or from a model with its loss.

    Raises:
        LossError, OptimizerError, PrecisionError: arguments that cannot work, or that the step already has.
    """
    if isinstance(step_or_model, TrainStep):
        subject = from_step(step_or_model, precision, (loss_fn, optimizer, collate))
        return subject if microbatch is None else replace(subject, split=choose_split(microbatch))
    model = step_or_model
    if not isinstance(model, nn.Module):
        raise OptimizerError(f"give a TrainStep, or a torch.nn.Module with loss_fn=, not {describe(model)}")
    if not callable(loss_fn):
        raise LossError(f"a model needs loss_fn=, a function of model and micro-batch, not {describe(loss_fn)}")
    device = device_of(model, None)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    is_narrow = any(dtype in HALF_DTYPES for dtype in dtypes.values())
    if is_narrow and precision not in (None, "fp32"):
        held = next(dtype for dtype in dtypes.values() if dtype in HALF_DTYPES)
        raise PrecisionError(
            f"the model's parameters are {held}, so it computes in that; leave "
            f" precision={str(precision)!r} out, or use model.float()"
        )
    chosen = Precision.parse(precision or ("fp32" if is_narrow else "fp16"), device)
    return Subject(
        model=model,
        optimizer=as_one(optimizer),
        loss_fn=loss_fn,
        precision=chosen,
        split=choose_split(microbatch if microbatch is not None else "auto"),
        device=device,
        collate=collate,
        weigh=None,
        scale=float(DynamicScale()) if chosen.needs_loss_scale else 1.0,
        adapts=chosen.needs_loss_scale,
        max_grad_norm=None,
        original_dtypes=dtypes,
    )


def from_step(step: TrainStep, precision: str | Precision | None, others: Sequence[Any]) -> Subject:
    """What a step trains, in its own precision or in another."""
    if any(value is not None for value in others):
        raise LossError("a TrainStep has its own loss_fn, optimizer and collate; leave them out")
    chosen = step.precision if precision is None else Precision.parse(precision, step.device)
    scale = step.loss_scale
    if chosen.needs_loss_scale and isinstance(scale, NoScale) and chosen != step.precision:
        scale = DynamicScale()
    return Subject(
        model=step.model,
        optimizer=step.update.optimizer,
        loss_fn=step.loss_fn,
        precision=chosen,
        split=step.microbatch,
        device=step.device,
        collate=step.collate,
        weigh=step.window.weigh,
        scale=float(scale) if chosen.compute == torch.float16 else 1.0,
        adapts=isinstance(scale, DynamicScale),
        max_grad_norm=step.update.max_grad_norm,
        original_dtypes={name: parameter.dtype for name, parameter in step.model.named_parameters()},
    )


@contextmanager
def all_as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back every random state: torch's on CPU and device, Python's and numpy's; and the model's gradients.

    Copies are run and not the model, but a loss function may hold it and run it after all.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    before = States.now(device)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()


def widen(value: Any) -> Any:
    """A 16-bit tensor in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def values_of(gradient: Tensor) -> Tensor:
    """A gradient's numbers, of a sparse one too."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
