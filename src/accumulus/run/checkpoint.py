"""The state of a run in one file, written so that a crash leaves the old one or the new one, never half of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accumulus import random_state, set_random_state
from accumulus.errors import UsageError
from accumulus.run.batches import fingerprint
from accumulus.run.machine import device_name
from accumulus.run.parts import Run
from accumulus.run.task import one_line

STATE_FILE = "state.pt"
FORMAT = 1


def save_state(run: Run, folder: Path) -> Path:
    """Saves everything that the steps to come depend on.

    Args:
        run: between two steps.
        folder: the run folder.

    Returns:
        The file; `torch.load(file, weights_only=True)` reads it.

    Raises:
        OSError: it cannot be written; an earlier state is untouched then.

    Cost:
        Waits for the device; one copy of parameters and optimizer state goes to the disk.
    """
    run.step.settle()  # first: it advances the schedule and the learning rates
    state = {
        "format": FORMAT,
        "num_train_samples": len(run.task.train_data),
        "data": fingerprint(run.task.train_data),
        "model": run.task.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "step": run.step.state_dict(),
        "chosen_for": chosen_for(run),
        "progress": run.progress.state_dict(),
        "random": random_state(run.device),
    }
    path = folder / STATE_FILE
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def load_state(run: Run, folder: Path) -> None:
    """Puts a run where a saved one was.

    Args:
        run: made from the same configuration; changed in place.
        folder: a run folder.

    Raises:
        UsageError: there is no state, it cannot be read, or it belongs to something else.
    """
    path = folder / STATE_FILE
    if not path.exists():
        raise UsageError(f"--resume {folder}: no {STATE_FILE} there, so the run was never saved; start it anew")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # what the unpickler raises on rubbish depends on the rubbish
        raise UsageError(f"--resume {folder}: {STATE_FILE} cannot be read; it is damaged or no state") from None
    check_belongs(run, state, folder)
    try:
        run.task.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.schedule.load_state_dict(state["schedule"])
        run.step.load_state_dict(step_state(run, state))
        run.progress.load_state_dict(state["progress"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"--resume {folder}: the state does not fit the task: {one_line(error)}") from error
    set_random_state(state["random"], run.device)


def chosen_for(run: Run) -> dict[str, Any]:
    """What a chosen micro-batch size depends on and a resumed run may change."""
    config = run.config
    return {
        "microbatch": config.microbatch,
        "memory_limit": config.memory_limit,
        "device": device_name(run.device),
        "compile": config.compile,
    }


def step_state(run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of the step; without the chosen micro-batch size, where it was chosen for something else.

    Args:
        run: what goes on.
        state: what was saved.
    """
    keeps = state.get("chosen_for") == chosen_for(run)
    return {name: value for name, value in state["step"].items() if keeps or name != "microbatch"}


def check_belongs(run: Run, state: Any, folder: Path) -> None:
    """Refuses a state that is no state, or that was made on other data.

    Args:
        run: what the state is for.
        state: what was read.
        folder: for messages.

    Raises:
        UsageError: it does not belong to this run.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise UsageError(f"--resume {folder}: {STATE_FILE} is not a state of this version; start a new run")
    before, now = state["num_train_samples"], len(run.task.train_data)
    if before != now:
        raise UsageError(
            f"--resume {folder}: the task had {before} training samples and now has {now}; give it the same data"
        )
    if state["data"] != fingerprint(run.task.train_data):
        raise UsageError(f"--resume {folder}: the training samples have changed since; give it the same data")
