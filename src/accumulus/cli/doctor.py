"""`accumulus doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from accumulus.cli.options import parse
from accumulus.run.doctor_config import DoctorConfig


def run(words: Sequence[str]) -> int:
    """Diagnoses.

    Args:
        words: the command line after `doctor`.

    Returns:
        The exit code: 1 where there is a finding.

    Raises:
        UsageError: bad input.
    """
    config = parse(
        DoctorConfig,
        words,
        verb="doctor",
        description="What low precision does to a task's numbers: ranges, loss scale, dtypes, advice.",
    )
    config.validate()
    from accumulus.run.doctor import doctor  # as in train

    return doctor(config)
