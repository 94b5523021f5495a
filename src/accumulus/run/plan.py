"""`accumulus plan`: peak memory by precision and micro-batch, before anything is trained, and what to choose."""

from __future__ import annotations

import heapq
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from accumulus import AccumulusError, NumericsReport, Precision, PrecisionError, memory
from accumulus.errors import UsageError
from accumulus.run.batches import Batches
from accumulus.run.build import choose_precision
from accumulus.run.parts import collate_of
from accumulus.run.plan_config import PlanConfig
from accumulus.run.plan_measures import Job, explain_shortfall
from accumulus.run.plan_result import Plan
from accumulus.run.plan_rows import Choice, choose, make_rows
from accumulus.run.plan_table import show_plan
from accumulus.run.plan_target import Target, find_target
from accumulus.run.task import Task, load_task, make_optimizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is estimated: a task, its optimizer, and the batch that needs most."""

    spec: str
    task: Task
    optimizer: Any
    batch: list[Any]
    device: torch.device

    def curve(self, precision: str) -> memory.MemoryCurve:
        """Peak over micro-batch."""
        return memory.curve(
            self.task.model,
            self.optimizer,
            self.task.loss_fn,
            self.batch,
            precision=precision,
            largest=len(self.batch),
            collate=collate_of(self.task),
            device=self.device,
        )

    def estimate(self, model: nn.Module, optimizer: Any, precision: str) -> memory.MemoryEstimate:
        """What one sample needs, with this model or a changed one."""
        return memory.estimate(
            model,
            optimizer,
            self.task.loss_fn,
            self.batch,
            precision=precision,
            microbatch=1,
            collate=collate_of(self.task),
            device=self.device,
        )


def plan(config: PlanConfig) -> int:
    """Estimates, prints the table, the picture and the recommendation, and writes the files that were asked for.

    Args:
        config: the task and the memory to fit into.

    Returns:
        The exit code: 1 where not even one sample fits.

    Raises:
        UsageError: bad input. Nothing was printed then.

    Cost:
        A few seconds: one curve for each precision, on tensors without data. No parameter is changed or moved.
    """
    config.validate()
    if config.picture is not None:
        from accumulus.run.plan_picture import require_charts

        require_charts()
    console = Console()
    with console.status("loading the task and finding its longest samples") as status:
        found = make_plan(config, report=status.update)
    show_plan(console, found)
    if config.json is not None:
        write_json(Path(config.json), found)
    if config.picture is not None:
        from accumulus.run.plan_picture import write_picture

        write_picture(Path(config.picture), found)
    return 1 if found.choice is None else 0


def make_plan(config: PlanConfig, *, report: Callable[[str], object] = str) -> Plan:
    """All that there is to say about a task's memory.

    Args:
        config: the task and the memory to fit into; valid.
        report: is told what is being done.

    Returns:
        The plan.

    Raises:
        UsageError: the task, the device or the memory cannot be used.
    """
    target = find_target(config)
    subject, batch_note = make_subject(config, target)
    with complaints(config.task):
        curves, notes = make_curves(config, subject, target, report=report)
        rows = make_rows(curves, target.limit, batch_size=config.batch_size, asked=config.microbatch_size())
        choice = choose(
            rows,
            curves,
            target.limit,
            fast=str(target.fast),
            fast_reason=target.fast.reason,
            batch_size=config.batch_size,
        )
        shortfall = None
        if choice is None:
            report("nothing fits: estimating what would help")
            shortfall = explain_shortfall(unfit_job(subject, curves), target.limit)
    return Plan(
        task=config.task,
        batch_size=config.batch_size,
        device=target.name,
        kernels=target.kernels,
        limit=target.limit,
        rows=rows,
        choice=None if choice is None else with_command(choice, config, target),
        shortfall=shortfall,
        notes=(batch_note, target.kernels, *method_notes(curves), *notes),
    )


def unfit_job(subject: Subject, curves: Mapping[str, memory.MemoryCurve]) -> Job:
    """What does not fit, in the precision that needs least.

    Args:
        subject: what was estimated.
        curves: its peaks, which need not be estimated again.

    Returns:
        The job.
    """
    known = {precision: curve.at(1) for precision, curve in curves.items()}

    def estimate(model: nn.Module, optimizer: Any, precision: str) -> memory.MemoryEstimate:
        is_known = model is subject.task.model and optimizer is subject.optimizer and precision in known
        return known[precision] if is_known else subject.estimate(model, optimizer, precision)

    return Job(
        model=subject.task.model,
        optimizer=subject.optimizer,
        precision=min(known, key=lambda name: known[name].peak_bytes),
        estimate=estimate,
    )


def make_subject(config: PlanConfig, target: Target) -> tuple[Subject, str]:
    """The task with its optimizer and the batch that needs most; nothing is moved to the device.

    Args:
        config: the task.
        target: whose kernels count.

    Returns:
        The subject, and a sentence about its batch.

    Raises:
        UsageError: the task cannot be loaded, or has too few samples.
    """
    torch.manual_seed(config.seed)
    task = load_task(config.task, config.task_options())
    batch, note = heaviest_batch(config, task)
    return (
        Subject(
            spec=config.task,
            task=task,
            optimizer=make_optimizer(config.task, task),
            batch=batch,
            device=target.device,
        ),
        note,
    )


def heaviest_batch(config: PlanConfig, task: Task) -> tuple[list[Any], str]:
    """The batch for which the plan must hold.

    Args:
        config: its size.
        task: its samples.

    Returns:
        The longest samples, longest first, where the task says how long a sample is; else the first step's batch. And
        a sentence that says which.

    Raises:
        UsageError: there are fewer samples.

    Cost:
        Where the task has a `length`, every sample is read once.
    """
    data, size = task.train_data, config.batch_size
    if size > len(data):
        raise UsageError(
            f"--batch-size {size} is more than the {len(data)} samples of task {config.task!r}; make it smaller"
        )
    if task.length is None:
        first = Batches(data, batch_size=size, seed=config.seed)[0]
        return first, "Estimated for the first step's batch; other batches need more only if their samples are larger."
    length = task.length
    longest = heapq.nlargest(size, range(len(data)), key=lambda index: length(data[index]))
    return [data[index] for index in longest], f"Estimated for the {size} longest samples, so it holds for every batch."


def make_curves(
    config: PlanConfig, subject: Subject, target: Target, *, report: Callable[[str], object]
) -> tuple[dict[str, memory.MemoryCurve], list[str]]:
    """Peak over micro-batch for each precision that can be used.

    Args:
        config: the precisions.
        subject: what is estimated.
        target: what "auto" stands for, and whose kernels count.
        report: is told which precision comes next.

    Returns:
        Curves by precision, and a sentence for each precision that is left out.

    Raises:
        UsageError: none of the precisions can be used.
    """
    asked = [str(target.fast) if name == "auto" else name for name in config.precisions]
    curves: dict[str, memory.MemoryCurve] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(asked):
        try:
            report(f"estimating {name}")
            usable_precision(name, target).check(subject.task.model)
            curves[name] = subject.curve(name)
        except (PrecisionError, UsageError) as error:
            left_out[name] = f"{name} is left out: {error}"
    if not curves:
        raise UsageError(next(iter(left_out.values())))
    return curves, list(left_out.values())


def usable_precision(name: str, target: Target) -> Precision:
    """The precision of that name, if the device, as far as it is here, has it."""
    return choose_precision(name, target.device) if target.is_here else Precision.parse(name)


def method_notes(curves: Mapping[str, memory.MemoryCurve]) -> list[str]:
    """What the estimates say of themselves, each once, with the precisions that it concerns where not all do."""
    concerned: dict[str, list[str]] = {}
    for name, curve in curves.items():
        concerned.setdefault(curve.at(1).note, []).append(name)
    return [
        sentence(note if len(names) == len(curves) else f"{', '.join(names)}: {note}")
        for note, names in concerned.items()
        if note
    ]


def sentence(text: str) -> str:
    """A clause with a capital letter and a full stop, as the notes beside it have."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


@contextmanager
def complaints(spec: str) -> Iterator[None]:
    """What the library says against a task becomes one line with the task's name."""
    try:
        yield
    except UsageError:
        raise
    except AccumulusError as error:
        raise UsageError(f"task {spec!r}: {error}") from error


def with_command(choice: Choice, config: PlanConfig, target: Target) -> Choice:
    """The choice with what to type."""
    config = config if target.is_here else replace(config, device="auto")
    words = config.train_words(precision=choice.row.precision, microbatch=choice.row.microbatch)
    return replace(choice, command=shlex.join(["accumulus", "train", *words]))


def write_json(path: Path, found: Plan | NumericsReport) -> None:
    """Writes the figures.

    Args:
        path: the file; replaced.
        found: the plan, or another report that turns into plain values.

    Raises:
        UsageError: it cannot be written.
    """
    content: Mapping[str, Any] = found.to_dict()
    try:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written ({error.strerror}); give another file") from None
