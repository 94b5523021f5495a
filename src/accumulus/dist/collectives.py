"""Sums, disjunctions and maxima over ranks: the identity where there is one."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed

from accumulus.errors import UnsupportedError

__all__ = ["any_over_ranks", "max_over_ranks", "num_ranks", "sum_over_ranks"]

T = TypeVar("T")


def num_ranks() -> int:
    """How many processes train together.

    Returns:
        1 without a process group.
    """
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def sum_over_ranks(value: T) -> T:
    """The sum of a number or tensor over ranks.

    Args:
        value: this rank's.

    Returns:
        The sum; the value itself on one rank.

    Raises:
        UnsupportedError: there are several ranks.
    """
    return _alone(value)


def any_over_ranks(value: T) -> T:
    """Whether a condition holds on any rank.

    Args:
        value: this rank's.

    Returns:
        The disjunction; the value itself on one rank.

    Raises:
        UnsupportedError: there are several ranks.
    """
    return _alone(value)


def max_over_ranks(value: T) -> T:
    """The maximum of a number or tensor over ranks.

    Args:
        value: this rank's.

    Returns:
        The maximum; the value itself on one rank.

    Raises:
        UnsupportedError: there are several ranks.
    """
    return _alone(value)


def _alone(value: T) -> T:
    if num_ranks() > 1:
        raise UnsupportedError(f"training over {num_ranks()} ranks is not available yet; run one process")
    return value
