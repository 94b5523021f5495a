"""How batches are cut: what `--microbatch` asks for, and what a step's record tells of it. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from accumulus.errors import UsageError
from accumulus.units import format_rate

AUTO = "auto"
TOKENS = "tokens"
SAMPLES = "samples"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What a `--microbatch` option asks for.

    Args:
        size: samples or tokens of a micro-batch; None: found while training.
        unit: "samples" or "tokens".

    Example:
        >>> Cut.parse("8192tokens")
        Cut(size=8192, unit='tokens')
        >>> Cut.parse("auto").describe()
        'auto, of samples: found while training'
    """

    size: int | None
    unit: str = SAMPLES

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an option.

        Args:
            text: "32" samples, "8192tokens", "auto" or "auto-tokens".

        Returns:
            What it asks for.

        Raises:
            UsageError: it is none of these, or a number below 1.
        """
        number = text.removesuffix(TOKENS)
        unit = SAMPLES if number == text else TOKENS
        if number == (AUTO if unit == SAMPLES else f"{AUTO}-"):
            return cls(size=None, unit=unit)
        try:
            size = int(number)
        except ValueError:
            raise UsageError(
                f"--microbatch {text!r} must be a number of samples, such as 32, a number of tokens, such as "
                "8192tokens, or auto or auto-tokens"
            ) from None
        if size < 1:
            raise UsageError(f"--microbatch {text} must be larger than 0")
        return cls(size=size, unit=unit)

    def within(self, batch_size: int) -> Self:
        """The same, of no more samples than a batch has."""
        if self.size is None or self.unit != SAMPLES:
            return self
        return replace(self, size=min(self.size, batch_size))

    def describe(self) -> str:
        """What is asked for, in words."""
        if self.size is None:
            return f"auto, of {self.unit}: found while training"
        return f"of {self.size:,} {self.unit}"

    def to_record(self, choice: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a step's record tells of its micro-batches.

        Args:
            choice: a `StepResult`'s, as a dict; None where the size was given.

        Returns:
            `microbatch` and `microbatch_unit`; where it was chosen, `microbatch_reason` and
            `microbatch_samples_per_second` (None before it is measured), too.
        """
        if choice is None:
            return {"microbatch": self.size, "microbatch_unit": self.unit}
        return {
            "microbatch": choice["size"],
            "microbatch_unit": choice["unit"],
            "microbatch_reason": choice["reason"],
            "microbatch_samples_per_second": choice["samples_per_second"],
        }


def read_size(text: str, *, batch_size: int) -> int:
    """A micro-batch size where nothing is chosen and samples are what counts.

    Args:
        text: the value of a `--microbatch` option.
        batch_size: samples of a batch.

    Returns:
        At least 1; at most the batch size.

    Raises:
        UsageError: it is not a number above zero.
    """
    try:
        size = int(text)
    except ValueError:
        raise UsageError(f"--microbatch {text!r} must be a number of samples, such as 32") from None
    if size < 1:
        raise UsageError(f"--microbatch {size} must be larger than 0")
    return min(size, batch_size)


def describe_record(record: Mapping[str, Any]) -> str:
    """The micro-batch of a step's record, in words: its size; and why and how fast, where it was chosen.

    Args:
        record: of `metrics.jsonl`.
    """
    text = f"{record['microbatch']:,} {record['microbatch_unit']}"
    if "microbatch_reason" in record:
        text += f": {record['microbatch_reason']}"
    speed = record.get("microbatch_samples_per_second")
    return text if speed is None else f"{text} ({format_rate(speed, SAMPLES)})"


def microbatch_option(record: Mapping[str, Any]) -> str:
    """What `--microbatch` takes to cut all batches as a step's record says."""
    return f"{record['microbatch']}{TOKENS if record['microbatch_unit'] == TOKENS else ''}"
