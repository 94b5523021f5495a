"""Live bytes: every storage counted once, from the operator that makes it until it is really freed, by what it is for.

The count is the same on real and on fake tensors, because both go through the dispatcher and both free a storage when
its last view dies. What an operator allocates and frees inside its own kernel is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accumulus.together import members
from accumulus.types import HALF_DTYPES

__all__ = ["PARTS", "PHASES", "LiveBytes", "Timeline"]

PARTS = ("parameters", "gradients", "optimizer state", "cast weights", "activations", "temporary")
"""What bytes are for, in the order in which they are shown."""

PHASES = ("forward", "backward", "update")

CUDA_BLOCK_BYTES = 512
"""torch's caching allocator rounds every block up to a multiple of this."""

ASK_DEVICE = torch.ops.prim.device.default

TO_COPY = torch.ops.aten._to_copy.default

MAKES_INSIDE = frozenset({torch.ops.aten.lift_fresh.default})
"""Operators whose argument is a tensor that was just made where no mode could see it: `torch.tensor(...)`."""


class Record:
    """One storage: its size, what it is for (None: it was there before the count), and what tells its end."""

    __slots__ = ("num_bytes", "part", "reference")

    def __init__(self, num_bytes: int, part: str | None) -> None:
        self.num_bytes = num_bytes
        self.part = part
        self.reference: weakref.ref[Any] | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes by part after every allocation and every free.

    Args:
        part_bytes: int64 of shape (moments, parts).
        phases: index into `PHASES` of each moment.
        events: the part that changed at each moment as index + 1, negative where it was freed: two runs with equal
            events did the same, whatever the sizes.
    """

    part_bytes: NDArray[np.int64]
    phases: NDArray[np.int8]
    events: NDArray[np.int8]

    def peak(self) -> int:
        """The moment at which most bytes are alive; the first such one."""
        return int(self.part_bytes.sum(axis=1).argmax())


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that live tensors hold, and remembers the peak and what it was made of.

    A storage is counted once, however many views there are, from the operator that makes it until it is freed. What was
    there before the count, such as the batch, is left out, except for what `hold` is told of.

    Args:
        device: count only what lies on devices of this type; None for all.
        block_bytes: every storage is rounded up to a multiple of this, as the device's allocator does.

    Example:
        >>> with LiveBytes() as live:
        ...     kept = torch.zeros(1000) + 1
        >>> live.current_bytes, live.peak_bytes
        (4000, 8000)

    Cost:
        About 20 microseconds per operator; a record of each allocation.
    """

    def __init__(self, device: torch.device | str | None = None, *, block_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = None if device is None else torch.device(device).type
        self._block_bytes = block_bytes or (CUDA_BLOCK_BYTES if self._device == "cuda" else 1)
        self._records: dict[int, Record] = {}
        self._log: list[tuple[Record, int, int]] = []  # storage, change in bytes, phase
        self._timeline: Timeline | None = None
        self._inside = ""  # "loss" or "update": whose code runs now
        self.current_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at a time."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part at the peak."""
        timeline = self.timeline()
        if not len(timeline.events):
            return dict.fromkeys(PARTS, 0)
        return dict(zip(PARTS, timeline.part_bytes[timeline.peak()].tolist(), strict=True))

    @property
    def phase(self) -> str:
        """The phase in which the peak lies: "forward", "backward" or "update"."""
        timeline = self.timeline()
        return PHASES[timeline.phases[timeline.peak()]] if len(timeline.events) else PHASES[0]

    def timeline(self) -> Timeline:
        """All that happened so far. What a storage turned out to be for counts from its beginning.

        Returns:
            Live bytes by part after each allocation and each free.
        """
        if self._timeline is None or len(self._timeline.events) != len(self._log):
            index = {part: number for number, part in enumerate(PARTS)}
            columns = np.array([index[record.part] for record, _, _ in self._log if record.part], dtype=np.int8)
            changes = np.array([change for _, change, _ in self._log], dtype=np.int64)
            table = np.zeros((len(self._log), len(PARTS)), dtype=np.int64)
            table[np.arange(len(self._log)), columns] = changes
            self._timeline = Timeline(
                table.cumsum(axis=0),
                np.array([phase for _, _, phase in self._log], dtype=np.int8),
                np.where(changes < 0, -1, 1).astype(np.int8) * (columns + np.int8(1)),
            )
        return self._timeline

    def hold(self, tensors: Iterable[Tensor], part: str) -> None:
        """Counts tensors that are there already, or says what tensors that are counted have become.

        Args:
            tensors: any.
            part: one of `PARTS`. What is part of the model's parameters stays so.
        """
        self._timeline = None
        for storage, tensor in _stored(list(tensors)):
            record = self._records.get(storage._cdata)
            if record is None or record.part is None:  # it was not seen, or as an argument before it was known as ours
                self._add(storage, tensor.device, part)
            elif record.part != "parameters":
                record.part = part

    @contextmanager
    def watching(self, step: Any) -> Iterator[LiveBytes]:
        """Counts what a `TrainStep` holds and does inside the `with` block, by part and phase.

        Args:
            step: the step; it is put back as it was at the end.

        Returns:
            A context manager that gives this object.
        """
        optimizer, loss_fn, update = step.update.optimizer, step.loss_fn, step.update
        parameters = list(dict.fromkeys([*step.model.parameters(), *parameters_of(optimizer)]))
        self.hold([*parameters, *held_by(step.model)], "parameters")
        self.hold(state_of(optimizer), "optimizer state")

        def mark_gradients() -> None:
            self.hold([p.grad for p in parameters if p.grad is not None], "gradients")

        def watched_loss(*args: Any) -> Any:
            mark_gradients()  # of the micro-batch before
            with self._running("loss"):
                return loss_fn(*args)

        def watched_update(*args: Any) -> Any:
            mark_gradients()
            with self._running("update"):
                report = update(*args)
            self.hold(state_of(optimizer), "optimizer state")
            return report

        vars(watched_update).update(optimizer=optimizer, is_finite=getattr(update, "is_finite", None))
        step.loss_fn, step.update = watched_loss, watched_update
        mark_gradients()
        try:
            with self:
                yield self
        finally:
            mark_gradients()
            step.loss_fn, step.update = loss_fn, update

    @property
    def is_updating(self) -> bool:
        """Whether the update of a watched step runs now."""
        return self._inside == "update"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the operator, and counts what it made."""
        kwargs = kwargs or {}
        if func is ASK_DEVICE:  # fake tensors do so more often than anything else
            return func(*args, **kwargs)
        if func not in MAKES_INSIDE:
            for storage, _ in _stored((args, kwargs)):
                if storage._cdata not in self._records:
                    self._watch(storage, Record(0, None))
        made = self._run(func, args, kwargs)
        for storage, tensor in _stored(made):
            record = self._records.get(storage._cdata)
            if record is None:
                self._add(storage, tensor.device, self._part_of(func, args, tensor))
            elif record.part and self._rounded(storage) != record.num_bytes:  # resized in place
                self._change(record, self._rounded(storage) - record.num_bytes)
                record.num_bytes = self._rounded(storage)
        return made

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        before, self._inside = self._inside, what
        try:
            yield
        finally:
            self._inside = before

    def _phase_now(self) -> int:
        if self._inside:
            return 2 if self._inside == "update" else 0
        return 1 if torch._C._current_graph_task_id() >= 0 else 0

    def _part_of(self, func: Any, args: Any, made: Tensor) -> str:
        if self._phase_now() != 0:
            return "temporary"
        if func is TO_COPY and made.dtype in HALF_DTYPES and args[0].layout == torch.strided:
            source = self._records.get(args[0].untyped_storage()._cdata)
            if source is not None and source.part == "parameters":
                return "cast weights"
        return "activations"

    def _add(self, storage: Any, device: torch.device, part: str) -> None:
        is_ours = self._device is None or device.type == self._device
        record = Record(self._rounded(storage), part if is_ours else None)
        self._watch(storage, record)
        if is_ours:
            self._change(record, record.num_bytes)

    def _watch(self, storage: Any, record: Record) -> None:
        key, me = storage._cdata, weakref.ref(self)

        def freed(_: object) -> None:
            live = me()
            if live is not None and live._records.get(key) is record:
                del live._records[key]
                if record.part:
                    live._change(record, -record.num_bytes)

        record.reference = weakref.ref(storage, freed)
        self._records[key] = record

    def _change(self, record: Record, num_bytes: int) -> None:
        self.current_bytes += num_bytes
        self._log.append((record, num_bytes, self._phase_now()))

    def _rounded(self, storage: Any) -> int:
        return int(-(-storage.nbytes() // self._block_bytes) * self._block_bytes)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Any) -> list[Tensor]:
    """All tensors in the state of an optimizer, or of several that step as one."""
    return [tensor for member in members(optimizer) for tensor in _tensors(getattr(member, "state", {}))]


def held_by(model: Any) -> list[Tensor]:
    """Buffers, and tensors that modules keep in plain attributes, once each."""
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in [*model.buffers(), *attributes]}.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)


def _stored(tree: Any) -> Iterator[tuple[Any, Tensor]]:
    """The storages of all tensors in a tree, each with its tensor; of a sparse one those of indices and values."""
    for tensor in _tensors(tree):
        if tensor.layout == torch.strided:
            yield tensor.untyped_storage(), tensor
        elif tensor.layout == torch.sparse_coo:
            yield from ((dense.untyped_storage(), dense) for dense in (tensor._indices(), tensor._values()))
