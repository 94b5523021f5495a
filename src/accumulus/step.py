"""`TrainStep`: one call, one batch, one exact update. Read this file first.

A step cuts the batch, runs each micro-batch forward and backward, and hands the sum to the update. The parts live in
`microbatch` (how it is cut), `window` (weights and seeds), `update` (the only place that changes a parameter) and
`ledger` (loss scale, scheduler and counters, settled once a step's outcome is known).
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from accumulus import host
from accumulus.collapse import find_cause, untouched
from accumulus.dist.sync import choose_sync
from accumulus.errors import LossError, OptimizerError, StateError
from accumulus.guard import Guard
from accumulus.ledger import Ledger, Outcome
from accumulus.microbatch import Microbatches, Split, choose_split
from accumulus.precision import Precision
from accumulus.scaling import DynamicScale, LossScale, NoScale
from accumulus.types import Batch, LossFn, Optimizer, Scheduler, StepResult, describe
from accumulus.update import Report, Update
from accumulus.window import Totals, Window, WindowRules

__all__ = ["TrainStep"]


class TrainStep:
    """One training step on the batch you want: `result = step(batch)`.

    The batch is cut into micro-batches that fit in memory. However it is cut, the update is the whole batch's, up to
    the rounding of the precision: relative gradient error at most 1e-12 for a float64 and 5e-6 for a float32 model in
    "fp32", about 1e-3 in "fp16" and 1e-2 in "bf16", which is what these cost on a whole batch too.

    Args:
        model: the module to train, on its device.
        optimizer: any optimizer that updates from `.grad`. With `fused=True` (Adam, AdamW, SGD, Adagrad) unscaling,
            clipping and skipping happen inside its kernel.
        loss_fn: `loss_fn(model, microbatch)` returns a `Loss`, a scalar tensor (the mean over the micro-batch's
            samples), or a dict of them (terms, each over its own count). A scalar is wrong where samples count for
            different numbers of elements, as with padding or `ignore_index`: return `Loss` or `Loss.mean` there.
        precision: "fp32" (no casting), "tf32", "bf16", "fp16", "auto" (what the device does fast), or a `Precision`.
        microbatch: samples per micro-batch, or a rule such as `by_count(8)`. Must be given: "auto", the default, is
            not available yet.
        max_grad_norm: clip the 2-norm of the true gradient to this (`torch.nn.utils.clip_grad_norm_` clips to very
            slightly less: it adds 1e-6 to the norm).
        max_grad_value: clip each element of the true gradient to this.
        scheduler: stepped once per applied step, never on a skipped one.
        collate: makes a micro-batch of a list of samples; a batch is then a list of samples.
        weigh: `weigh(batch)` counts the weights of a whole batch before any forward pass: a number, or a dict of
            them by loss term. Needed where several terms' shares differ between micro-batches.
        loss_scale: by default dynamic for fp16, none for the others.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite. With a loss scale, always.
        on_empty: "raise" or "skip": what a batch whose weights are all zero does.
        device: where micro-batches go; by default where the model is.

    Raises:
        AccumulusError: an argument that cannot work; the class in `accumulus.errors` says which.

    Example:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> step = TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=4)
        >>> result = step({"x": torch.randn(16, 10), "y": torch.randn(16, 1)})
        >>> result.num_microbatches
        4
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        precision: str | Precision = "auto",
        microbatch: int | str | Split = "auto",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        scheduler: Scheduler | None = None,
        collate: Callable[[Any], Any] | None = None,
        weigh: Callable[[Any], Any] | None = None,
        loss_scale: LossScale | None = None,
        skip_nonfinite: bool = True,
        on_empty: str = "raise",
        device: torch.device | str | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise LossError(f"loss_fn must be a function of model and micro-batch, not {describe(loss_fn)}")
        if not callable(getattr(model, "named_modules", None)):
            raise OptimizerError(f"model must be a torch.nn.Module, not {describe(model)}")
        self.model, self.loss_fn, self.sync = model, loss_fn, choose_sync(model)
        self.device = _device_of(model, device)
        self.precision = Precision.parse(precision, self.device)
        self.precision.check(model)
        warn_of_mixing(model)
        self.microbatch = choose_split(microbatch)
        self.collate = collate
        default = DynamicScale() if self.precision.needs_loss_scale else NoScale()
        scale = default if loss_scale is None else loss_scale
        self.ledger = Ledger(scale, scheduler)
        guard = Guard(model, optimizer)
        self.update = Update(
            model,
            optimizer,
            guard,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            skip_nonfinite=skip_nonfinite,
            needs_loss_scale=not isinstance(scale, NoScale),
        )
        self.window = WindowRules(
            self.precision.region(self.device),
            autocast_device=self.device.type if self.precision.compute else None,
            scale=self._scale_now,  # bound, not a lambda: a deep copy of the step must read its own
            guard=guard,
            weigh=weigh,
            on_empty=on_empty,
        )

    def __call__(self, batch: Batch) -> StepResult:
        """Learns from one batch.

        Args:
            batch: a tree of tensors that share their first dimension; with `collate`, a list of samples.

        Returns:
            What was done, for the whole batch.

        Raises:
            BatchError, LossError, WeightError, WindowError: nothing was changed, and no gradient is left behind.
            ScaleCollapseError: too many steps in a row were non-finite. Parameters are as after the last applied one.

        Cost:
            On an accelerator with a fused optimizer, no wait for this step's work: the last step's outcome is read
            just before the first backward pass. On others one wait, for whether the gradient is finite.
        """
        started = time.perf_counter()
        parts = self.split(batch)
        with self.window.open(parts.sizes, batch, num_ranks=self.sync.averaged_over) as window:
            for part, is_last in parts:
                with self.sync.only_if(is_last):
                    window.backward(self.loss_fn(self.model, part))
            totals = window.totals()
        report = self.update(totals.divisor, totals.is_valid)  # the only change of a parameter
        return self._result(totals, report, window, parts, started)

    @property
    def loss_scale(self) -> LossScale:
        """The scale that the next step will use; `float(step.loss_scale)` is its value. Waits for the last step."""
        return self.ledger.loss_scale

    def split(self, batch: Batch) -> Microbatches:
        """The micro-batches that a batch is cut into.

        Args:
            batch: as for a step.

        Returns:
            An iterable, to be used once, with `num_samples` and the `sizes` of the micro-batches.

        Raises:
            BatchError: the batch cannot be cut.
            SplitError: a rule of your own gave sizes that do not cover the batch.
        """
        return Microbatches(batch, self.microbatch, self.device, collate=self.collate)

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

    def _scale_now(self) -> float:
        return float(self.ledger.loss_scale)

    def _result(
        self, totals: Totals, report: Report, window: Window, parts: Microbatches, started: float
    ) -> StepResult:
        like = totals.like
        result = StepResult(
            loss=host.as_tensor(totals.loss, like, like.dtype),
            grad_norm=None if report.grad_norm is None else host.as_tensor(report.grad_norm, like, like.dtype),
            clipped=host.as_flag(report.clipped, like),
            all_finite=host.as_flag(report.all_finite, like),
            applied=host.as_flag(report.applied, like),
            loss_scale=window.scale,
            weight=totals.weight,
            num_microbatches=totals.num_microbatches,
            num_samples=parts.num_samples,
            metrics={name: host.as_tensor(value, like) for name, value in totals.metrics.items()},
            lr=report.lr,
            seconds=time.perf_counter() - started,
        )
        self.ledger.post(
            Outcome(report.all_finite, report.applied),
            problem=window.terms.explain if totals.is_valid is not True else str,
            cause=lambda: find_cause(lambda scale: self._try(parts.batch, scale), window.scale),
        )
        return result

    def _try(self, batch: Batch, scale: float) -> tuple[bool, bool]:
        """Runs a batch at another loss scale and changes nothing: was the loss finite, were the gradients?"""
        rules = copy.copy(self.window)
        rules.scale = lambda: scale
        parts = self.split(batch)
        try:
            with untouched(self.model, self.device), rules.open(parts.sizes, batch) as window:
                for part, _ in parts:
                    window.backward(self.loss_fn(self.model, part))
                loss = window.totals().loss
            return host.wait_for(host.is_finite(loss)), self.update.is_finite()
        finally:
            self.window.guard.discard()

    def settle(self) -> None:
        """Waits for the last step and acts on its outcome: advances the scheduler and the loss scale.

        On a CPU this has happened when a step returns. On an accelerator it happens before the next backward pass; call
        this before you read or save the scheduler or the optimizer's learning rates.

        Raises:
            ScaleCollapseError, WeightError: as a step.
        """
        self.ledger.settle()


def warn_of_mixing(model: Any) -> None:
    """Warns of modules whose output for one sample depends on the others that go through with it."""
    mixing = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if mixing:
        warnings.warn(
            f"{len(mixing)} BatchNorm modules ({mixing[0]!r} among them) normalise over the samples that go through "
            "together, so results depend on how a batch is cut, whoever accumulates; use GroupNorm, or freeze them "
            "with .eval() before making the step",
            stacklevel=3,
        )


def _device_of(model: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(iter(model.parameters()), None)
    if first is None:
        raise OptimizerError(f"the model ({type(model).__name__}) has no parameters to train")
    return first.device  # type: ignore[no-any-return]
