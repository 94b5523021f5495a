"""Options of `accumulus check`. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from accumulus.errors import UsageError
from accumulus.run.config import PRECISIONS, Name, TaskConfig, check_file
from accumulus.run.cut import AUTO, read_size


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TaskConfig):
    """Options of `accumulus check`.

    Example:
        >>> CheckConfig(task="mine.py:job", batch_size=8, precision="bf16").validate()
    """

    batch_size: int = 16
    """Samples of the batch that is run whole and in pieces; more of them prove nothing more."""

    microbatch: Annotated[str, tyro.conf.arg(metavar="INT|auto", help_behavior_hint="")] = AUTO
    """One more way to cut the batch: so many samples at a time."""

    precision: str = "fp32"
    """Also tells how far gradients in this precision are from float64, whole and in pieces: bf16, fp16, tf32, auto."""

    json: Name = None
    """A file for the report."""

    def validate(self) -> None:
        """As `TaskConfig.validate`."""
        super().validate()
        self.microbatch_size()
        if self.precision not in PRECISIONS:
            raise UsageError(f"--precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        if self.batch_size < 2:
            raise UsageError(f"--batch-size {self.batch_size}: one sample cannot be split; give at least 2")
        check_file("json", self.json)

    def microbatch_size(self) -> int:
        """The one more size to try; the whole batch where none was given.

        Returns:
            At least 1; at most the batch size.

        Raises:
            UsageError: it is neither "auto" nor a number above zero.
        """
        return self.batch_size if self.microbatch == AUTO else read_size(self.microbatch, batch_size=self.batch_size)
