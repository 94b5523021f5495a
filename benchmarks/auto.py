"""`microbatch="auto"` on the built-in task: against the best fixed size of an exhaustive sweep in the same run.

A run of 60 steps pays for its estimate and for the sizes it tries; what it settles on should be as fast as the best.
"""

from __future__ import annotations

import copy
import functools
import random
import statistics
import sys
import time
from typing import Any

import torch

import accumulus as acc
from accumulus.run.batches import Batches
from accumulus.run.bytes_task import bytes_task
from timing import Rows, medians, show

BATCH_SIZE = 256
SIZES: dict[str, int] = {}  # of the task: its own
NUM_STEPS = 60
SETTLED = 20
"""Steps after which the tuning must be over; it takes about ten."""

STALL = 3.0


class Sides:
    """Steps over copies of one model, which all learn from the same batches.

    Args:
        task: the built-in one.
        precision: of all of them.
    """

    def __init__(self, task: Any, precision: str) -> None:
        self.task, self.precision = task, precision
        self.batches = Batches(task.train_data, batch_size=BATCH_SIZE, seed=0, length=task.length)

    def step(self, microbatch: Any) -> acc.TrainStep:
        model = copy.deepcopy(self.task.model)
        return acc.TrainStep(
            model,
            self.task.optimizer(model),
            self.task.loss_fn,
            precision=self.precision,
            microbatch=microbatch,
            max_grad_norm=1.0,
            collate=self.task.collate,
        )

    def sweep(self, rounds: int) -> dict[int, float]:
        """Median seconds of a step with each size from the whole batch down to single samples."""
        sizes = [BATCH_SIZE >> power for power in range(BATCH_SIZE.bit_length())]
        steps = {str(size): self.step(size) for size in sizes}
        calls = {name: functools.partial(self.learn, step) for name, step in steps.items()}
        return {int(name): seconds for name, seconds in medians(calls, rounds=rounds, warmup=1).items()}

    def learn(self, step: acc.TrainStep) -> None:
        step(self.batches[random.randrange(50)])

    def race(self, best: int) -> dict[str, list[float]]:
        """Seconds of each step of two whole runs, which take turns."""
        steps = {"auto": self.step("auto"), "best": self.step(best)}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(NUM_STEPS):
            batch, names = self.batches[index], list(steps)
            random.shuffle(names)
            for name in names:
                started = time.perf_counter()
                result = steps[name](batch)
                seconds[name].append(time.perf_counter() - started)
        choice = steps["auto"](self.batches[0]).choice
        print(f"best of the sweep {best}, chosen {choice}; {result.num_microbatches} micro-batches", file=sys.stderr)
        return seconds


def without_stalls(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Leaves out, for both, steps after the tuning in which the machine stood still for one of them."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    stalled = {
        index
        for name, times in seconds.items()
        for index, time_taken in enumerate(times)
        if index >= SETTLED and time_taken > STALL * medians[name]
    }
    print(f"left out because the machine stood still: {sorted(stalled)}", file=sys.stderr)
    return {name: [t for index, t in enumerate(times) if index not in stalled] for name, times in seconds.items()}


def measure(rounds: int = 5) -> Rows:
    torch.manual_seed(0)
    precision = str(acc.Precision.parse("auto", "cpu"))
    sides = Sides(bytes_task(**SIZES), precision)
    swept = sides.sweep(rounds)
    best = min(swept, key=swept.__getitem__)
    seconds = without_stalls(sides.race(best))
    settled = {name: statistics.median(times[SETTLED:]) for name, times in seconds.items()}
    what, against = f"`bytes`, batch {BATCH_SIZE}, {precision}", f"the best fixed size of a sweep ({best})"
    return [
        {
            "what": f'{what}, microbatch="auto", a step after tuning',
            "against": against,
            "ratio": settled["auto"] / settled["best"],
            "bound": 1.05,
        },
        {
            "what": f'{what}, microbatch="auto", a run of {NUM_STEPS} steps, estimate and tuning included',
            "against": against,
            "ratio": sum(seconds["auto"]) / sum(seconds["best"]),
            "bound": 1.05,
        },
        {
            "what": f"{what}, the slowest size of the sweep",
            "against": against,
            "ratio": max(swept.values()) / swept[best],
            "bound": None,
        },
    ]


if __name__ == "__main__":
    show(measure())
