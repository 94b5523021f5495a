"""From a configuration to everything that a run needs, made and checked before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accumulus import Precision, TrainStep, by_tokens, memory
from accumulus.dist.process import this_process
from accumulus.errors import MemoryLimitError, PrecisionError, UnsupportedError, UsageError
from accumulus.run.batches import Batches
from accumulus.run.checkpoint import load_state
from accumulus.run.config import TaskConfig, TrainConfig, check_resumed, read_config
from accumulus.run.cut import AUTO, SAMPLES
from accumulus.run.machine import choose_device, describe_environment
from accumulus.run.parts import Run, collate_of
from accumulus.run.record import make_folder, plan_folder
from accumulus.run.schedule import Progress, WarmupCosine, set_peak_rate
from accumulus.run.task import Task, load_task, make_optimizer


def build(config: TrainConfig) -> Run:
    """Makes a new run, or loads the one to go on with, and then its folder.

    Args:
        config: what to do.

    Returns:
        The run, at its first step or where the earlier one stopped.

    Raises:
        UsageError: the configuration, the task, the data or the folder cannot be used. Nothing was written then.
    """
    config.validate()
    refuse_ranks()
    folder = resumed_folder(config) if config.resume else plan_folder(config.out, config.task)
    run = make_run(config, folder)
    if config.resume:
        load_state(run, folder)
        refuse_finished(run)
    make_folder(
        folder,
        config_toml=config.stored().to_toml(),
        environment=describe_environment(run.device, run.precision),
    )
    return run


def make_run(config: TrainConfig, folder: Path) -> Run:
    """Makes the parts in the order in which they depend on each other; writes nothing.

    Args:
        config: what to do; valid.
        folder: where the run will write.

    Returns:
        A run before its first step.

    Raises:
        UsageError: a part cannot be made from what was asked.
    """
    memory_limit = choose_limit(config.memory_limit)
    device = choose_device(config.device)
    task = seeded_task(config, device)
    precision = choose_precision(config.precision, device)
    optimizer = make_optimizer(config.task, task)
    if config.lr is not None:
        set_peak_rate(optimizer, config.lr)
    max_steps, max_seconds = config.limits()
    progress = Progress(max_steps=max_steps, max_seconds=max_seconds)
    schedule = WarmupCosine(optimizer, warmup=config.warmup, progress=lambda: progress.ratio(ahead=1))
    if config.compile:
        task.model.compile()  # in place: the names in its state stay as they are
    batches = Batches(task.train_data, batch_size=config.batch_size, seed=config.seed, length=task.length)
    return Run(
        config=config,
        folder=folder,
        task=task,
        device=device,
        precision=precision,
        optimizer=optimizer,
        schedule=schedule,
        progress=progress,
        batches=batches,
        step=make_step(
            config,
            task,
            optimizer=optimizer,
            schedule=schedule,
            precision=precision,
            microbatch=choose_microbatch(config, task),
            memory_limit=memory_limit,
        ),
    )


def seeded_task(config: TaskConfig, device: torch.device) -> Task:
    """Loads the task with first parameters that depend on the seed only, and moves its model to the device."""
    torch.manual_seed(config.seed)
    task = load_task(config.task, config.task_options())
    task.model.to(device)  # its modes stay: a task may have frozen a BatchNorm
    return task


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision by its name; "auto" looks at the device.

    Args:
        name: as on the command line.
        device: where the model computes.

    Returns:
        One that the device has.

    Raises:
        UsageError: it is unknown, or this device does not have it.
    """
    try:
        precision = Precision.parse(name, device)
        precision.region(device)
    except (PrecisionError, UnsupportedError) as error:
        raise UsageError(f"--precision {name}: {error}") from None
    return precision


def choose_microbatch(config: TrainConfig, task: Task) -> Any:
    """What `TrainStep(microbatch=...)` takes.

    Args:
        config: says how batches are cut.
        task: its `length` counts tokens.

    Returns:
        A number of samples, "auto" or a rule.

    Raises:
        UsageError: tokens are asked for, and the task does not say how long its samples are.
    """
    cut = config.cut()
    if cut.unit == SAMPLES:
        return AUTO if cut.size is None else cut.size
    if task.length is None:
        raise UsageError(
            f"--microbatch {config.microbatch}: task {config.task!r} does not say how long a sample is; give its "
            "acc.Task a length=, or --microbatch a number of samples"
        )
    return by_tokens(AUTO if cut.size is None else cut.size, length=task.length)


def choose_limit(text: str) -> int | None:
    """The bytes that `--memory-limit` stands for; None for "auto".

    Raises:
        UsageError: it is no amount of memory.
    """
    try:
        return None if text == AUTO else memory.parse_bytes(text)
    except MemoryLimitError as error:
        raise UsageError(f"--memory-limit {text}: {error}") from None


def make_step(
    config: TaskConfig,
    task: Task,
    *,
    optimizer: Any,
    schedule: WarmupCosine,
    precision: Precision,
    microbatch: Any,
    memory_limit: int | None = None,
) -> TrainStep:
    """The training step.

    Args:
        config: clipping, and the task's name for messages.
        task: model, loss and collation.
        optimizer: over the model's parameters.
        schedule: stepped once per applied step.
        precision: what to compute in.
        microbatch: as `TrainStep` takes it.
        memory_limit: bytes, where the micro-batch is chosen; None: what is there.

    Returns:
        A step that takes a list of samples.

    Raises:
        UsageError: the parts do not fit each other, or this kind of process is not supported.
    """
    try:
        return TrainStep(
            task.model,
            optimizer,
            task.loss_fn,
            precision=precision,
            microbatch=microbatch,
            max_grad_norm=config.max_grad_norm,
            scheduler=schedule,
            collate=collate_of(task),
            memory_limit=memory_limit,
            on_empty="skip",  # one empty batch must not end a long run; it is counted as skipped
        )
    except (ValueError, UnsupportedError) as error:  # the core's complaints about what it was given
        raise UsageError(f"task {config.task!r}: {error}") from error


def resumed_folder(config: TrainConfig) -> Path:
    """The folder of the run to go on with.

    Args:
        config: with `resume`.

    Returns:
        An existing run folder.

    Raises:
        UsageError: no run is there, or the configuration does not go on with it.
    """
    folder = Path(str(config.resume))
    if config.out is not None:
        raise UsageError(f"--out {config.out}: a resumed run writes to its own folder; leave --out away")
    check_resumed(read_config(folder), config)
    return folder


def refuse_ranks() -> None:
    """Raises `UsageError` where torchrun started several processes, which would all write to the same folder."""
    num_ranks = this_process().num_ranks
    if num_ranks > 1:
        raise UsageError(f"{num_ranks} ranks (WORLD_SIZE): several ranks come with a later version; run one process")


def refuse_finished(run: Run) -> None:
    """Raises `UsageError` where a resumed run has nothing left to do."""
    if run.progress.ratio() < 1:
        return
    progress = run.progress
    by_steps = progress.max_steps is not None and progress.num_steps >= progress.max_steps
    reached = f"--steps {progress.max_steps}" if by_steps else f"--minutes {(progress.max_seconds or 0) / 60:g}"
    raise UsageError(f"--resume {run.folder}: all is done, {reached} was reached; give a larger one to go on")
