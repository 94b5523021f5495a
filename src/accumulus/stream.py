"""The streaming form: your own loop over micro-batches, and the same arithmetic. `Accumulator`."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Parameter

from accumulus.engine import Engine
from accumulus.errors import LossError, StateError, WeightError, WindowError
from accumulus.precision import Precision
from accumulus.rng import random_state, set_random_state
from accumulus.scaling import LossScale
from accumulus.types import Loss, Optimizer, Returned, Scheduler, StepResult, describe
from accumulus.window import Window

__all__ = ["Accumulator"]


class Region(AbstractContextManager[None]):
    """What `Accumulator.microbatch` gives: one object for all, because making one costs as much as entering it."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = weakref.ref(accumulator)  # weakly, so that one that is left behind warns at once
        self._region = accumulator.window.region
        self._device = accumulator.device.type
        self._casts = accumulator.precision.compute is not None
        self._is_plain = str(accumulator.precision) == "fp32"
        self._entered = False
        self._sync: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        accumulator = self._accumulator()
        assert accumulator is not None  # it made this object, and whoever enters it holds it
        if accumulator._is_inside or accumulator._is_complete:
            accumulator._check_may_enter()
        if accumulator._open is None:
            accumulator._begin()
        accumulator._names.clear()
        accumulator._is_broken = False
        accumulator._is_inside = True
        if self._casts:
            # What runs between micro-batches may cast in another dtype, and torch keeps one copy of a weight, not two.
            torch.clear_autocast_cache()
        # In fp32 there is only an outer autocast to switch off, and nearly never one.
        self._entered = not self._is_plain or torch.is_autocast_enabled(self._device)
        if self._entered:
            self._region.__enter__()
        if accumulator.sync.reduces:
            self._sync = accumulator.sync.only_if(accumulator._next_is_last)
            self._sync.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        accumulator = self._accumulator()
        assert accumulator is not None  # as above
        if self._sync is not None:
            self._sync.__exit__(kind, error, trace)
        if self._entered:
            self._region.__exit__(kind, error, trace)
        accumulator._is_inside = False
        window = accumulator._open
        if kind is not None:
            accumulator._abandon(because=f"{kind.__name__} was raised in the one after them")
        elif accumulator._is_broken or window is None:
            accumulator._abandon()
            raise WindowError("a backward pass failed in this micro-batch, so its window was dropped; run it again")
        else:
            window.num_done += 1
            accumulator._num_samples += accumulator._size or 0
            accumulator._is_complete = accumulator._next_is_last


class Accumulator(Engine):
    """Exact accumulation in a loop of your own.

    Args:
        model: the module to train, on its device.
        optimizer: any optimizer that updates from `.grad`; a list where there are several.
        precision: "fp32", "tf32", "bf16", "fp16", "auto", or a `Precision`.
        max_grad_norm: clip the 2-norm of the true gradient to this.
        max_grad_value: clip each element of the true gradient to this.
        scheduler: stepped once per applied step; a list where there are several.
        loss_scale: by default dynamic for fp16, none for the others.
        skip_nonfinite: leave everything as it is when a gradient is NaN or infinite.
        on_empty: "raise" or "skip": what a window whose weights are all zero does.
        veto: `veto(grad_norm)` says whether to skip the step, as `lambda norm: norm > 10` does. On an accelerator the
            norm is a tensor without dimensions, and the answer may be one, so that nobody waits.
        on_step: called with each step's `StepResult` once it is known whether it was applied; one function or several.
        device: where the model computes; by default where its parameters are.

    Raises:
        AccumulusError: an argument that cannot work.

    Example:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> accumulator = Accumulator(model, optimizer, precision="fp32")
        >>> from accumulus import windows
        >>> for x, is_last in windows(torch.randn(5, 4, 10), size=2):
        ...     with accumulator.microbatch(is_last):
        ...         accumulator.backward(model(x).square().mean())
        ...     if is_last:
        ...         result = accumulator.step()
        >>> result.num_microbatches
        1
    """

    _open: Window | None = None  # here, so that one whose construction failed can be deleted

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        precision: str | Precision = "auto",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        loss_scale: LossScale | None = None,
        skip_nonfinite: bool = True,
        on_empty: str = "raise",
        veto: Callable[[Any], Any] | None = None,
        on_step: Callable[[StepResult], object] | Sequence[Callable[[StepResult], object]] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            precision=precision,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            scheduler=scheduler,
            weigh=None,
            loss_scale=loss_scale,
            skip_nonfinite=skip_nonfinite,
            on_empty=on_empty,
            veto=veto,
            on_step=on_step,
            device=device,
        )
        self.result: StepResult | None = None  # the last step's
        self._region = Region(self)
        self._is_inside = False
        self._is_complete = False
        self._next_is_last = False
        self._num_samples = 0  # of the window
        self._size: int | None = None  # of the micro-batch
        self._names: set[str] = set()  # of the terms in the micro-batch
        self._is_broken = False
        self._dropped = ""
        self._started = 0.0

    def begin(self, weights: Any = None) -> None:
        """Opens a window, and says what the weights of its terms will add up to.

        Only needed for several terms whose shares differ between micro-batches; otherwise a window opens by itself.

        Args:
            weights: total weight, or a mapping from term to total weight.

        Raises:
            WeightError: a weight cannot be.
            WindowError: a window is open already, or gradients lie about.
        """
        self._begin(weights)

    def _begin(self, weights: Any = None) -> Window:
        if self._open is not None:
            raise WindowError(f"a window of {self._open.num_done} micro-batches is open; call step() or flush() first")
        window = self._open = self.window.open(None, weights, num_ranks=self.sync.averaged_over)
        window.begin()
        self._started = time.perf_counter()
        self._is_complete = False
        self._num_samples = 0
        return window

    def microbatch(self, is_last: bool | int, *, num_samples: int | None = None) -> AbstractContextManager[None]:
        """The region of one micro-batch: forward passes and `backward`.

        Args:
            is_last: whether it is the window's last one. That of `windows` also knows the number of samples.
            num_samples: samples in the micro-batch; only needed for bare scalar losses without `windows`.

        Returns:
            A context manager.

        Raises:
            WeightError: `num_samples` is no number of samples.
            WindowError: micro-batches are nested, or the window is complete and waits for `step`.
        """
        if self._is_inside or self._is_complete:
            self._check_may_enter()
        if self._dropped:
            warnings.warn(f"{self._dropped}; this one begins a new window", stacklevel=2)
            self._dropped = ""
        size = getattr(is_last, "num_samples", None) if num_samples is None else num_samples
        if size is not None and (type(size) is not int or size < 0):
            raise WeightError(f"num_samples must be a number of samples, an int of at least 0, not {describe(size)}")
        self._size, self._next_is_last = size, bool(is_last)
        return self._region

    def _check_may_enter(self) -> None:
        if self._is_inside:
            raise WindowError("a micro-batch is already open; leave its with block first")
        raise WindowError("the window's last micro-batch is done; call step() before the next one")

    def backward(self, loss: Returned) -> None:
        """Runs a loss backward. Several calls in one micro-batch are several terms of it.

        Losses of one graph go into one call, as a dict: the first backward pass frees the graph.

        Args:
            loss: a `Loss`, a bare scalar (the mean over the micro-batch's samples), or a dict of terms.

        Raises:
            LossError: it is not a loss, or has no graph.
            WeightError: a bare scalar, and the number of samples is not known.
            WindowError: outside a micro-batch, or gradients or parameters were changed by hand.
        """
        if not self._is_inside or self._open is None:
            raise WindowError(
                "backward was called outside a micro-batch; use it inside: with accumulator.microbatch(is_last)"
            )
        loss = self._named(loss)
        try:
            self._open.backward(loss, self._size)
        except BaseException:
            self._is_broken = True  # the tallies and the gradients no longer agree
            raise

    def _named(self, loss: Returned) -> Returned:
        """Gives the second bare loss of a micro-batch, and those after it, a name of its own."""
        if type(loss) is Loss and not self._names:  # nearly always
            self._names.add("loss")
            return loss
        if isinstance(loss, Mapping):
            names = list(loss)
        else:
            names = ["loss"] if not self._names else [f"loss[{len(self._names)}]"]
            loss = {names[0]: loss} if self._names else loss
        if self._names and not self._names.isdisjoint(names):
            raise LossError(f"the terms {names} were given twice in one micro-batch; name them apart")
        self._names.update(names)
        return loss

    def step(self) -> StepResult:
        """Applies the window's gradient.

        Returns:
            What was done, for the whole window.

        Raises:
            WindowError: the window's last micro-batch is not done, or its step has been taken already.
            WeightError, ScaleCollapseError: as `TrainStep`.
        """
        if self._is_inside:
            raise WindowError("step was called inside a micro-batch; leave its with block first")
        if self._open is None:
            raise WindowError("there is no window to step: no micro-batch was run since the last step")
        if not self._is_complete:
            raise WindowError(
                f"step was called before the window's last micro-batch ({self._open.num_done} are done); run one with "
                "microbatch(is_last=True), or call flush() to step what is there"
            )
        window, self._open, self._is_complete = self._open, None, False
        try:
            totals = window.totals()
        except BaseException:
            self.window.guard.discard()
            raise
        finally:
            window.end()
        self.result = self._finish(window, totals, num_samples=self._num_samples, started=self._started, cause=None)
        return self.result

    def flush(self) -> StepResult | None:
        """Steps what is pending, as if its last micro-batch had been marked.

        Returns:
            The result; None where nothing was pending.

        Raises:
            WindowError, WeightError, ScaleCollapseError: as `step`.
        """
        if self._is_inside:
            raise WindowError("flush was called inside a micro-batch; leave its with block first")
        if self._open is None or not self._open.num_done:
            self._abandon()
            return None
        self._is_complete = True
        return self.step()

    def state_dict(self, *, gradients: bool = True) -> dict[str, Any]:
        """Everything that the micro-batches to come depend on, also in the middle of a window. Waits for the device.

        Args:
            gradients: in the middle of a window, include what has been accumulated: one more copy of the parameters'
                size. Without them the window is left out, and a resumed run begins it anew.

        Returns:
            Plain values and tensors, as `torch.load(weights_only=True)` takes them. Model, optimizer and scheduler
            have their own.

        Raises:
            WindowError: inside a micro-batch, whose graph cannot be saved.
        """
        if self._is_inside:
            raise WindowError("state_dict was called inside a micro-batch, whose graph cannot be saved; leave it first")
        state = super().state_dict()
        if self._open is None or not gradients:
            return state
        whole = {"is_complete": self._is_complete, "num_samples": self._num_samples}
        return state | {"window": save_window(self._open, self.window.guard.parameters(), self.device) | whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state; one from the middle of a window goes on there, bit for bit.

        Args:
            state: from `state_dict`; or a `torch.amp.GradScaler`'s, for its scale.

        Raises:
            StateError: it is not such a state, or does not fit the model.
            WindowError: a window is open here.
        """
        if self._open is not None:
            raise WindowError("load_state_dict was called inside a window; call step() or flush() first")
        rest = {name: value for name, value in state.items() if name != "window"}
        if "window" not in state:
            super().load_state_dict(rest)
            return
        before = super().state_dict()
        window = self._begin()
        try:
            super().load_state_dict(rest)
            restore_window(window, state["window"], self.window.guard.parameters(), self.device)
            self._is_complete = bool(state["window"]["is_complete"])
            self._num_samples = int(state["window"]["num_samples"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            self._abandon()
            super().load_state_dict(before)
            raise StateError(f"the saved window does not fit: {error}") from error

    def _abandon(self, because: str = "") -> None:
        """Drops an open window: nothing was changed, and no gradient is left behind."""
        window, self._open, self._is_complete = self._open, None, False
        if window is None:
            return
        window.end()
        self.window.guard.discard()
        if because and window.num_done:  # said at the next one: a warning now could hide the error
            self._dropped = f"{window.num_done} micro-batches were dropped with their window, as {because}"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make a region of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_region"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._region = Region(self)

    def __del__(self) -> None:
        window = self._open
        if window is None or not window.num_done:
            return
        self._open = None
        window.end()
        self.window.guard.discard_own()
        warnings.warn(
            f"an Accumulator was left with {window.num_done} micro-batches that were never stepped; mark the last one "
            "(acc.windows does), or call flush()",
            stacklevel=2,
        )


def save_window(window: Window, parameters: Sequence[Parameter], device: torch.device) -> dict[str, Any]:
    """A window between two micro-batches: tallies, accumulated gradients, random states."""
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    return {**window.state_dict(), "gradients": gradients, "random": random_state(device)}


def restore_window(
    window: Window, saved: Mapping[str, Any], parameters: Sequence[Parameter], device: torch.device
) -> None:
    """Goes on from what `save_window` gave, in a window that has just been opened."""
    if len(saved["gradients"]) != len(parameters):
        raise ValueError(f"it has {len(saved['gradients'])} gradients, for {len(parameters)} parameters here")
    for parameter, gradient in zip(parameters, saved["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    window.load_state_dict(saved)
    set_random_state(saved["random"], device)
