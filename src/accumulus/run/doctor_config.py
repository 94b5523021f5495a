"""What the doctor is asked: a frozen dataclass that the command line is made from. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from accumulus.errors import UsageError
from accumulus.run.config import Name, TaskConfig, check_file, check_precisions, flag
from accumulus.run.cut import read_size


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(TaskConfig):
    """Options of `accumulus doctor`."""

    batch_size: int = 64
    """Samples that one optimizer step learns from."""

    precision: str = "fp16"
    """The precision to ask about: auto, fp32, tf32, bf16 or fp16."""

    steps: int = 3
    """Steps to look at, of a copy of the model."""

    rows: int = 8
    """Lines of each table; the files hold all."""

    rounds: int = 3
    """Passes to time in this precision and in float32; 0 does not time."""

    json: Name = None
    """A file for the whole report."""

    page: Annotated[str | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="")] = None
    """A file for a page with pictures that opens offline. Needs the extra "plot"."""

    def validate(self) -> None:
        """As `TaskConfig.validate`."""
        super().validate()
        self.microbatch_size()
        check_precisions((self.precision,), "precision")
        for name, least in (("rows", 1), ("rounds", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{flag(name)} {getattr(self, name)} must be at least {least}")
        check_file("json", self.json)
        check_file("page", self.page)
        if self.page is not None and Path(self.page).suffix.lower() != ".html":
            raise UsageError(f"--page {self.page}: the name must end in .html")

    def microbatch_size(self) -> int:
        """The samples of a micro-batch: at least 1, at most the batch size.

        Raises:
            UsageError: it is not a number above zero.
        """
        return read_size(self.microbatch, batch_size=self.batch_size)
