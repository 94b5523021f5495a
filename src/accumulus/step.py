"""`TrainStep`: one call, one batch, one exact update. Read this file first.

A step cuts the batch, runs each micro-batch forward and backward, and hands the sum to the update. The parts live in
`microbatch` (how it is cut), `window` (weights and seeds), `update` (the only place that changes a parameter) and
`ledger` (loss scale, scheduler and counters, settled once a step's outcome is known); `engine` puts them together.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from accumulus import host
from accumulus.collapse import find_cause, untouched
from accumulus.engine import Engine
from accumulus.errors import LossError, SplitError
from accumulus.microbatch import Microbatches, Split, choose_split
from accumulus.origin import Origin, trace_origin
from accumulus.precision import Precision
from accumulus.scaling import LossScale
from accumulus.types import Batch, LossFn, Optimizer, Scheduler, StepResult, describe
from accumulus.window import Window

__all__ = ["TrainStep"]

Look = Callable[[Any], None]

DRIVERS = {"auto": "accumulus.memory.auto:Auto"}
"""What runs a step's batches in place of the step itself, by the word that asks for it. By name, because it stands on
the step and may not be imported here: see docs/decisions, "drivers"."""


class Driver(Protocol):
    """Runs a step's batches: chooses how they are cut, and cuts them anew when memory runs out."""

    def __call__(self, batch: Batch) -> StepResult:
        """Learns from one batch, through `TrainStep.run`."""

    def state_dict(self) -> dict[str, Any]:
        """What it found out, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""


class TrainStep(Engine):
    """One training step on the batch you want: `result = step(batch)`.

    The batch is cut into micro-batches that fit in memory. However it is cut, the update is the whole batch's, up to
    the rounding of the precision: relative gradient error at most 1e-12 for a float64 and 5e-6 for a float32 model in
    "fp32", about 1e-3 in "fp16" and 1e-2 in "bf16", which is what these cost on a whole batch too.

    Args:
        model: the module to train, on its device.
        optimizer: any optimizer that updates from `.grad`. With `fused=True` (Adam, AdamW, SGD, Adagrad) unscaling,
            clipping and skipping happen inside its kernel. Or a list of several, over different parameters: they share
            norm, scale and the decision to skip.
        loss_fn: `loss_fn(model, microbatch)` returns a `Loss`, a scalar tensor (the mean over the micro-batch's
            samples), or a dict of them (terms, each over its own count). A scalar is wrong where samples count for
            different numbers of elements, as with padding or `ignore_index`: return `Loss` or `Loss.mean` there.
        precision: "fp32" (no casting), "tf32", "bf16", "fp16", "auto" (what the device does fast), or a `Precision`.
        microbatch: samples per micro-batch, a rule such as `by_count(8)` or `by_tokens(8192)`, or "auto": what fits in
            memory, then what is fastest, found in the first ten steps or so; running out of memory is survived.
            `by_tokens("auto")` does the same with tokens.
        max_grad_norm: clip the 2-norm of the true gradient to this (`torch.nn.utils.clip_grad_norm_` clips to very
            slightly less: it adds 1e-6 to the norm).
        max_grad_value: clip each element of the true gradient to this.
        scheduler: stepped once per applied step, never on a skipped one; a list where there are several. One that steps
            on a measure, as ReduceLROnPlateau does, gets the loss.
        collate: makes a micro-batch of a list of samples; a batch is then a list of samples.
        weigh: `weigh(batch)` counts the weights of a whole batch before any forward pass: a number, or a dict of
            them by loss term. Needed where several terms' shares differ between micro-batches.
        loss_scale: by default dynamic for fp16, none for the others.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite. With a loss scale, always.
        on_empty: "raise" or "skip": what a batch whose weights are all zero does.
        veto: `veto(grad_norm)` says whether to skip the step, as `lambda norm: norm > 10` does. On an accelerator the
            norm is a tensor without dimensions, and the answer may be one, so that nobody waits.
        on_step: called with each step's `StepResult` once it is known whether it was applied; one function or several.
            On an accelerator that is when the next step begins, which then waits for the last one.
        device: where micro-batches go; by default where the model is.
        memory_limit: for "auto": bytes, or "20GiB", that the whole training may take; by default nine tenths of what
            it holds and what is free.

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
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFn,
        *,
        precision: str | Precision = "auto",
        microbatch: int | str | Split = "auto",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        collate: Callable[[Any], Any] | None = None,
        weigh: Callable[[Any], Any] | None = None,
        loss_scale: LossScale | None = None,
        skip_nonfinite: bool = True,
        on_empty: str = "raise",
        veto: Callable[[Any], Any] | None = None,
        on_step: Callable[[StepResult], object] | Sequence[Callable[[StepResult], object]] = (),
        device: torch.device | str | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise LossError(f"loss_fn must be a function of model and micro-batch, not {describe(loss_fn)}")
        super().__init__(
            model,
            optimizer,
            precision=precision,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            scheduler=scheduler,
            weigh=weigh,
            loss_scale=loss_scale,
            skip_nonfinite=skip_nonfinite,
            on_empty=on_empty,
            veto=veto,
            on_step=on_step,
            device=device,
        )
        self.loss_fn = loss_fn
        self.microbatch = choose_split(microbatch)
        self.collate = collate
        self.driver = make_driver(self, microbatch, memory_limit)

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
        return self.run(batch, self.split(batch)) if self.driver is None else self.driver(batch)

    def run(self, batch: Batch, parts: Microbatches) -> StepResult:
        """Learns from one batch that has been cut: the step itself.

        Args:
            batch: the whole batch, for `weigh`.
            parts: its micro-batches, from `split`.

        Returns:
            What was done.

        Raises:
            AccumulusError: as a call.
        """
        started = time.perf_counter()
        with self.window.open(parts.sizes, batch, num_ranks=self.sync.averaged_over, order=parts.order) as window:
            for part, is_last in parts:
                with self.sync.only_if(is_last):
                    window.backward(self.loss_fn(self.model, part))
            totals = window.totals()
        cause = functools.partial(self._find_cause, batch, parts, window.scale)
        return self._finish(window, totals, num_samples=parts.num_samples, started=started, cause=cause)

    def split(self, batch: Batch, rule: Split | None = None) -> Microbatches:
        """The micro-batches that a batch is cut into.

        Args:
            batch: as for a step.
            rule: how to cut it; the step's own where it is None.

        Returns:
            An iterable, with `num_samples` and the `sizes` of the micro-batches.

        Raises:
            BatchError: the batch cannot be cut.
            SplitError: a rule of your own gave sizes that do not cover the batch.
        """
        return Microbatches(batch, rule or self.microbatch, self.device, collate=self.collate)

    def state_dict(self) -> dict[str, Any]:
        """What a step carries on to the next: loss scale, reference weight, counters, the micro-batch size if chosen.

        Returns:
            Plain values, which `torch.save` and JSON both take. Model, optimizer and scheduler have their own.

        Cost:
            Waits for the last step.
        """
        state = super().state_dict()
        return state if self.driver is None else state | {"microbatch": self.driver.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state.

        Args:
            state: from `state_dict`; without `loss_scale` the scale starts anew. Or a `torch.amp.GradScaler`'s, for
                its scale. The micro-batch size in it is used where this step chooses that, too.

        Raises:
            StateError: it is not such a state, or of another kind of loss scale.
        """
        chosen = state.get("microbatch")
        if self.driver is not None and chosen is not None:
            self.driver.load_state_dict(chosen)
        super().load_state_dict({name: value for name, value in state.items() if name != "microbatch"})

    def find_origin(self, batch: Batch, scale: float | None = None) -> Origin | None:
        """Runs a batch again, operator by operator, and finds who made its first non-finite value. Changes nothing.

        Args:
            batch: as for a step; one whose step was not finite, most likely.
            scale: the loss scale to run it at; by default the next step's.

        Returns:
            Module, operator, dtype, pass and input ranges; it prints as a sentence. None where loss and gradients are
            finite.

        Raises:
            AccumulusError: as a step.

        Cost:
            The batch's forward and backward passes, with one test for finiteness an operator.
        """
        return self._trace(batch, self.split(batch), float(self.loss_scale) if scale is None else scale)

    def _find_cause(self, batch: Batch, parts: Microbatches, scale: float) -> str:
        return find_cause(
            functools.partial(self._try, batch, parts), scale, functools.partial(self._trace, batch, parts)
        )

    def _try(self, batch: Batch, parts: Microbatches, scale: float) -> tuple[bool, bool]:
        """Runs a batch at another loss scale and changes nothing: was the loss finite, were the gradients?"""
        with self._trial(batch, parts, scale) as run:
            loss = run(_look_away).totals().loss
            return host.wait_for(host.is_finite(loss)), self.update.is_finite()

    def _trace(self, batch: Batch, parts: Microbatches, scale: float) -> Origin | None:
        """Runs a batch at another loss scale and changes nothing: who made the first non-finite value?"""
        with self._trial(batch, parts, scale) as run:
            held = self.window.guard.parameters()
            return trace_origin(self.model, run, lambda: [p.grad for p in held if p.grad is not None])

    @contextmanager
    def _trial(self, batch: Batch, parts: Microbatches, scale: float) -> Iterator[Callable[[Look], Window]]:
        """A function that runs the window, showing what each loss function returned; afterwards all is as it was."""
        rules = copy.copy(self.window)
        rules.scale = lambda: scale

        def run(look: Look) -> Window:
            with rules.open(parts.sizes, batch) as window:
                for part, _ in parts:
                    returned = self.loss_fn(self.model, part)
                    look(returned)
                    window.backward(returned)
            return window

        try:
            with untouched(self.model, self.device):
                yield run
        finally:
            self.window.guard.discard()


def _look_away(_: Any) -> None:
    pass


def make_driver(step: TrainStep, microbatch: object, memory_limit: int | str | None) -> Driver | None:
    """What runs the step's batches; None where the step does so itself.

    Args:
        step: whose batches.
        microbatch: what was asked for.
        memory_limit: bytes that it may plan with.

    Raises:
        SplitError: a limit where nothing is chosen.
    """
    word = "auto" if getattr(microbatch, "is_auto", False) else microbatch
    if not isinstance(word, str):
        if memory_limit is not None:
            raise SplitError("memory_limit is for microbatch='auto'; a size that was given is used as it is")
        return None
    where, _, name = DRIVERS[word].partition(":")
    driver: Driver = getattr(importlib.import_module(where), name)(step, memory_limit)
    return driver
