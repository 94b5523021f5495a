"""What a plan found, as plain values: the terminal, the picture and the JSON file are all made from this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import accumulus
from accumulus.run.plan_rows import SAFE_RATIO, Choice, Limit, Row


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One change, or several together, that needs less memory, for micro-batches of one sample.

    Args:
        changes: their names.
        peak_bytes: what is needed with them.
        saved_bytes: what they save.
        is_enough: one sample then fits.
        how: what to change, and what was counted how.
    """

    changes: tuple[str, ...]
    peak_bytes: int
    saved_bytes: int
    is_enough: bool
    how: str

    @property
    def name(self) -> str:
        """The changes in one line."""
        return " + ".join(self.changes)


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Why not even one sample fits, and what would help.

    Args:
        precision: the one that needs least.
        peak_bytes: what it needs for one sample.
        parts: of the peak.
        phase: when the peak is reached.
        measures: each alone; then together, where none alone is enough.
        notes: what could not be computed, and why.
    """

    precision: str
    peak_bytes: int
    parts: Mapping[str, int]
    phase: str
    measures: tuple[Measure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def dominant(self) -> tuple[str, int, float]:
        """The largest part: its name, its bytes and its share of the peak."""
        name, num_bytes = max(self.parts.items(), key=lambda part: part[1])
        return name, num_bytes, num_bytes / self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON file holds them."""
        name, num_bytes, ratio = self.dominant
        return {
            "precision": self.precision,
            "peak_bytes": self.peak_bytes,
            "phase": self.phase,
            "dominant": {"part": name, "bytes": num_bytes, "ratio": ratio},
            "measures": [asdict(measure) | {"changes": list(measure.changes)} for measure in self.measures],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is shown.

    Args:
        task: its name.
        batch_size: samples of a batch.
        device: whose memory is meant.
        kernels: whose kernels the estimates assume, as a sentence.
        limit: the memory to fit into.
        rows: the table.
        choice: which row to choose; None where nothing fits.
        shortfall: why nothing fits; None where something does.
        notes: sentences about the batch and the method.
    """

    task: str
    batch_size: int
    device: str
    kernels: str
    limit: Limit
    rows: Sequence[Row]
    choice: Choice | None
    shortfall: Shortfall | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON file holds them."""
        return {
            "accumulus": accumulus.__version__,
            "task": self.task,
            "batch_size": self.batch_size,
            "device": self.device,
            "kernels": self.kernels,
            "memory": {
                "limit_bytes": self.limit.limit_bytes,
                "safe_bytes": self.limit.safe_bytes,
                "safe_ratio": SAFE_RATIO,
                "source": self.limit.source,
            },
            "rows": [row.to_dict() for row in self.rows],
            "recommendation": None if self.choice is None else choice_to_dict(self.choice),
            "shortfall": None if self.shortfall is None else self.shortfall.to_dict(),
            "notes": list(self.notes),
        }


def choice_to_dict(choice: Choice) -> dict[str, Any]:
    """The recommendation without what the rows already say of it."""
    return {
        "precision": choice.row.precision,
        "microbatch": choice.row.microbatch,
        "num_microbatches": choice.row.num_microbatches,
        "peak_bytes": choice.row.peak_bytes,
        "reasons": list(choice.reasons),
        "command": choice.command,
    }
