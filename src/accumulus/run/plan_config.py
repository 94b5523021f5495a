"""What `accumulus plan` is asked to do. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from accumulus.errors import UsageError
from accumulus.run.config import Name, TaskConfig, check_file, check_precisions
from accumulus.run.cut import AUTO, read_size

PICTURES = (".png", ".html")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TaskConfig):
    """Options of `accumulus plan`.

    Example:
        >>> config = PlanConfig(task="mine.py:job", batch_size=512)
        >>> " ".join(config.train_words(precision="bf16", microbatch=64))
        'mine.py:job --batch-size 512 --microbatch 64 --precision bf16'
    """

    microbatch: Annotated[str, tyro.conf.arg(metavar="INT|auto", help_behavior_hint="")] = AUTO
    """One more micro-batch size to list, besides powers of two, the whole batch and the largest that fits."""

    device: str = "auto"
    """Whose memory: auto (an accelerator where there is one), cpu, cuda, ..., or the name of an accelerator that
    need not be here: A100-40GB, H100, ..."""

    memory: Annotated[str, tyro.conf.arg(metavar="24GiB|auto")] = "auto"
    """The memory to fit into. auto: what is free on the device now, or all that an accelerator of that name has."""

    precisions: tuple[str, ...] = ("fp32", "bf16", "auto")
    """Precisions to list; auto is the one that the device does fast. fp16 takes what bf16 takes."""

    json: Name = None
    """A file for the figures."""

    picture: Annotated[str | None, tyro.conf.arg(metavar="FILE.png|FILE.html", help_behavior_hint="")] = None
    """A file for the picture: a PNG, or a page that opens offline. Needs the extra "plot"."""

    def validate(self) -> None:
        """As `TaskConfig.validate`."""
        super().validate()
        self.microbatch_size()
        check_precisions(self.precisions)
        check_file("json", self.json)
        check_file("picture", self.picture)
        if self.picture is not None and Path(self.picture).suffix.lower() not in PICTURES:
            raise UsageError(f"--picture {self.picture}: the name must end in {' or '.join(PICTURES)}")

    def microbatch_size(self) -> int:
        """The one more size to list; without one the whole batch, which is listed anyway.

        Returns:
            At least 1; at most the batch size.

        Raises:
            UsageError: it is neither "auto" nor a number above zero.
        """
        return self.batch_size if self.microbatch == AUTO else read_size(self.microbatch, batch_size=self.batch_size)

    def train_words(self, *, precision: str, microbatch: int) -> list[str]:
        """What to write after `accumulus train` to train what was planned.

        Args:
            precision: its name.
            microbatch: samples of a micro-batch.

        Returns:
            The task, the options that were given, and the two that were chosen.
        """
        shared = [field.name for field in fields(TaskConfig) if field.name != "microbatch"]
        return [*self.given_words(shared), "--microbatch", str(microbatch), "--precision", precision]
