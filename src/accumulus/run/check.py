"""`accumulus check`: one batch of a task, whole and in pieces, and the report in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

import accumulus
from accumulus import AccumulusError, EquivalenceReport, by_tokens
from accumulus.errors import UsageError
from accumulus.run.batches import Batches
from accumulus.run.build import choose_precision, seeded_task
from accumulus.run.check_config import CheckConfig
from accumulus.run.check_table import show_report
from accumulus.run.machine import choose_device
from accumulus.run.parts import collate_of
from accumulus.run.task import Task, make_optimizer, one_line


def check(config: CheckConfig) -> int:
    """Checks, prints the report, and writes it where that was asked for.

    Args:
        config: the task, and how much of it.

    Returns:
        The exit code: 0 where accumulation gives the whole batch's update, 1 where it does not.

    Raises:
        UsageError: bad input, or a task that cannot be run. Nothing was printed then.

    Cost:
        A few seconds: some dozens of passes over a small batch, in float64.
    """
    config.validate()
    console = Console()
    with console.status("running the batch whole and in pieces"):
        report = make_report(config)
    show_report(console, config.task, report)
    if config.json is not None:
        write_json(Path(config.json), report)
    return 0 if report else 1


def make_report(config: CheckConfig) -> EquivalenceReport:
    """What there is to say about a task.

    Args:
        config: the task; valid.

    Returns:
        The report.

    Raises:
        UsageError: the task cannot be loaded or run.
    """
    device = choose_device(config.device)
    precision = choose_precision(config.precision, device)
    task = seeded_task(config, device)
    optimizer = make_optimizer(config.task, task)
    batch = first_batch(config, task)
    try:
        return accumulus.check(
            task.model,
            task.loss_fn,
            batch,
            optimizer=optimizer,
            precision=precision,
            splits=splits_of(config, task, batch),
            collate=collate_of(task),
        )
    except AccumulusError as error:
        raise UsageError(f"task {config.task!r}: {error}") from error
    except Exception as error:  # the user's model or loss function
        raise UsageError(f"task {config.task!r}: its loss function failed: {one_line(error)}") from error


def first_batch(config: CheckConfig, task: Task) -> list[Any]:
    """The samples to check with: spread over all lengths where the task says how long a sample is.

    Args:
        config: how many, and the seed that picks them.
        task: its samples.

    Returns:
        A list of samples.

    Raises:
        UsageError: there are fewer than two.
    """
    size = min(config.batch_size, len(task.train_data))
    if size < 2:
        raise UsageError(f"task {config.task!r} has {size} sample, which cannot be split; give it at least 2")
    return list(Batches(task.train_data, batch_size=size, seed=config.seed, length=task.length)[0])


def splits_of(config: CheckConfig, task: Task, batch: list[Any]) -> list[Any]:
    """The ways to cut the batch.

    Args:
        config: may name a size of its own.
        task: may say how long a sample is.
        batch: the samples.

    Returns:
        What `acc.check(splits=...)` takes.
    """
    splits: list[Any] = ["by_count", "uneven", "singles", "reordered"]
    if task.length is not None:
        longest = max(map(task.length, batch))
        splits.append(by_tokens(longest * max(1, len(batch) // 3), length=task.length, multiple_of=1))
    else:
        splits.append("by_tokens")
    if config.microbatch_size() < len(batch):
        splits.append(config.microbatch_size())
    return splits


def write_json(path: Path, report: EquivalenceReport) -> None:
    """Writes the report.

    Args:
        path: the file; replaced.
        report: what to write.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written ({error.strerror}); give another file") from None
