"""For test suites: assertions about models of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from accumulus.equivalence.proof import check
from accumulus.equivalence.report import EquivalenceReport
from accumulus.equivalence.splits import SPLITS
from accumulus.microbatch import Split
from accumulus.types import Batch, LossFn, Optimizer

__all__ = ["assert_split_invariant"]


def assert_split_invariant(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer: Optimizer | None = None,
    splits: Sequence[str | int | Split] = SPLITS,
    collate: Callable[[Any], Any] | None = None,
) -> EquivalenceReport:
    """Fails where a batch in pieces does not give the whole batch's update, and says why.

    Args:
        model: the module, as it is trained.
        loss_fn: as for `TrainStep`.
        batch: as for `check`: at least 2 samples, of different lengths if there are lengths.
        optimizer: says which parameters are trained.
        splits: as for `check`.
        collate: makes a micro-batch of a list of samples.

    Returns:
        The report, where all is equal.

    Raises:
        AssertionError: they differ; its text is the report.
        AccumulusError: as for `check`.

    Cost:
        As `check`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> bool(assert_split_invariant(model, lambda model, batch: model(batch).square().mean(), torch.randn(6, 4)))
        True
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    report = check(model, loss_fn, batch, optimizer=optimizer, splits=splits, collate=collate)
    if not report:
        raise AssertionError(str(report))
    return report
