"""`microbatch="auto"`: a size that fits, then the fastest, found in training itself.

Any split gives the same update, so the first steps of a training can try sizes on real batches: nothing runs twice for
it. The estimate says beforehand how large they may be, and what it gets wrong is caught by `recover`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accumulus.errors import OutOfMemoryError, StateError
from accumulus.memory.bound import Bound
from accumulus.memory.capacity import parse_bytes
from accumulus.memory.clock import Reading, Stopwatch
from accumulus.memory.forecast import Fit, Forecast
from accumulus.memory.recover import GROWN, Recovery
from accumulus.memory.sizing import load_of, resized, sample_load_of, smallest_of, unit_of
from accumulus.memory.tune import MAX_STEPS, Tuning
from accumulus.pytree import is_compiling
from accumulus.step import TrainStep
from accumulus.types import Batch, Choice, StepResult
from accumulus.units import format_bytes

__all__ = ["Auto"]

log = logging.getLogger("accumulus")

TOLERANCE = 1.05
"""The estimate may be off by as much: a single sample is refused unseen only beyond it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step that was just run, whose time is not known yet."""

    size: int
    reading: Reading
    num_samples: int
    weight: float  # loss elements where the host knows them, else samples
    tells: bool  # its time is that of other steps of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a tuning holds for: it starts again when the shapes grow beyond it."""

    num_samples: int
    sample_elements: float = 0.0
    sample_weight: float = 0.0  # of the first step: later ones are compared as if their samples weighed as much

    def is_left_by(self, num_samples: int, sample_elements: float) -> bool:
        """Whether a batch has grown beyond it."""
        return num_samples > GROWN * self.num_samples or (
            self.sample_elements > 0 and sample_elements > GROWN * self.sample_elements
        )


class Auto:
    """Chooses the micro-batches of a step, and runs its batches.

    Args:
        step: with a rule that can be resized: a number of samples, or a token budget.
        memory_limit: bytes, or "20GiB", that the whole training may take; None: a safe share of what is there.

    Raises:
        SplitError: the limit is no number of bytes.
    """

    def __init__(self, step: TrainStep, memory_limit: int | str | None = None) -> None:
        self._step = step
        self._forecast = Forecast(step, None if memory_limit is None else parse_bytes(memory_limit))
        self._recovery = Recovery(step, self._forecast, self._reconsider)
        self._tuning: Tuning | None = None
        self._scope = Scope(num_samples=0)
        self._fit: Fit | None = None
        self._limit_bytes: int | None = None  # what the estimate was held against
        self._is_stale = True  # a new tuning is due
        self._trial: Trial | None = None
        self._size = 0  # of the present step
        step.describe_choice = self._choice
        self._tried: set[int] = set()  # in this process: what is new may have to be compiled first

    def __call__(self, batch: Batch) -> StepResult:
        """Learns from one batch."""
        self._note_time()
        tuning = self._begin(batch) if self._tuning is None or self._is_stale else self._tuning
        size = self._size = tuning.next_size()
        self._step.microbatch = resized(self._step.microbatch, size)
        watch = Stopwatch(self._step.device)
        result = self._recovery(batch)
        self._note(tuning, size, result, watch)
        return result

    def _begin(self, batch: Batch) -> Tuning:
        """A search among the sizes that fit this batch."""
        parts = self._step.split(batch, resized(self._step.microbatch, sys.maxsize))
        if self._fit is None and not self._recovery.is_learned:
            self._fit = self._forecast.fit(batch)
        fit = None if self._recovery.is_learned else self._fit
        whole = largest = load_of(parts)
        smallest = min(whole, max(sample_load_of(parts), smallest_of(self._step)))
        if fit is not None:
            slack = 1.0 if self._forecast.is_strict else TOLERANCE
            if not fit.samples and fit.estimated.peak_bytes > slack * fit.capacity_bytes:
                raise OutOfMemoryError(f"not even one sample fits, and nothing was changed: {fit.shortage()}")
            self._recovery.rebound(fit.bound)
            fitting = int(self._recovery.bound.elements / fit.bound.sample_elements) if fit.samples else 1
            largest = min(largest, max(1, fitting) * sample_load_of(parts))
            self._limit_bytes = fit.limit_bytes
        self._scope = Scope(num_samples=parts.num_samples)
        self._tuning = Tuning(whole=whole, largest=largest, smallest=smallest)
        self._is_stale = False
        return self._tuning

    def _reconsider(self, batch: Batch) -> Bound | None:
        """Estimates again for samples that are larger than those known."""
        self._fit = self._forecast.fit(batch)
        self._is_stale = True
        return None if self._fit is None else self._fit.bound

    def _note(self, tuning: Tuning, size: int, result: StepResult, watch: Stopwatch) -> None:
        """After a step: what it tells of sizes, and whether the tuning still holds."""
        reading, seen = watch.stop(), self._recovery.seen
        load = self._recovery.max_load
        is_new = not self._tried or (size not in self._tried and is_compiling())
        self._tried.add(size)
        is_smaller = load is not None and load < size
        if load is not None and is_smaller and tuning.choice is None:
            # One batch of longer samples is no reason to leave out sizes that all others could have.
            longer = seen.sample_elements / (self._recovery.bound.sample_elements or math.inf)
            self._tuning = tuning.limited(min(tuning.largest, int(load * max(1.0, longer))))
        if self._scope.is_left_by(result.num_samples, seen.sample_elements) and tuning.choice is not None:
            self._is_stale, self._fit = True, None
        if tuning.choice is not None:
            return
        weight = float(result.weight) if isinstance(result.weight, (int, float)) else float(result.num_samples)
        # What an epoch has left over tells nothing, nor does a step that was cut smaller than was asked for.
        is_usual = weight > 0 and 2 * result.num_samples >= self._scope.num_samples and not is_smaller
        self._trial = Trial(
            size=size,
            reading=reading,
            num_samples=result.num_samples,
            weight=weight,
            tells=is_usual and not is_new and self._recovery.num_attempts == 1,
        )
        self._scope = replace(
            self._scope,
            sample_elements=max(self._scope.sample_elements, seen.sample_elements),
            sample_weight=self._scope.sample_weight or weight / result.num_samples,
        )

    def _note_time(self) -> None:
        """Before the next step: how fast was the last one? On an accelerator it waits for that, while tuning."""
        trial, self._trial = self._trial, None
        if trial is None or self._tuning is None or self._tuning.choice is not None:
            return
        work = trial.weight / self._scope.sample_weight if self._scope.sample_weight else trial.num_samples
        speed = work / max(trial.reading(), 1e-9)
        self._tuning = self._tuning.record(trial.size, speed, tells=trial.tells)
        if self._tuning.choice is not None:
            log.info("micro-batches of %d: %s", self._tuning.choice, self._reason())

    def _choice(self) -> Choice:
        tuning, size = self._tuning, self._size
        assert tuning is not None  # a step was run
        load = self._recovery.max_load
        return Choice(
            size=size if load is None else min(size, load),
            unit=unit_of(self._step.microbatch),
            reason=self._reason(),
            is_final=tuning.choice is not None and not self._is_stale,
            samples_per_second=tuning.speeds.get(size),
        )

    def _reason(self) -> str:
        tuning, load = self._tuning, self._recovery.max_load
        assert tuning is not None  # as above
        at_most = ""
        if self._limit_bytes is not None and tuning.largest < tuning.whole:
            at_most = f"; at most {tuning.largest} fit in {format_bytes(self._limit_bytes)}"
        if tuning.choice is None:
            return f"trying sizes, step {tuning.num_steps + 1} of at most {MAX_STEPS}{at_most}"
        if load is not None and load < tuning.choice:
            return f"smaller than the {tuning.choice} of the tuning: memory ran out, or samples are larger"
        if len(tuning.speeds) <= 1:
            return f"the only size there is to choose{at_most}"
        return f"the smallest within 5 % of the fastest of {len(tuning.speeds)} sizes tried{at_most}"

    def state_dict(self) -> dict[str, Any]:
        """What was found out, as plain values. Waits for the last step while tuning."""
        self._note_time()
        return {
            "unit": unit_of(self._step.microbatch),
            "tuning": None if self._tuning is None else self._tuning.state_dict(),
            "scope": [self._scope.num_samples, self._scope.sample_elements, self._scope.sample_weight],
            "is_stale": self._is_stale,
            "limit_bytes": self._limit_bytes,
            **self._recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; from one in another unit only with what is known of memory.

        Raises:
            StateError: it is not such a state.
        """
        try:
            is_other = state["unit"] != unit_of(self._step.microbatch)
            tuning = None if state["tuning"] is None or is_other else Tuning.from_state(state["tuning"])
            num_samples, sample_elements, sample_weight = state["scope"]
            scope = Scope(
                num_samples=int(num_samples),
                sample_elements=float(sample_elements),
                sample_weight=float(sample_weight),
            )
            is_stale = bool(state["is_stale"])
            limit = None if state["limit_bytes"] is None else int(state["limit_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the saved state of microbatch='auto': {error}") from None
        self._recovery.load_state_dict({**state, "max_load": None} if is_other else state)
        self._tuning, self._scope, self._is_stale, self._trial = tuning, scope, is_stale, None
        self._limit_bytes = limit
