"""`accumulus bench`."""

from __future__ import annotations

from collections.abc import Sequence

from accumulus.cli.options import parse
from accumulus.run.bench_config import BenchConfig


def run(words: Sequence[str]) -> int:
    """Measures.

    Args:
        words: the command line after `bench`.

    Returns:
        The exit code.

    Raises:
        UsageError: bad input.
    """
    config = parse(
        BenchConfig,
        words,
        verb="bench",
        description="Measures a task in several precisions, accumulated and whole, beside a plain loop.",
    )
    config.validate()
    from accumulus.run.bench import bench  # as in train

    return bench(config)
