"""How far a run is, and the learning rate that follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

FINAL_LR_RATIO = 0.05
ROUNDING = 1e-9
"""So that step 29 of 100 counts as 0.29 of the way, though 29 / 100 * 100 is below 29 in floating point."""


@dataclass
class Progress:
    """How far a run is, by steps, by time, or by whichever is further.

    Args:
        max_steps: steps to make; None: as many as fit.
        max_seconds: time to take; None: no limit.
        num_steps: steps made.
        num_skipped: of these, without an update, because the gradient was not finite.
        num_evals: held-out measurements made on the way.
        seconds: time taken before the clock was started; the state that is saved.

    Example:
        >>> progress = Progress(max_steps=4, max_seconds=None)
        >>> progress.end_step(applied=True)
        >>> progress.ratio()
        0.25
    """

    max_steps: int | None
    max_seconds: float | None
    num_steps: int = 0
    num_skipped: int = 0
    num_evals: int = 0
    seconds: float = 0.0
    _started: float | None = None

    def start_clock(self) -> None:
        """From now on time counts."""
        self._started = time.monotonic()

    def elapsed_seconds(self) -> float:
        """Time taken so far, before a stop and after."""
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return self.seconds + running

    def ratio(self, ahead: int = 0) -> float:
        """The share of the run that is done.

        Args:
            ahead: steps to count as made already.

        Returns:
            0 to 1; a function of the number of steps alone where there is no time limit.
        """
        by_steps = 0.0 if self.max_steps is None else (self.num_steps + ahead) / self.max_steps
        by_time = 0.0 if self.max_seconds is None else self.elapsed_seconds() / self.max_seconds
        return min(1.0, max(by_steps, by_time))

    def seconds_left(self) -> float:
        """An estimate of the time to the end; NaN before the first step."""
        done = self.ratio()
        return math.nan if done == 0 else self.elapsed_seconds() * (1 - done) / done

    def end_step(self, *, applied: bool) -> None:
        """Counts a step."""
        self.num_steps += 1
        self.num_skipped += not applied

    def eval_is_due(self, max_evals: int) -> bool:
        """Whether the next of `max_evals` evenly spread measurements is due; counts it if so."""
        due = math.floor(self.ratio() * max_evals + ROUNDING)
        if due <= self.num_evals:
            return False
        self.num_evals = due
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from; the limits are its own."""
        state = {**asdict(self), "seconds": self.elapsed_seconds()}
        return {name: state[name] for name in ("num_steps", "num_skipped", "num_evals", "seconds")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""
        for name, value in state.items():
            setattr(self, name, value)


class WarmupCosine:
    """Learning rates that rise linearly over the first applied steps and fall as a cosine over the run.

    Args:
        optimizer: its groups' learning rates are the peaks.
        warmup: applied steps until the peak.
        progress: the share of the run that will be done after the current step.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = WarmupCosine(optimizer, warmup=2, progress=lambda: 0.0)
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """

    def __init__(self, optimizer: Any, *, warmup: int, progress: Callable[[], float]) -> None:
        self.optimizer = optimizer
        self.warmup = warmup
        self.progress = progress
        self.num_applied = 0
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._set_rates(done=0.0)

    def step(self) -> None:
        """Sets the rates of the step after the one that has just been applied."""
        self.num_applied += 1
        self._set_rates(done=self.progress())

    def _set_rates(self, *, done: float) -> None:
        rising = min(1.0, (self.num_applied + 1) / max(1, self.warmup))
        falling = FINAL_LR_RATIO + (1 - FINAL_LR_RATIO) * (1 + math.cos(math.pi * done)) / 2
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rising * falling

    def state_dict(self) -> dict[str, Any]:
        """The number of applied steps and the peaks."""
        return {"num_applied": self.num_applied, "peaks": self.peaks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; the rates themselves are part of the optimizer's."""
        self.num_applied, self.peaks = state["num_applied"], list(state["peaks"])


def set_peak_rate(optimizer: Any, lr: float) -> None:
    """Sets the learning rate of the first group, and the others' in proportion.

    Args:
        optimizer: changed in place.
        lr: the first group's new rate.
    """
    groups = optimizer.param_groups
    first = float(groups[0]["lr"])
    for group in groups:
        group["lr"] = lr * float(group["lr"]) / first if first else lr
