"""`estimate` and `curve`: peak memory by part before anything runs, on fake tensors, or measured where those refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accumulus import pytree
from accumulus.engine import device_of
from accumulus.errors import LossError, OptimizerError, PrecisionError, UnsupportedError
from accumulus.memory.curve import MemoryCurve, MemoryEstimate, Method, positive
from accumulus.memory.fake import FakeWindow, is_present
from accumulus.memory.leaks import take_out_leaked
from accumulus.memory.live import Timeline
from accumulus.memory.measure import MeasuredWindow
from accumulus.memory.rehearsal import drop_gradients, undisturbed
from accumulus.microbatch import Microbatches, by_count
from accumulus.precision import Precision
from accumulus.together import as_one
from accumulus.types import Batch, LossFn, Optimizer, describe
from accumulus.update import check_optimizer

__all__ = ["curve", "estimate"]

log = logging.getLogger("accumulus")

SMALL_SIZES = (2, 4)
"""Micro-batches that are measured where fake tensors will not do. Not 1: BatchNorm refuses a single value."""


def estimate(
    model: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: LossFn,
    batch: Batch,
    *,
    precision: str | Precision = "auto",
    microbatch: int,
    collate: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> MemoryEstimate:
    """The most memory that a training step takes at a time, before anything runs.

    A whole window and its update are run on fake tensors, which have shapes and no data: each storage is counted once,
    from the operator that makes it until autograd frees it. Model, optimizer, batch and random states stay untouched.
    Models whose shapes depend on data (`.item()`, boolean indexing, `nonzero`) are measured instead, on a few real
    samples, and put back bit for bit; `method` and `note` say so.

    Args:
        model: as for `TrainStep`; or on the meta device, where it takes no memory, however large.
        optimizer: as for `TrainStep`; with its state, or before its first step.
        loss_fn: as for `TrainStep`. It is called with fake tensors: what it writes elsewhere, as to a list, stays.
        batch: an example, for types and shapes; of any number of samples.
        precision: as for `TrainStep`.
        microbatch: samples per micro-batch, at least 1; may be more than the example has.
        collate: as for `TrainStep`; it is called once on the example, so that all of it is padded to its longest.
        device: where the model will be trained; by default where it is. Where that is not there, the kernels of the CPU
            stand for its own, and `note` says so.

    Returns:
        Peak and parts. What operators allocate inside their kernels (cuDNN and cuBLAS workspaces) is not seen, nor
        what the allocator keeps unused. A compiled model is counted as if it were not.

    Raises:
        AccumulusError: arguments that a step would refuse.
        Exception: from the user's code, where it fails on real tensors too.

    Cost:
        About a second for a 12-layer transformer, whatever the micro-batch size; no memory that grows with it. Where it
        has to be measured: the passes of two small windows, and a copy of the model in host memory; on CUDA, torch's
        peak statistics start anew.

    Example:
        >>> model = torch.nn.Linear(1000, 1000)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> found = estimate(
        ...     model, optimizer, lambda model, x: model(x).square().mean(), torch.randn(4, 1000),
        ...     precision="fp32", microbatch=64,
        ... )
        >>> found.parts["parameters"], found.method
        (4004000, 'fake')
    """
    size = positive(microbatch, "microbatch")
    plan = _Plan(model, optimizer, loss_fn, batch=batch, precision=precision, collate=collate, device=device)
    return plan.curve([size]).at(size)


def curve(
    model: Any,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: LossFn,
    batch: Batch,
    *,
    precision: str | Precision = "auto",
    largest: int | None = None,
    collate: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> MemoryCurve:
    """Peak memory for every micro-batch size, from three runs on fake tensors.

    Args:
        model: as for `estimate`.
        optimizer: as for `estimate`.
        loss_fn: as for `estimate`.
        batch: as for `estimate`.
        precision: as for `estimate`.
        largest: the largest size of interest; by default the number of samples in the batch.
        collate: as for `estimate`.
        device: as for `estimate`.

    Returns:
        The curve: `.at(microbatch)` and `.largest(limit_bytes, at_most)`.

    Raises:
        AccumulusError: arguments that a step would refuse.
        Exception: from the user's code, where it fails on real tensors too.

    Cost:
        Three times that of `estimate`.

    Example:
        >>> model = torch.nn.Linear(1000, 1000)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = curve(
        ...     model, optimizer, lambda model, x: model(x).square().mean(), torch.randn(64, 1000), precision="fp32"
        ... )
        >>> found.at(64).peak_bytes > found.at(8).peak_bytes
        True
        >>> found.largest(limit_bytes=1000, at_most=64)
        0
    """
    top = None if largest is None else positive(largest, "largest")
    plan = _Plan(model, optimizer, loss_fn, batch=batch, precision=precision, collate=collate, device=device)
    top = max(top or plan.num_samples(), max(SMALL_SIZES))
    return plan.curve([2, (2 + top) // 2, top])


class _Plan:
    """The arguments, checked, and what runs them: fake tensors first, real ones where those refuse."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: LossFn,
        *,
        batch: Batch,
        precision: str | Precision,
        collate: Callable[[Any], Any] | None,
        device: torch.device | str | None,
    ) -> None:
        if not callable(loss_fn):
            raise LossError(f"loss_fn must be a function of model and micro-batch, not {describe(loss_fn)}")
        if not callable(getattr(model, "named_modules", None)):
            raise OptimizerError(f"model must be a torch.nn.Module, not {describe(model)}")
        check_optimizer(model, as_one(optimizer))
        self._trained = model, optimizer, loss_fn
        self._batch = batch
        self._collate = collate
        found = device_of(model, device)
        self._device = torch.device("cpu") if found.type == "meta" else found
        self._precision = _parsed(precision, self._device)
        self._precision.check(model)

    def num_samples(self) -> int:
        """Samples in the example."""
        return Microbatches(self._batch, by_count(1), torch.device("cpu"), collate=self._collate).num_samples

    def curve(self, sizes: list[int]) -> MemoryCurve:
        """From fake runs of these sizes, or from real ones of smaller sizes."""
        self.num_samples()  # refuses what cannot be cut
        is_there = is_present(self._device)
        with undisturbed(self._device if is_there else torch.device("cpu"), self._trained[0]):
            note = "" if is_there else f"no {self._device.type} device is here: counted with the CPU's kernels"
            found, reason = self._faked(sizes, note)
            if found is not None:
                return found
            drop_gradients(self._trained[0])  # a loss function that uses the model itself may have left some
            home = device_of(self._trained[0], None)
            if home.type == "meta":
                raise UnsupportedError(f"{reason}; and a model on the meta device has no data to measure it with")
            if max(sizes) > max(SMALL_SIZES):
                sizes = list(SMALL_SIZES)
            measured = MeasuredWindow(
                *self._trained,
                batch=self._batch,
                precision=self._precision,
                device=home,
                collate=self._collate,
            )
            note = f"measured on micro-batches of {' and '.join(map(str, sizes))} real samples, because {reason}"
            return self._fitted({size: measured.run(size) for size in sizes}, "measured", note)

    def _faked(self, sizes: list[int], note: str) -> tuple[MemoryCurve | None, str]:
        """From fake runs; or None and why not."""
        found, reason, modes = None, "", list[Any]()
        try:
            window = self._fake_window()
            modes = window.modes
            found = self._fitted({size: window.run(size) for size in sizes}, "fake", note)
        except Exception as error:  # whatever it is, it may be due to the tensors being fake: the real ones tell
            reason = _reason(error)
        if num_left := take_out_leaked(modes):
            log.warning(
                "the estimate ran the model and the loss function on fake tensors, and %d of these are held in "
                "variables; if they are in the way, give a size instead of microbatch='auto'",
                num_left,
            )
        return found, reason

    def _fake_window(self) -> FakeWindow:
        makes_batch = self._collate is not None or self._device.type != "cpu"
        example = self._batch if self._collate is None else self._collate(self._batch)
        return FakeWindow(
            *self._trained,
            example=pytree.sliceable(example),
            precision=self._precision,
            device=self._device,
            makes_batch=makes_batch,
        )

    def _fitted(self, timelines: dict[int, Timeline], method: Method, note: str) -> MemoryCurve:
        return MemoryCurve(timelines, precision=str(self._precision), method=method, note=note)


def _parsed(precision: str | Precision, device: torch.device) -> Precision:
    if precision == "auto" and not is_present(device):
        raise PrecisionError(
            f"precision='auto' asks the device, and no {device.type} device is here; name one, such as 'bf16'"
        )
    return Precision.parse(precision, device)


def _reason(error: Exception) -> str:
    refused = getattr(error, "func", None)  # torch's exceptions for results that depend on data carry the operator
    if refused is not None:
        return f"fake tensors cannot run {refused}, whose result depends on the data"
    text = str(error).strip().splitlines()
    return f"fake tensors cannot run the step ({type(error).__name__}: {text[0][:200] if text else ''})"
