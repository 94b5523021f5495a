"""Out of memory is survived: undo, free, a smaller micro-batch, the same samples again.

Any split of a batch gives the same update, so a step that ran out of memory can be run again in smaller pieces, and
what comes of it is bit for bit what these pieces would have given from the start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

from accumulus.errors import OutOfMemoryError, StateError
from accumulus.memory.bound import NO_BOUND, Bound
from accumulus.memory.failure import is_out_of_memory, let_go
from accumulus.memory.forecast import Forecast
from accumulus.memory.sizing import at_most, elements_of, load_of, sample_load_of, smallest_of
from accumulus.memory.undo import Protection, Undo
from accumulus.microbatch import Microbatches
from accumulus.step import TrainStep
from accumulus.types import Batch, StepResult

__all__ = ["Recovery", "recover_from_oom"]

LARGEST_LOAD = 2**40
"""Beyond this there is no bound."""

NOTHING = Bound(elements=0.0, sample_elements=0.0)

log = logging.getLogger("accumulus")

GROWN = 1.25
"""Samples that are larger by this factor than those known are worth another estimate, or another tuning."""

GROWTH, GROWTH_SHARE = 1.25, 0.9
"""After batches of shorter samples the load grows by at least a quarter, to nine tenths of what is known to fit:
batches differ, and one that turns out to be too large is begun anew."""


def recover_from_oom(step: TrainStep) -> TrainStep:
    """A step that survives running out of memory, wherever in it that happens.

    What the failed attempt changed is undone (gradients, buffers such as BatchNorm's statistics, what modules keep in
    plain attributes, random states), memory is freed, and the same samples run again in smaller micro-batches; the step
    after that begins with those. Batches whose samples are larger than the ones that fitted are cut smaller before they
    run, batches of smaller ones may grow again. What a loss function keeps elsewhere, such as a generator of random
    numbers of its own, is not seen, and an `Embedding` with `max_norm` stays renormed. A scheduler or an `on_step`
    function that runs out of memory is not this step's: its error passes, and the batch is not learned from twice.

    Args:
        step: any `TrainStep`. With `microbatch="auto"` this is on already.

    Returns:
        A step of the same kind over the same parts: use it in place of the one that was given.

    Raises:
        OutOfMemoryError: from the step: not even single samples fit. Nothing was changed.
        CorruptStepError: from the step: memory ran out inside the optimizer's update, after it had changed something.
            Not with `fused=True`, and not in a parameter's first step.

    Cost:
        Before each step a copy of the buffers up to 1 MiB and of the random states, and a look at each operator of the
        optimizer's step: a third of a millisecond for a small model with a fused optimizer. In the first step one copy
        of the parameters in host memory. After a failure, two or three runs on fake tensors.

    Example:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> step = recover_from_oom(TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=8))
        >>> step(torch.randn(32, 10)).num_microbatches
        4
    """
    if step.driver is not None:
        return step
    wrapped = copy.copy(step)
    wrapped.driver = Recovery(wrapped, Forecast(wrapped))
    return wrapped


class TooLargeError(Exception):
    """A micro-batch that will not fit, by what is known, and was not run.

    Args:
        excess: how many times too large it is.
        longer: how many times as large its samples are as those that the bound was found with.
    """

    def __init__(self, excess: float, longer: float) -> None:
        super().__init__(excess, longer)
        self.excess = excess
        self.longer = longer


class Recovery:
    """Runs the batches of a step, and runs one again in smaller micro-batches when memory runs out.

    Args:
        step: what to run. Its optimizer's step is protected from now on.
        forecast: what can be known of the memory that micro-batches take.
        reconsider: asked for a new bound when a micro-batch would exceed the present one; None: it stands.
    """

    def __init__(
        self, step: TrainStep, forecast: Forecast, reconsider: Callable[[Batch], Bound | None] | None = None
    ) -> None:
        self._step = step
        self._forecast = forecast
        self._reconsider = reconsider
        self._changing: set[str] = set()  # large buffers that change
        self.max_load: int | None = None  # samples or tokens, as the rule counts; None: as many as it says
        self.bound: Bound = NO_BOUND
        self.is_learned = False  # the bound comes of a failure that the estimate did not foresee: it is of no more help
        self.seen = NOTHING  # the largest micro-batch of the last attempt
        self.num_attempts = 0  # at the last step
        self.num_failures = 0  # of these, for want of memory
        self._protection = step.update.protect = Protection(step.update)

    def __call__(self, batch: Batch) -> StepResult:
        """Learns from one batch."""
        self._step.ledger.settle_for_listeners()  # theirs are no allocations of this step
        undo: Undo | None = None
        self.num_attempts = self.num_failures = 0
        self._protection.has_stepped, posted = False, self._step.ledger.num_posted
        while True:
            self.num_attempts += 1
            parts: Microbatches | None = None
            self.seen = NOTHING
            try:
                undo = undo or Undo(self._step, self._changing)
                parts = self._cut(batch)
                result = self._step.run(batch, parts)
            except Exception as error:
                if not (isinstance(error, TooLargeError) or is_out_of_memory(error)):
                    raise
                # The batch was learned from: what failed is a scheduler, or a function that hears of steps.
                if self._protection.has_stepped or self._step.ledger.num_posted > posted:
                    raise
                failure: Exception = error
            else:
                undo.note_changes()
                self._look_ahead(parts)
                return result
            # Outside the except block, whose error would hold on to the failed frames.
            let_go(failure, self._step.device)
            if undo is not None:
                undo.restore()
            self._give_way(batch, parts, failure)
            del failure

    def _cut(self, batch: Batch) -> Microbatches:
        rule = self._step.microbatch
        parts = self._step.split(batch, rule if self.max_load is None else at_most(rule, self.max_load))
        parts.look = self._look
        return parts

    def _look(self, part: Any, size: int) -> None:
        """Before a micro-batch runs: is it larger than what is known to fit?"""
        elements = elements_of(part, size)
        self.seen = self.seen.widened(elements, size)
        excess = self.bound.excess(elements, size)
        if excess > 1 and size > smallest_of(self._step):
            raise TooLargeError(excess, self.bound.longer(elements, size))

    def _give_way(self, batch: Batch, parts: Microbatches | None, failure: Exception) -> None:
        """Decides on a smaller load, after a failed attempt was undone."""
        if isinstance(failure, TooLargeError):
            self._avoid(batch, parts, failure)
            return
        self.num_failures += 1
        if parts is None:  # it struck before the batch was cut, where the load plays no part
            if self.num_failures > 1:
                raise OutOfMemoryError("no memory is left even to cut a batch; free some and go on") from failure
            return
        smallest = smallest_of(self._step)
        if max(parts.sizes) <= smallest:
            raise OutOfMemoryError(self._forecast.explain(batch, max(parts.sizes))) from failure
        load = load_of(parts)
        found = self._forecast.fit(batch) if self.num_failures == 1 else None
        informed = 0 if found is None else found.samples * sample_load_of(parts)
        is_foreseen = 0 < informed < load  # an estimate that says it should have fitted is of no help
        self.is_learned = self.is_learned or not is_foreseen
        self.max_load = max(smallest, informed if is_foreseen else load // 2)
        if self.seen.elements:
            self.bound = self.seen.scaled(self.max_load / load)
        log.warning("out of memory with micro-batches of %d; going on with %d", load, self.max_load)

    def rebound(self, bound: Bound) -> None:
        """Takes an estimate's bound and begins anew; what a failure has taught is not forgotten for it.

        Args:
            bound: of batches that may have grown.
        """
        self.bound = bound if not self.is_learned or bound.elements < self.bound.elements else self.bound
        self.max_load = None

    def _avoid(self, batch: Batch, parts: Microbatches | None, failure: TooLargeError) -> None:
        """Cuts a batch smaller whose samples are larger than those known, unless a new bound says that it fits.

        It is asked for only where they are much larger: an estimate takes longer than a slightly smaller load costs.
        """
        assert parts is not None  # one of them was looked at
        is_asked = self._reconsider is not None and not self.is_learned and failure.longer > GROWN
        found = self._reconsider(batch) if self._reconsider is not None and is_asked else None
        if found is not None and found.sample_elements > self.bound.sample_elements:
            self.bound = found
            return
        load = load_of(parts)
        self.max_load = max(smallest_of(self._step), min(load - 1, int(load / failure.excess)))
        log.info("larger samples: micro-batches of %d instead of %d", self.max_load, load)

    def _look_ahead(self, parts: Microbatches) -> None:
        """After a step that went well: may the next one's load be larger?"""
        if self.max_load is None or not self.seen.elements:
            return
        possible = load_of(parts) * self.bound.elements / self.seen.elements * GROWTH_SHARE
        if possible >= self.max_load * GROWTH:
            self.max_load = int(possible) if possible < LARGEST_LOAD else None

    def state_dict(self) -> dict[str, Any]:
        """What was learned of the memory."""
        return {"max_load": self.max_load, "is_learned": self.is_learned, **self.bound.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            StateError: it is not such a state.
        """
        try:
            bound, is_learned = Bound.from_state(state), bool(state.get("is_learned", False))
            load = None if state["max_load"] is None else int(state["max_load"])
            if load is not None and load < 1:
                raise ValueError(f"a load must be at least 1, not {load}")
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"not the saved state of a step that recovers from running out of memory: {error}"
            ) from None
        self.max_load, self.bound, self.is_learned = load, bound, is_learned
