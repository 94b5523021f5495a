"""`accumulus plan`."""

from __future__ import annotations

from collections.abc import Sequence

from accumulus.cli.options import parse
from accumulus.run.plan_config import PlanConfig


def run(words: Sequence[str]) -> int:
    """Plans.

    Args:
        words: the command line after `plan`.

    Returns:
        The exit code.

    Raises:
        UsageError: bad input.
    """
    config = parse(
        PlanConfig,
        words,
        verb="plan",
        description="Peak memory by precision and micro-batch, before anything is trained; says what to choose.",
    )
    config.validate()
    from accumulus.run.plan import plan  # as in train

    return plan(config)
