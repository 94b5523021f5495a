"""`accumulus check`."""

from __future__ import annotations

from collections.abc import Sequence

from accumulus.cli.options import parse
from accumulus.run.check_config import CheckConfig


def run(words: Sequence[str]) -> int:
    """Checks.

    Args:
        words: the command line after `check`.

    Returns:
        The exit code: 0 equal, 1 not equal.

    Raises:
        UsageError: bad input.
    """
    config = parse(
        CheckConfig,
        words,
        verb="check",
        description="Does accumulation give the whole batch's update on this task? If not, what is in the way?",
    )
    config.validate()
    from accumulus.run.check import check  # as in train

    return check(config)
