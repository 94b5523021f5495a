"""The processes that `torchrun` started. The only reader of its environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from accumulus.errors import UsageError

__all__ = ["Process", "this_process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This process among those that work together.

    Args:
        rank: number of this process, from 0.
        num_ranks: how many there are.
        local_rank: number of this process on its machine, from 0.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0


def this_process() -> Process:
    """Reads what `torchrun` put into the environment.

    Returns:
        This process; the only one where `torchrun` did not start it.

    Raises:
        UsageError: the variables are not numbers, or the rank is not below the number of ranks.
    """
    names = {"rank": "RANK", "num_ranks": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
    found = {field: os.environ[variable] for field, variable in names.items() if variable in os.environ}
    try:
        process = Process(**{field: int(text) for field, text in found.items()})
    except ValueError:
        raise UsageError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers, as torchrun sets them, not {found}"
        ) from None
    if not 0 <= process.rank < process.num_ranks:
        raise UsageError(f"RANK={process.rank} must be below WORLD_SIZE={process.num_ranks}; start with torchrun")
    return process
