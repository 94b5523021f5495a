"""The run folder: one JSON line per step, held-out lines in a file of their own, the configuration, the machine."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from accumulus.errors import UsageError
from accumulus.run.config import CONFIG_FILE

METRICS_FILE = "metrics.jsonl"
HELDOUT_FILE = "heldout.jsonl"
ENVIRONMENT_FILE = "environment.json"


class Recorder:
    r"""Writes a run's records; each is on the disk when the call returns, so a killed run loses none.

    Args:
        folder: the run folder; it exists.
        last_step: records of later steps are dropped first. They were written by a run that was stopped before
            it could save the state they belong to, and are now made again.

    Raises:
        OSError: the files cannot be written.

    Example:
        >>> with Recorder(Path(tempfile.mkdtemp()), last_step=0) as recorder:
        ...     recorder.add_step({"step": 1, "loss": float("nan")})
        ...     (recorder.folder / "metrics.jsonl").read_text()
        '{"step": 1, "loss": null}\n'
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        self.folder = folder
        self._files = {name: reopen(folder / name, last_step) for name in (METRICS_FILE, HELDOUT_FILE)}

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Appends the record of a step."""
        self._append(METRICS_FILE, record)

    def add_heldout(self, record: Mapping[str, Any]) -> None:
        """Appends a held-out measurement."""
        self._append(HELDOUT_FILE, record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(to_json(record) + "\n")
        self._files[name].flush()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reopen(path: Path, last_step: int) -> TextIO:
    """Opens a file of records for appending, without those after `last_step` and without a half-written line."""
    kept = [record for record in read_records(path) if record["step"] <= last_step]
    path.write_text("".join(to_json(record) + "\n" for record in kept), "utf-8")
    return path.open("a", encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file.

    Args:
        path: `metrics.jsonl` or `heldout.jsonl` of a run.

    Returns:
        Its records, up to the first line that is not whole; none where there is no file.
    """
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # a machine that lost power in the middle of a line
            break
    return records


def to_json(value: Any) -> str:
    """Valid JSON of numbers that may be NaN or infinite: those become null.

    Args:
        value: nested mappings, lists, strings and numbers.

    Returns:
        One line.
    """
    return json.dumps(without_nonfinite(value), allow_nan=False)


def without_nonfinite(value: Any) -> Any:
    """The same value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(item) for item in value]
    return value


def plan_folder(out: str | None, task: str) -> Path:
    """Where a new run will write, if it can. Makes nothing.

    Args:
        out: what the user asked for; None means `runs/TASK-DATE-TIME`.
        task: the task's name.

    Returns:
        A folder that does not exist or is empty.

    Raises:
        UsageError: something is there already, or it cannot be made.
    """
    if out is None:
        name = "".join(letter if letter.isalnum() else "-" for letter in task.rpartition(":")[2])
        folder = unused(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    else:
        folder = Path(out)
        refuse_used(folder)
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written ({error.strerror}); give another folder") from None
    return folder


def refuse_used(folder: Path) -> None:
    """Raises `UsageError` where a run's files would mix with what is there already."""
    if (folder / CONFIG_FILE).exists():
        raise UsageError(f"--out {folder} holds another run; give a new folder, or go on by --resume {folder}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"--out {folder} is not empty; give a new folder")


def unused(folder: Path) -> Path:
    """The folder, or one with a number behind its name: two runs may start in the same second."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def make_folder(folder: Path, *, config_toml: str, environment: Mapping[str, Any]) -> None:
    """Makes the run folder with what is known before the first step.

    Args:
        folder: the run folder.
        config_toml: the run's options.
        environment: the machine and the versions.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(config_toml, "utf-8")
        (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"the run folder {folder} cannot be written ({error.strerror}); give another --out") from None
