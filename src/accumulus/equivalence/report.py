"""What `check` found: equal or not, how far off each parameter is, and what causes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Cause", "Difference", "EquivalenceReport", "Kind", "PrecisionGap", "SplitOutcome"]

NUM_SHOWN = 8
ACCUMULATION_SAYS = {
    True: "accumulation adds error to that",
    False: "accumulation adds nothing to that",
    None: "the difference above is part of that",
}


class Kind(StrEnum):
    """What makes an accumulated batch differ from a whole one."""

    MIXING = "module mixes samples"
    RANDOM = "random, not wrong"
    WEIGHT = "wrong weight"
    COMPARISON = "loss compares samples"
    STATISTIC = "loss normalises over the batch"
    BALANCE = "balance loss of a mixture of experts"
    PADDING = "depends on padding"
    STATE = "state carried between forwards"
    NONDETERMINISTIC = "not deterministic"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason why a split is not the whole batch, found by experiment.

    Args:
        kind: which sort of reason.
        where: the modules, loss term or function that it lies in.
        evidence: what was switched and what was seen, with the figure.
        remedy: what to do, in one sentence.
        is_confirmed: equality came back when this cause, and the others named with it, were switched off.
    """

    kind: Kind
    where: tuple[str, ...]
    evidence: str
    remedy: str
    is_confirmed: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether it makes the update another one; randomness does not."""
        return self.kind is not Kind.RANDOM

    def __str__(self) -> str:
        shown = ", ".join(self.where[:4]) + (f" and {len(self.where) - 4} more" if len(self.where) > 4 else "")
        return f"{self.kind}: {shown}. {self.evidence} {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one quantity of an accumulated batch lies from the whole one's.

    Args:
        name: of the parameter or buffer; "loss" for the loss.
        what: "loss", "gradient" or "buffer".
        error: the largest relative error over all splits.
        floor: the relative error that rounding alone makes, measured by a permutation of the samples.
        allowed: up to where it counts as equal.
        split: the split with that error.
    """

    name: str
    what: str
    error: float
    floor: float
    allowed: float
    split: str

    @property
    def is_equal(self) -> bool:
        """Whether the error is rounding."""
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOutcome:
    """One way to cut the batch.

    Args:
        name: of the split.
        sizes: samples of its micro-batches.
        error: relative error of the whole gradient; NaN where it could not be run.
        is_equal: loss, gradients and buffers are the whole batch's.
        problem: why it could not be run; empty where it could.
    """

    name: str
    sizes: tuple[int, ...]
    error: float
    is_equal: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionGap:
    """How far one parameter's gradient in the asked precision lies from float64's.

    Args:
        name: of the parameter.
        whole: relative error of the whole batch.
        accumulated: relative error of the batch in pieces.
    """

    name: str
    whole: float
    accumulated: float

    @property
    def factor(self) -> float:
        """How much larger the error is for the split; 1 is what the precision costs anyway."""
        return self.accumulated / self.whole if self.whole else (1.0 if not self.accumulated else math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceReport:
    """Whether accumulation gives the whole batch's update, by parameter, and why not. True where it does.

    Args:
        is_equal: loss, every gradient and every buffer agree, in every split, up to rounding.
        dtype: what the comparison was made in.
        num_samples: how many samples the batch held.
        differences: by loss, parameter and buffer, the worst first.
        splits: the ways in which it was cut.
        causes: what makes it differ; may hold "random, not wrong" where it is equal.
        precision: the name of the precision that was asked for.
        precision_errors: its errors by parameter, the worst first; empty for "fp32".
        precision_total: the same for the whole gradient; None for "fp32".
        notes: what else there is to know.
        seconds: wall time of the check.

    Example:
        >>> report = EquivalenceReport(is_equal=True, dtype="float64", num_samples=8)
        >>> bool(report), report.verdict
        (True, 'equal')
    """

    is_equal: bool
    dtype: str
    num_samples: int
    differences: tuple[Difference, ...] = ()
    splits: tuple[SplitOutcome, ...] = ()
    causes: tuple[Cause, ...] = ()
    precision: str = "fp32"
    precision_errors: tuple[PrecisionGap, ...] = ()
    precision_total: PrecisionGap | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.is_equal

    @property
    def verdict(self) -> str:
        """Either "equal" or "not equal"."""
        return "equal" if self.is_equal else "not equal"

    @property
    def accumulation_adds(self) -> bool | None:
        """Whether the split adds error beyond what the precision costs on a whole batch.

        None for "fp32", and where the split differs in float64 too: then that difference is in the figures.
        """
        total = self.precision_total
        return None if total is None or not self.is_equal else total.factor > 1.5

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of causes."""
        return frozenset(cause.kind for cause in self.causes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, which JSON takes.

        Returns:
            Field name to value; an infinite or undefined error is None.
        """
        content = asdict(self)
        content["verdict"] = self.verdict
        content["accumulation_adds"] = self.accumulation_adds
        plain: dict[str, Any] = _plain(content)
        return plain

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._cause_lines(), *self._rows(), *self._precision_lines(), *self.notes])

    def _headline(self) -> str:
        worst = self.differences[0] if self.differences else None
        shown = f"; largest error {worst.error:.1e} in {worst.name} (rounding {worst.floor:.1e})" if worst else ""
        tried = ", ".join(split.name for split in self.splits)
        return f"{self.verdict}: {self.num_samples} samples whole and split ({tried}), in {self.dtype}{shown}"

    def _cause_lines(self) -> list[str]:
        return [f"  - {cause}" for cause in self.causes]

    def _rows(self) -> list[str]:
        shown: Sequence[Difference] = self.differences[:NUM_SHOWN]
        if not shown:
            return []
        width = max(len(row.name) for row in shown)
        lines = [f"{'':<{width}}  error    rounding  split"]
        lines += [f"{row.name:<{width}}  {row.error:.1e}  {row.floor:.1e}   {row.split}" for row in shown]
        rest = len(self.differences) - len(shown)
        return [*lines, f"... and {rest} more"] if rest else lines

    def _precision_lines(self) -> list[str]:
        total = self.precision_total
        if total is None:
            return []
        says = ACCUMULATION_SAYS[self.accumulation_adds]
        return [
            f"{self.precision}: gradient {total.whole:.1e} from float64 whole, {total.accumulated:.1e} split; {says}"
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.name.lower()
    return None if isinstance(value, float) and not math.isfinite(value) else value
