"""What the user sees while a run goes on: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from accumulus import Precision
from accumulus.run import schedule
from accumulus.run.cut import Cut, describe_record
from accumulus.run.task import Task
from accumulus.units import format_count, format_duration, format_rate

SECONDS_BETWEEN_LINES = 5.0


class Display(ABC):
    """Shows a run. What is common: plain sentences above or between the moving parts.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unit = "samples"
        self.main_number = "loss"
        self._last_choice: tuple[Any, ...] = ()
        self._said_choice: tuple[Any, ...] = ()

    def say(self, text: str) -> None:
        """Prints a text as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stopping(self, signal_name: str) -> None:
        """Says that the request to stop was heard."""
        self.say(f"{signal_name}: finishing this step, then saving; once more stops at once")

    def describe(
        self, folder: Path, task: Task, *, precision: Precision, device: torch.device, cut: Cut | None = None
    ) -> None:
        """Says what is about to be trained, on what, and where it is written.

        Args:
            folder: the run folder.
            task: what is trained.
            precision: in which precision.
            device: on which device.
            cut: how its batches are cut.
        """
        self.unit = task.unit
        self.main_number = next(iter(task.derived), "loss")
        num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
        num_heldout = 0 if task.eval_data is None else len(task.eval_data)
        self.say(
            f"model {format_count(num_parameters)} parameters; {len(task.train_data):,} samples to learn from, "
            f"{num_heldout:,} held out"
        )
        reason = f" ({precision.reason})" if precision.reason else ""
        self.say(f"device {device}, precision {precision}{reason}")
        if cut is not None:
            self.say(f"micro-batches {cut.describe()}")
        self.say(f"run folder {folder}")

    def show_heldout(self, record: Mapping[str, Any]) -> None:
        """Says a held-out measurement."""
        main = next((name for name in (self.main_number, "loss") if name in record), None)
        names = [name for name in record if name not in ("step", "seconds")] if main is None else [main]
        shown = ", ".join(f"{words(name)} {record[name]:.4f}" for name in names)
        self.say(f"step {record['step']:>5}  held-out {shown}")

    def show_choice(self, record: Mapping[str, Any]) -> None:
        """Says the micro-batch size that was chosen, once it has stayed the same for two steps, and when it changes.

        Args:
            record: of a step. While sizes are tried, every step's differs, and nothing is said.
        """
        if "microbatch_reason" not in record:
            return
        choice = tuple(record[name] for name in ("microbatch", "microbatch_unit", "microbatch_reason"))
        if choice == self._last_choice and choice != self._said_choice:
            self.say(f"step {record['step']:>5}  micro-batches of {describe_record(record)}")
            self._said_choice = choice
        self._last_choice = choice

    @abstractmethod
    def show_step(self, record: Mapping[str, Any], progress: schedule.Progress) -> None:
        """Shows the record of a step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(  # noqa: B027  # nothing to close unless a subclass holds something
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def numbers(self, record: Mapping[str, Any]) -> str:
        """The numbers of a step in one line of less than 80 characters."""
        parts = [f"loss {record['loss']:.4f}"]
        if self.main_number != "loss":
            parts.append(f"{words(self.main_number)} {record[self.main_number]:.3f}")
        parts.append(format_rate(record["tokens_per_second"], self.unit))
        if record["loss_scale"] != 1:
            parts.append(f"scale {record['loss_scale']:g}")
        if record["grad_norm"] is not None:
            parts.append(f"grad {record['grad_norm']:.3g}")
        return "  ".join(parts)


class PlainDisplay(Display):
    """One line every few seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._next_line = 0.0

    def show_step(self, record: Mapping[str, Any], progress: schedule.Progress) -> None:
        """Prints the first step, the last one, and one every few seconds."""
        now = time.monotonic()
        if now < self._next_line and progress.ratio() < 1:
            return
        self._next_line = now + SECONDS_BETWEEN_LINES
        left = format_duration(progress.seconds_left())
        skipped = f"skipped {record['num_skipped']}"
        self.say(f"step {record['step']:>5}  {self.numbers(record)}  {skipped}  left {left}")


class BarDisplay(Display):
    """Two lines at the bottom of the terminal, redrawn after every step: how far, and the step's numbers."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("left {task.fields[left]}", style="cyan"),
            TextColumn("skipped {task.fields[num_skipped]}"),
            console=console,
        )
        self._task = self._bar.add_task("train", total=1.0, step=0, left="unknown", num_skipped=0)
        self._numbers = "starting"
        self._live = Live(get_renderable=self._two_lines, console=console)

    def _two_lines(self) -> Group:
        return Group(self._bar, Text(self._numbers, no_wrap=True, overflow="ellipsis"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show_step(self, record: Mapping[str, Any], progress: schedule.Progress) -> None:
        """Redraws both lines."""
        self._numbers = self.numbers(record)
        self._bar.update(
            self._task,
            completed=progress.ratio(),
            step=record["step"],
            num_skipped=record["num_skipped"],
            left=format_duration(progress.seconds_left()),
        )


def choose_display(*, plain: bool) -> Display:
    """A bar on a terminal; lines elsewhere.

    Args:
        plain: lines on a terminal too.

    Returns:
        A display that writes to standard output.
    """
    console = Console(file=sys.stdout)
    return PlainDisplay(console) if plain or not console.is_terminal else BarDisplay(console)


def words(name: str) -> str:
    """A record's name as words."""
    return name.replace("_", " ")
