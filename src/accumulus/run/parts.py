"""`Run`: the parts that `build` makes, `loop` puts to work and `checkpoint` saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from accumulus import Precision, TrainStep
from accumulus.run.batches import Batches
from accumulus.run.config import TrainConfig
from accumulus.run.schedule import Progress, WarmupCosine
from accumulus.run.task import Task


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The parts of a run, each with its own job; the loop puts them together."""

    config: TrainConfig
    folder: Path
    task: Task
    device: torch.device
    precision: Precision
    optimizer: Any
    schedule: WarmupCosine
    progress: Progress
    batches: Batches
    step: TrainStep

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Makes a micro-batch from a list of samples."""
        return collate_of(self.task)


def collate_of(task: Task) -> Callable[[list[Any]], Any]:
    """The task's collation, or torch's."""
    return default_collate if task.collate is None else task.collate
