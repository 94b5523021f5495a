"""What can be known beforehand of the memory that a step takes: the estimate, held against what the device has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from accumulus.memory.bound import Bound
from accumulus.memory.capacity import available_bytes
from accumulus.memory.curve import MemoryEstimate
from accumulus.memory.estimate import curve, estimate
from accumulus.memory.sizing import elements_of, smallest_of
from accumulus.microbatch import BySize
from accumulus.step import TrainStep
from accumulus.together import members
from accumulus.types import Batch
from accumulus.units import format_bytes

__all__ = ["Fit", "Forecast"]

Answer = TypeVar("Answer")

log = logging.getLogger("accumulus")

SAFE_SHARE = 0.9
"""Of the memory there is, what micro-batches are planned for: allocators leave gaps, and kernels want workspaces."""

AMPLE = 4
"""A batch that fits so many times over needs no exact answer, which takes four times as long."""

FAR = 64
"""The bound is looked for in batches up to so many times the present one: later ones may be of shorter samples."""

MEASURES = {
    "parameters": "a smaller model, or sharding it over several devices",
    "gradients": "freezing a part of the model",
    "optimizer state": "an optimizer with less state, such as SGD or Adafactor",
    "cast weights": "precision='fp32'",
    "activations": "activation checkpointing (torch.utils.checkpoint), smaller samples, or precision='bf16'",
    "temporary": "an optimizer with fused=True, or a loss that makes no copy of the logits",
}
"""What makes each part smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the estimate says of a batch.

    Args:
        samples: the most that fit in a micro-batch, were all as large as the batch's largest; 0: not even one does.
        bound: the same in numbers of tensors.
        estimated: what the smallest micro-batch takes; where all fits with ease, what four times the batch would take.
        limit_bytes: what it may take.
        capacity_bytes: what there is; the limit itself where that was given.
    """

    samples: int
    bound: Bound
    estimated: MemoryEstimate
    limit_bytes: int
    capacity_bytes: int

    def shortage(self) -> str:
        """Why one sample does not fit: the parts of its memory, and what helps against the largest."""
        one = self.estimated
        parts = sorted(((size, name) for name, size in one.parts.items() if size), reverse=True)
        shown = ", ".join(f"{name} {format_bytes(size)}" for size, name in parts)
        return (
            f"training takes {format_bytes(one.peak_bytes)} with a micro-batch of {one.microbatch} ({shown}), and "
            f"{format_bytes(self.limit_bytes)} may be used; what would help most: {MEASURES[parts[0][1]]}"
        )


class Forecast:
    """The estimate of a step, held against the memory there is.

    Args:
        step: what will run.
        limit_bytes: what the whole training may take; None: a safe share of what it holds and of what is free.
    """

    def __init__(self, step: TrainStep, limit_bytes: int | None = None) -> None:
        self._step = step
        self._limit_bytes = limit_bytes

    @property
    def is_strict(self) -> bool:
        """Whether the limit was given, and holds whatever the device has."""
        return self._limit_bytes is not None

    def fit(self, batch: Batch) -> Fit | None:
        """How much of a batch fits; None where that cannot be estimated.

        Args:
            batch: gives the shapes: of a list of samples those of all of them collated, padded to the longest.

        Cost:
            One run on fake tensors where the whole batch fits four times; else four. Each takes about a third of a
            second for a transformer of twelve layers.
        """
        try:
            num_samples = self._step.split(batch, BySize(1)).num_samples
            ample = self._ask(estimate, batch, microbatch=AMPLE * num_samples)
            if ample.peak_bytes <= self._limits()[1]:
                return self._held(batch, AMPLE * num_samples, ample)
            return self._fit_exactly(batch)
        except Exception as error:  # it runs the user's code: what is wrong with that, the step itself will say
            log.warning("peak memory could not be estimated (%s: %s)", type(error).__name__, error)
            return None

    def _fit_exactly(self, batch: Batch) -> Fit:
        """As `fit`, with the largest size that fits and the parts of the smallest."""
        found = self._ask(curve, batch)
        num_samples = self._step.split(batch, BySize(1)).num_samples
        largest = found.largest(self._limits()[1], FAR * num_samples)
        return self._held(batch, largest, found.at(smallest_of(self._step)))

    def _held(self, batch: Batch, largest: int, estimated: MemoryEstimate) -> Fit:
        """An estimate, held against what there is."""
        num_samples = self._step.split(batch, BySize(1)).num_samples
        whole = batch if self._step.collate is None else self._step.collate(batch)
        sample_elements = elements_of(whole, num_samples) / num_samples
        capacity, limit = self._limits()
        return Fit(
            samples=min(largest, num_samples),
            bound=Bound(max(1, largest) * sample_elements, sample_elements),
            estimated=estimated,
            limit_bytes=limit,
            capacity_bytes=capacity,
        )

    def _limits(self) -> tuple[int, int]:
        """What there is, and what may be planned for."""
        capacity = self._limit_bytes or held_bytes(self._step) + available_bytes(self._step.device)
        return capacity, capacity if self.is_strict else int(SAFE_SHARE * capacity)

    def _ask(self, question: Callable[..., Answer], batch: Batch, **more: int) -> Answer:
        step = self._step
        return question(
            step.model,
            step.update.optimizer,
            step.loss_fn,
            batch,
            precision=step.precision,
            collate=step.collate,
            device=step.device,
            **more,
        )

    def explain(self, batch: Batch, size: int) -> str:
        """Why the smallest micro-batch does not fit, when that has been tried.

        Args:
            batch: what could not be learned from.
            size: samples of that micro-batch.

        Returns:
            A sentence with the parts of the memory.
        """
        try:
            found: Fit | None = self._fit_exactly(batch)
        except Exception:  # as above
            found = None
        advice = (
            "use activation checkpointing, smaller samples or a smaller model" if found is None else found.shortage()
        )
        return f"memory ran out with a micro-batch of {size}, and nothing was changed; {advice}"


def held_bytes(step: TrainStep) -> int:
    """What model and optimizer hold already: parameters, buffers and states, each storage once.

    Args:
        step: between two batches, when there are no gradients.
    """
    states = (
        value for optimizer in members(step.update.optimizer) for s in optimizer.state.values() for value in s.values()
    )
    tensors = [*step.model.parameters(), *step.model.buffers(), *(v for v in states if isinstance(v, Tensor))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
