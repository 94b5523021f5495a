"""`train`: the main job. Read this file first."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accumulus.errors import CorruptStepError
from accumulus.memory.failure import is_out_of_memory
from accumulus.run.build import build
from accumulus.run.checkpoint import STATE_FILE, save_state
from accumulus.run.config import TrainConfig
from accumulus.run.cut import SAMPLES, microbatch_option
from accumulus.run.display import Display, choose_display
from accumulus.run.evaluate import mean_loss, modes_kept
from accumulus.run.machine import peak_bytes
from accumulus.run.parts import Run
from accumulus.run.record import METRICS_FILE, Recorder, read_records
from accumulus.run.stop import StopRequest
from accumulus.run.summary import show_summary, summarize

FIRST_EVALUATION_SIZE = 8
"""Samples that are evaluated at a time before a size is chosen: without a graph they take little, and no step has
told yet what fits."""


def train(config: TrainConfig) -> int:
    """Trains a task: steps, records, held-out measurements, a state to go on from, a summary.

    Args:
        config: what to do.

    Returns:
        The exit code: 0 when the run went to its end, 1 when no step of it was applied, 128 plus the signal's number
        when it was stopped.

    Raises:
        UsageError: bad input; nothing was written.
        AccumulusError: the training cannot go on. The state is saved.
        CorruptStepError: parameters are not to be trusted, so an earlier state stays as it is.
        KeyboardInterrupt: a second Ctrl-C.
    """
    run = build(config)
    display = choose_display(plain=config.plain)
    display.describe(run.folder, run.task, precision=run.precision, device=run.device, cut=config.cut())
    last_step = run.progress.num_steps or -1  # before the first step even the first measurement is made again
    with Recorder(run.folder, last_step=last_step) as recorder, StopRequest(display.stopping) as stop:
        try:
            with display:
                run_steps(run, recorder, display=display, stop=stop)
        except CorruptStepError:
            say_broken(run, display)
            raise
        except Exception as error:
            save_state(run, run.folder)
            display.say(f"step {run.progress.num_steps + 1} failed; the state before it is saved in {run.folder}")
            if is_out_of_memory(error) and config.cut().size is not None:
                display.say(f"memory ran out; go on in what there is: {resume_command(run.folder)} --microbatch auto")
            raise
        save_state(run, run.folder)
    if stop.signal is not None and run.progress.ratio() < 1:
        display.say(f"stopped after step {run.progress.num_steps}; go on with: {resume_command(run.folder)}")
        return 128 + stop.signal
    finish(run, display)
    if run.progress.num_skipped == run.progress.num_steps:
        display.say(
            "no step was applied: every gradient was NaN or infinite, or every batch empty; nothing was learned"
        )
        return 1
    return 0


def run_steps(run: Run, recorder: Recorder, *, display: Display, stop: StopRequest) -> None:
    """Steps until the run is over or asked to stop.

    Args:
        run: at its first step, or where an earlier one stopped.
        recorder: gets a record of every step and of every held-out measurement.
        display: shows them.
        stop: the request to stop.
    """
    run.progress.start_clock()
    measured_at = 0  # the step of the last measurement
    record: dict[str, Any] = {}
    if run.progress.num_steps == 0:
        measure_heldout(run, recorder, display, last=record)
    while run.progress.ratio() < 1 and stop.signal is None:
        record = take_step(run)
        recorder.add_step(record)
        display.show_choice(record)
        display.show_step(record, run.progress)
        if run.progress.eval_is_due(run.config.num_evals):
            measure_heldout(run, recorder, display, last=record)
            measured_at = run.progress.num_steps
    # A run that was resumed for longer has made its planned measurements; what it ends with still wants one.
    if stop.signal is None and run.config.num_evals and measured_at != run.progress.num_steps:
        measure_heldout(run, recorder, display, last=record)


def take_step(run: Run) -> dict[str, Any]:
    """One optimizer step.

    Args:
        run: changed in place: parameters, optimizer, schedule, progress.

    Returns:
        The step's record, plain numbers only.
    """
    started = time.perf_counter()
    result = run.step(run.batches[run.progress.num_steps]).to_dict()  # reading it waits for the device, once
    run.step.settle()  # the schedule asks how far the run is, so it must advance before the step is counted
    step_seconds = time.perf_counter() - started
    run.progress.end_step(applied=result["applied"])
    weight = result["weight"]
    # What comes back for each sample is the caller's to keep: a record stays one short line.
    metrics = {name: value for name, value in result["metrics"].items() if not isinstance(value, list)}
    # Of several terms the first one's: counts of tokens and of samples do not add up to anything.
    num_tokens = next(iter(weight.values())) if isinstance(weight, Mapping) else weight
    return {
        "step": run.progress.num_steps,
        "loss": result["loss"],
        **derived_numbers(run, result["loss"]),
        **{name: result[name] for name in ("grad_norm", "clipped", "loss_scale", "all_finite", "applied", "lr")},
        "num_tokens": num_tokens,
        **{name: result[name] for name in ("num_samples", "num_microbatches")},
        **run.config.cut().to_record(result["choice"]),
        **({"metrics": metrics} if metrics else {}),
        "step_seconds": step_seconds,
        "tokens_per_second": num_tokens / step_seconds,
        "peak_bytes": peak_bytes(run.device),
        "num_skipped": run.progress.num_skipped,
    }


def measure_heldout(run: Run, recorder: Recorder, display: Display, *, last: Mapping[str, Any]) -> None:
    """Measures the held-out data, where the task has some.

    Args:
        run: its parameters stay as they are.
        recorder: gets the record.
        display: shows it.
        last: the record of the last step, whose micro-batch size is used; empty before the first one.
    """
    task = run.task
    if task.eval_data is None:
        return
    if task.evaluate is not None:
        with modes_kept(task.model):
            measured = task.evaluate(task.model, task.eval_data)
        numbers = {name: float(value) for name, value in measured.items()}
    else:
        size, unit = evaluation_size(run, last)
        loss = mean_loss(
            task.model,
            task.eval_data,
            loss_fn=task.loss_fn,
            collate=run.collate,
            batch_size=size,
            length=None if unit == SAMPLES else task.length,
            precision=run.precision,
            device=run.device,
        )
        numbers = {"loss": loss}
    if "loss" in numbers:
        numbers |= derived_numbers(run, numbers["loss"])
    record = {"step": run.progress.num_steps, "seconds": run.progress.elapsed_seconds(), **numbers}
    recorder.add_heldout(record)
    display.show_heldout(record)


def evaluation_size(run: Run, last: Mapping[str, Any]) -> tuple[int, str]:
    """How much held-out data goes through the model at a time: as much as in training, which takes more memory.

    Args:
        run: says how batches are cut.
        last: the record of the last step; empty before the first one.

    Returns:
        A number, and whether it counts samples or tokens.
    """
    cut = run.config.cut()
    if last:
        return last["microbatch"], last["microbatch_unit"]
    return (FIRST_EVALUATION_SIZE, SAMPLES) if cut.size is None else (cut.size, cut.unit)


def derived_numbers(run: Run, loss: float) -> dict[str, float]:
    """What the task computes from a mean loss; NaN where its function cannot."""
    numbers: dict[str, float] = {}
    for name, function in run.task.derived.items():
        try:
            numbers[name] = float(function(loss))
        except (OverflowError, ValueError):  # exp of a large loss, log of a negative one
            numbers[name] = math.nan
    return numbers


def finish(run: Run, display: Display) -> None:
    """Shows what came out, and what the model can do."""
    show_summary(display.console, summarize(run.folder), unit=run.task.unit)
    if run.config.cut().size is None:
        display.say(f"with this micro-batch from the start, and the same every time: {repeat_command(run)}")
    if run.task.sample is not None:
        run.task.model.eval()
        display.say(f"\nthe model writes:\n{run.task.sample(run.task.model)}")


def say_broken(run: Run, display: Display) -> None:
    """Says that a step broke off half way, and where a good state is, if anywhere."""
    display.say(
        f"step {run.progress.num_steps + 1} broke off inside the optimizer's update; its parameters are not to be "
        "trusted and are not saved"
    )
    if (run.folder / STATE_FILE).exists():
        display.say(f"the last good state stays in {run.folder}; go on with: {resume_command(run.folder)}")
    else:
        display.say("no state was saved before it; start the run anew, with a smaller --microbatch")


def repeat_command(run: Run) -> str:
    """What to type for a run like this one whose micro-batches do not depend on timing."""
    (*_, last) = read_records(run.folder / METRICS_FILE)
    words = run.config.repeat_words(microbatch=microbatch_option(last), num_steps=run.progress.num_steps)
    return shlex.join(["accumulus", "train", *words])


def resume_command(folder: Path) -> str:
    """What to type to go on."""
    shown = str(folder)
    return f"accumulus train --resume {shown!r}" if " " in shown else f"accumulus train --resume {shown}"
