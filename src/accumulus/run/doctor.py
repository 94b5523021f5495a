"""`accumulus doctor`: what low precision does to a task's numbers, in the terminal, as JSON and as a page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from accumulus import AccumulusError, NumericsReport, TrainStep, diagnose
from accumulus.errors import UnsupportedError, UsageError
from accumulus.run.batches import Batches
from accumulus.run.build import choose_precision, seeded_task
from accumulus.run.doctor_config import DoctorConfig
from accumulus.run.doctor_table import show_report
from accumulus.run.machine import choose_device
from accumulus.run.parts import collate_of
from accumulus.run.plan import write_json
from accumulus.run.schedule import set_peak_rate
from accumulus.run.task import Task, make_optimizer, one_line

HALF = (torch.float16, torch.bfloat16)


def doctor(config: DoctorConfig) -> int:
    """Diagnoses a task, prints what was found, and writes the files that were asked for.

    Args:
        config: the task and the precision.

    Returns:
        The exit code: 1 where there is a finding.

    Raises:
        UsageError: bad input. Nothing was printed then.
    """
    config.validate()
    if config.page is not None:
        require_page()
    console = Console()
    with console.status("loading the task"):
        device = choose_device(config.device)
        task = seeded_task(config, device)
        subject, options = make_subject(config, task, device)
        batches = Batches(task.train_data, batch_size=config.batch_size, seed=config.seed, length=task.length)
        steps = config.steps
    with console.status(f"running {steps} steps on copies of the model"):
        report = look(config, subject, [batches[index] for index in range(steps)], options)
    show_report(console, report, task=config.task, num_rows=config.rows)
    if config.json is not None:
        write_json(Path(config.json), report)
    if config.page is not None:
        write_page(Path(config.page), report)
    return 1 if report.findings else 0


def make_subject(config: DoctorConfig, task: Task, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """What is diagnosed: a step over the task's model, or the model itself where its parameters are 16-bit.

    Args:
        config: precision, micro-batch and clipping.
        task: the task, its model on the device.
        device: where.

    Returns:
        A step or model, and what `diagnose` must be told besides.

    Raises:
        UsageError: the parts do not fit each other.
    """
    optimizer = make_optimizer(config.task, task)
    if config.lr is not None:
        set_peak_rate(optimizer, config.lr)
    if any(parameter.dtype in HALF for parameter in task.model.parameters()):
        return task.model, {
            "loss_fn": task.loss_fn,
            "optimizer": optimizer,
            "microbatch": config.microbatch_size(),
            "collate": collate_of(task),
        }
    try:
        step = TrainStep(
            task.model,
            optimizer,
            task.loss_fn,
            precision=choose_precision(config.precision, device),
            microbatch=config.microbatch_size(),
            max_grad_norm=config.max_grad_norm,
            collate=collate_of(task),
            on_empty="skip",
        )
    except (ValueError, UnsupportedError) as error:
        raise UsageError(f"task {config.task!r}: {error}") from error
    return step, {}


def look(config: DoctorConfig, subject: Any, batches: list[Any], options: dict[str, Any]) -> NumericsReport:
    """Runs the diagnosis; whatever stops it becomes one line with the task's name."""
    try:
        return diagnose(subject, batches, max_steps=len(batches), rounds=config.rounds, **options)
    except AccumulusError as error:
        raise UsageError(f"task {config.task!r}: {error}") from error
    except Exception as error:  # the user's model or loss function; exit code 1 would say that there is a finding
        raise UsageError(f"task {config.task!r}: its loss function failed: {one_line(error)}") from error


def require_page() -> None:
    """Raises `UsageError` where the drawing packages are not installed."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise UsageError(f"--page needs {' and '.join(missing)}; install them with: pip install 'accumulus[plot]'")


def write_page(path: Path, report: NumericsReport) -> None:
    """Writes the page.

    Args:
        path: the file; replaced.
        report: what was found.

    Raises:
        UsageError: it cannot be written.
    """
    content = report.to_page()
    try:
        path.write_text(content, "utf-8")
    except OSError as error:
        raise UsageError(f"--page {path} cannot be written ({error.strerror}); give another file") from None
