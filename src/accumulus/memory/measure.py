"""Measuring on real tensors, where a model cannot be run on fake ones: a small window, and everything put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulus import pytree
from accumulus.errors import BatchError
from accumulus.memory.fake import count_update, fake_update
from accumulus.memory.live import PARTS, LiveBytes, Timeline, held_by, parameters_of
from accumulus.memory.rehearsal import Pieces, Rehearsal, resized
from accumulus.microbatch import to_device
from accumulus.precision import Precision
from accumulus.together import as_one

__all__ = ["MeasuredWindow"]


class MeasuredWindow:
    """Runs the forward and backward passes of small windows on real tensors, and the update on fake ones.

    Args:
        model: the user's; as before after each run, bit for bit.
        optimizer: the user's, or several; not touched.
        loss_fn: the user's.
        batch: the user's example.
        precision: to compute in.
        device: where the model lies.
        collate: makes a micro-batch of samples.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        *,
        batch: Any,
        precision: Precision,
        device: torch.device,
        collate: Callable[[Any], Any] | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._batch = batch
        self._precision = precision
        self._device = device
        self._collate = collate
        self._tree = _example(batch, collate)

    def run(self, size: int) -> Timeline:
        """Runs one window.

        Args:
            size: samples in a micro-batch.

        Returns:
            Live bytes over the passes, with the state that the optimizer will have, and over the update.

        Raises:
            Exception: whatever the user's code raises.
        """
        graded: list[tuple[Tensor, Tensor]] = []  # parameter and gradient
        whole = as_one(self._optimizer)
        stand_in = SimpleNamespace(param_groups=whole.param_groups, state={}, step=lambda closure=None: None)
        live = LiveBytes(self._device)
        with restored(self._model, parameters_of(whole)):
            step = Rehearsal(
                self._model,
                stand_in,  # the hooks of a step's guard must not reach the user's optimizer
                self._loss_fn,
                precision=self._precision,
                device=self._device,
            )
            held = parameters_of(whole)

            def note_graded(*_: Any) -> None:
                graded.extend((parameter, parameter.grad) for parameter in held if parameter.grad is not None)
                step.window.guard.discard()

            step.update = _Noting(step.update, note_graded)  # type: ignore[assignment]
            before = _allocated(self._device, reset=True)
            with live.watching(step):
                held_bytes = live.current_bytes
                step(Pieces(lambda: self._make(size), size, 2))
            grown_bytes = _allocated(self._device, reset=False) - before
        passes = live.timeline()
        if self._device.type == "cuda":
            passes = _with_unseen(passes, held_bytes + grown_bytes)
        update, state_bytes = _update(self._optimizer, graded, self._device)
        return _joined(passes, update, state_bytes)

    def _make(self, size: int) -> Any:
        if self._tree is None:
            assert self._collate is not None  # else there would be a tree
            whole, rest = divmod(size, len(self._batch))
            return to_device(self._collate([*list(self._batch) * whole, *self._batch[:rest]]), self._device)
        made = to_device(resized(self._tree, size, _first_rows), self._device)
        is_new = self._collate is not None and self._device.type == "cpu"
        return pytree.map_tensors(torch.clone, made) if is_new else made


def _example(batch: Any, collate: Callable[[Any], Any] | None) -> pytree.Sliceable | None:
    """The batch, padded to its longest sample where there is a `collate`; None where only `collate` can cut it."""
    if collate is None:
        return pytree.sliceable(batch)
    try:
        return pytree.sliceable(collate(batch))
    except BatchError:
        return None


def _update(optimizer: Any, graded: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Timeline, int]:
    """The update on fake tensors; on copies of the real ones where fake ones do not know how much a gradient holds."""
    parameters = [parameter for parameter, _ in graded]
    if all(gradient.layout == torch.strided for _, gradient in graded):
        return fake_update(optimizer, parameters, device)
    copied_parameters, copied = copy.deepcopy((parameters, optimizer))
    for parameter, (_, gradient) in zip(copied_parameters, graded, strict=True):
        parameter.grad = gradient
    graded.clear()
    return count_update(copied, LiveBytes(device))


class _Noting:
    """Stands in for a step's update: notes who got a gradient, and changes nothing."""

    def __init__(self, update: Any, note: Callable[..., None]) -> None:
        self.optimizer = update.optimizer
        self._note = note

    def __call__(self, *args: Any) -> None:
        self._note(*args)


@contextmanager
def restored(model: Any, others: Sequence[Tensor]) -> Iterator[None]:
    """Puts everything that a model holds back as it was, bit for bit: parameters, buffers, attributes and modes.

    Args:
        model: the module.
        others: more tensors to keep, such as parameters that only the optimizer knows.

    Yields:
        None, once.

    Cost:
        A copy of the parameters and buffers in host memory.
    """
    kept = list({id(tensor): tensor for tensor in [*model.parameters(), *held_by(model), *others]}.values())
    values = [(tensor, tensor._version, tensor.detach().to("cpu", copy=True)) for tensor in kept]
    attributes = [(module, _shallow(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for tensor, version, value in values:
            # Kernels such as BatchNorm's write without counting a version.
            if tensor._version != version or not torch.equal(tensor.detach().cpu(), value):
                tensor.detach().copy_(value)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value for name, value in attributes.items()
    }


def _first_rows(value: Tensor, rows: int) -> Tensor:
    if rows <= 0 or rows == len(value):
        return value
    return value[:rows] if rows < len(value) else value[torch.arange(rows, device=value.device) % len(value)]


def _allocated(device: torch.device, *, reset: bool) -> int:
    """CUDA's allocated bytes: now, and from now on the peak counts; or the peak since then."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device)


def _with_unseen(timeline: Timeline, peak_bytes: int) -> Timeline:
    """Adds what kernels allocate inside themselves, which the allocator saw and the count did not, as temporary."""
    table = timeline.part_bytes.copy()
    table[:, PARTS.index("temporary")] += max(0, peak_bytes - int(table.sum(axis=1).max()))
    return Timeline(table, timeline.phases, timeline.events)


def _joined(passes: Timeline, update: Timeline, state_bytes: int) -> Timeline:
    """Passes and update as one: the state that the optimizer will have is there in the passes of later steps."""
    table = passes.part_bytes.copy()
    table[:, PARTS.index("optimizer state")] = state_bytes
    # What the model holds besides the optimizer's parameters is there in the update too.
    column = PARTS.index("parameters")
    rest = update.part_bytes.copy()
    rest[:, column] += table[-1, column] - rest[-1, column]
    return Timeline(
        np.concatenate([table, rest]),
        np.concatenate([passes.phases, update.phases]),
        np.concatenate([passes.events, update.events]),
    )
