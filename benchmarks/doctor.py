"""What watching ranges costs a training step: on, and after it has been removed.

The built-in task: forward, backward, clip and AdamW; a watch on every module, parameter and optimizer step, with
the sample that `diagnose` takes.
"""

from __future__ import annotations

import functools

import torch

import accumulus as acc
from accumulus.run.batches import Batches
from accumulus.run.bytes_task import bytes_task
from timing import Rows, medians, show

BATCH_SIZE, MICROBATCH = 64, 32
SIZES: dict[str, int] = {}  # of the task: its own


def make_step(precision: str) -> tuple[acc.TrainStep, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    task = bytes_task(**SIZES)
    optimizer = task.optimizer(task.model)
    step = acc.TrainStep(
        task.model,
        optimizer,
        task.loss_fn,
        precision=precision,
        microbatch=MICROBATCH,
        max_grad_norm=1.0,
        collate=task.collate,
    )
    return step, task.model, optimizer


def measure(rounds: int = 15) -> Rows:
    precision = str(acc.Precision.parse("auto", "cpu"))
    task = bytes_task(**SIZES)
    batch = Batches(task.train_data, batch_size=BATCH_SIZE, seed=0, length=task.length)[0]
    sides = {}
    for name in ("plain", "watched", "removed"):
        step, model, optimizer = make_step(precision)
        sides[name] = functools.partial(step, batch)
        if name != "plain":
            watch = acc.RangeWatch(model, optimizer)
            if name == "removed":
                watch.remove()
    seconds = medians(sides, rounds=rounds, warmup=2)
    return [
        {
            "what": f"TrainStep on the built-in task in {precision}, {what}",
            "against": "the same step without",
            "ratio": seconds[name] / seconds["plain"],
            "bound": bound,
            "seconds": seconds[name],
        }
        for name, what, bound in (
            ("watched", "ranges of every module counted", 1.5),
            ("removed", "after the watch was removed", 1.05),
        )
    ]


if __name__ == "__main__":
    show(measure())
