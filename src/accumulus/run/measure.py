"""One case of the benchmark, measured in the process that it has to itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from accumulus import to_device
from accumulus.errors import UsageError
from accumulus.run.batches import Batches
from accumulus.run.bench_config import BenchConfig
from accumulus.run.build import choose_precision, make_step, seeded_task
from accumulus.run.cases import Case
from accumulus.run.evaluate import terms_of
from accumulus.run.machine import choose_device, describe_environment, peak_bytes, resident_bytes
from accumulus.run.parts import collate_of
from accumulus.run.schedule import WarmupCosine, set_peak_rate
from accumulus.run.task import Task, make_optimizer

WARMUP_STEPS = 10
RESET_PEAK = Path("/proc/self/clear_refs")

Step = Callable[[list[Any]], tuple[float, bool]]
"""From a batch of samples to its mean loss and whether it was applied."""


def measure(config: BenchConfig, case: Case) -> dict[str, Any]:
    """Trains a few steps and measures them.

    Args:
        config: the task and its sizes.
        case: precision, cut and whose loop.

    Returns:
        `samples_per_second`, `step_seconds` (each measured step), `peak_bytes` (on the CPU: above what was resident
        when the task was loaded), `loss` (the last step's), `num_skipped` and the environment.

    Raises:
        AccumulusError: the task or the case cannot run.
    """
    device = choose_device(config.device)
    task = seeded_task(config, device)
    batches = Batches(task.train_data, batch_size=config.batch_size, seed=config.seed, length=task.length)
    before_bytes = start_of_memory(device)
    step = make_case(config, case, task, device)
    step_seconds, speeds, num_skipped, loss = [], [], 0, float("nan")
    for number in range(config.steps + 1):
        batch = batches[number]
        started = time.perf_counter()
        loss, applied = step(batch)
        step_seconds.append(time.perf_counter() - started)
        speeds.append(len(batch) / step_seconds[-1])
        num_skipped += not applied
    return {
        "samples_per_second": median(speeds[1:]),  # the first step makes optimizer state and warms up
        "step_seconds": step_seconds[1:],
        "peak_bytes": max(0, peak_bytes(device) - before_bytes),
        "loss": loss,
        "num_skipped": num_skipped,
        "environment": describe_environment(device, choose_precision(case.precision, device)),
    }


def start_of_memory(device: torch.device) -> int:
    """Starts measuring the peak; returns what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # not Linux, or not allowed: the peak so far then counts too, as an upper bound
        RESET_PEAK.write_text("5")
    return resident_bytes()


def make_case(config: BenchConfig, case: Case, task: Task, device: torch.device) -> Step:
    """The step of a case.

    Args:
        config: sizes and clipping.
        case: which one.
        task: its model on the device.
        device: where it computes.

    Returns:
        A function that learns from one batch.

    Raises:
        UsageError: the optimizer or the precision does not fit.
    """
    optimizer = make_optimizer(config.task, task)
    if config.lr is not None:
        set_peak_rate(optimizer, config.lr)
    schedule = WarmupCosine(optimizer, warmup=WARMUP_STEPS, progress=lambda: 0.0)
    if case.is_plain:
        return plain_loop(config, case, task=task, optimizer=optimizer, schedule=schedule, device=device)
    precision = choose_precision(case.precision, device)
    train_step = make_step(
        config,
        task,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        microbatch=case.microbatch,
    )

    def step(batch: list[Any]) -> tuple[float, bool]:
        result = train_step(batch).to_dict()
        return result["loss"], result["applied"]

    return step


def plain_loop(
    config: BenchConfig,
    case: Case,
    *,
    task: Task,
    optimizer: Any,
    schedule: WarmupCosine,
    device: torch.device,
) -> Step:
    """What one writes by hand to get the same update in float32, and nothing of this library.

    Args:
        config: clipping.
        case: samples of a micro-batch.
        task: model and loss.
        optimizer: over the model's parameters.
        schedule: of its learning rate.
        device: where it computes.

    Returns:
        A function that learns from one batch.
    """
    parameters = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    collate = collate_of(task)

    def step(batch: list[Any]) -> tuple[float, bool]:
        loss_sum, weight = 0.0, 0.0
        for start in range(0, len(batch), case.microbatch):
            samples = batch[start : start + case.microbatch]
            terms = terms_of(task.loss_fn(task.model, to_device(collate(samples), device)), len(samples))
            if len(terms) > 1:
                raise UsageError("several loss terms: the plain loop knows one; read the other rows")
            (loss,) = terms.values()
            torch.autograd.backward(loss.sum)
            loss_sum += float(loss.sum.detach())
            weight += float(loss.weight)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= weight
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss_sum / weight, True

    return step
