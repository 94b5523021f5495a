"""What `accumulus bench` is asked to do. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from accumulus.run.config import Name, TaskConfig, check_file, check_precisions
from accumulus.run.cut import read_size


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TaskConfig):
    """Options of `accumulus bench`."""

    steps: int = 4
    """Measured steps of each case, after one that is left out."""

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Precisions to compare."""

    json: Name = None
    """A file for the figures."""

    def validate(self) -> None:
        """As `TaskConfig.validate`."""
        super().validate()
        self.microbatch_size()
        check_precisions(self.precisions)
        check_file("json", self.json)

    def microbatch_size(self) -> int:
        """The samples of a micro-batch: at least 1, at most the batch size.

        Raises:
            UsageError: it is not a number above zero.
        """
        return read_size(self.microbatch, batch_size=self.batch_size)
