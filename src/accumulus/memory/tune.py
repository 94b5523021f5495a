"""The search for the fastest micro-batch: real training steps try sizes, and the smallest of the fast ones is kept.

Pure: a `Tuning` is frozen, says which size the next step should use, and returns its successor when that is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from accumulus.errors import StateError

__all__ = ["Tuning"]

CLOSE = 0.95
"""Sizes that reach this share of the best speed are as good; of these the smallest needs the least memory."""

RISES, FALLS = 1.01, 0.97
"""From one size to a larger one, speeds rise or fall if they change by more than a step's chance."""

START = 2
"""Where the search starts: at a quarter of the largest size. On many CPUs the largest ones are the slowest of all."""

MAX_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search among the sizes that cut a batch evenly in `k`, `2k`, `4k`, ... pieces, `k` being as few as fit.

    Args:
        whole: size of the whole batch, in samples or tokens.
        largest: the largest size that fits.
        smallest: the smallest size that makes sense: 1, or the longest sample's tokens.
        speeds: measured samples a second by size, the best of those measured.
        counts: how many times each size was measured.
        num_steps: measured and discarded steps until now.
        choice: what the search ended with; None while it goes on.

    Example:
        >>> tuning = Tuning(whole=64, largest=64)
        >>> while tuning.choice is None:
        ...     size = tuning.next_size()
        ...     tuning = tuning.record(size, min(size, 16.0))  # as fast from 16 on
        >>> tuning.choice
        16
    """

    whole: int
    largest: int
    smallest: int = 1
    speeds: Mapping[int, float] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    num_steps: int = 0
    choice: int | None = None

    def sizes(self) -> list[int]:
        """The sizes to choose from, the largest first."""
        found: list[int] = []
        pieces = -(-self.whole // min(self.largest, self.whole))
        while True:
            size = max(self.smallest, -(-self.whole // pieces))
            found.append(size)
            if size <= self.smallest:
                return list(dict.fromkeys(found))
            pieces *= 2

    def next_size(self) -> int:
        """What the next step should use."""
        if self.choice is not None:
            return self.choice
        wanted = self._wanted()
        assert wanted is not None  # else record() would have chosen
        return wanted

    def record(self, size: int, speed: float, *, tells: bool = True) -> Self:
        """The successor after a step.

        Args:
            size: what the step used.
            speed: its samples a second.
            tells: false for a step that did what only a first one does: its speed is that of no other.

        Returns:
            A search that goes on, or has made its choice.
        """
        following = replace(self, num_steps=self.num_steps + 1)
        if tells and math.isfinite(speed):
            following = replace(
                following,
                speeds={**self.speeds, size: max(speed, self.speeds.get(size, 0.0))},
                counts={**self.counts, size: self.counts.get(size, 0) + 1},
            )
        if following.num_steps < MAX_STEPS and following._wanted() is not None:
            return following
        return replace(following, choice=following._best())

    def _wanted(self) -> int | None:
        """The next size to measure; None where there is nothing left that could change the choice."""
        sizes = self.sizes()
        if len(sizes) == 1:
            return None if self.num_steps else sizes[0]
        if not self.speeds:
            return sizes[min(START, len(sizes) - 1)]
        return self._coarse(sizes) or self._fine(sizes) or self._again()

    def _coarse(self, sizes: list[int]) -> int | None:
        """From the middle: down as long as it stays as fast, up as long as it becomes faster."""
        levels = [sizes.index(size) for size in self.speeds]
        best, good = self._levels(sizes)
        if good == max(levels) and good < len(sizes) - 1:
            # Where the last step down made it no faster, the next one may well be slow, so it is a small one.
            larger = max((level for level in levels if level < good), default=None)
            falls = larger is not None and self._slope(sizes, larger) < FALLS
            return sizes[min(good + (2 if falls else 1), len(sizes) - 1)]
        if best == min(levels) and best > 0 and self._slope(sizes, best) > RISES:
            return sizes[max(best - (2 if good == best else 1), 0)]
        return None

    def _slope(self, sizes: list[int], level: int) -> float:
        """How much faster a size is than the next smaller one that was measured."""
        smaller = next((size for size in sizes[level + 1 :] if size in self.speeds), None)
        return math.inf if smaller is None else self.speeds[sizes[level]] / self.speeds[smaller]

    def _fine(self, sizes: list[int]) -> int | None:
        """The neighbours of the best, and the one below the smallest good one."""
        best, good = self._levels(sizes)
        candidates = (good + 1, best + 1, best - 1) if best == good else (good + 1, best + 1)
        return next((sizes[i] for i in candidates if self._is_open(sizes, i)), None)

    def _is_open(self, sizes: list[int], index: int) -> bool:
        return 0 <= index < len(sizes) and sizes[index] not in self.speeds

    def _levels(self, sizes: list[int]) -> tuple[int, int]:
        """Where the fastest size and the smallest one that is as good stand among the sizes."""
        return sizes.index(max(self.speeds, key=self.speeds.__getitem__)), sizes.index(self._best())

    def _again(self) -> int | None:
        """The fastest and the smallest good one are measured twice: one step may have been disturbed."""
        fastest = max(self.speeds, key=self.speeds.__getitem__)
        return next((size for size in (fastest, self._best()) if self.counts[size] < 2), None)

    def _reaching(self, share: float) -> Iterable[int]:
        bound = share * max(self.speeds.values())
        return [size for size, speed in self.speeds.items() if speed >= bound]

    def _best(self) -> int:
        return min(self._reaching(CLOSE)) if self.speeds else self.sizes()[0]

    def limited(self, largest: int) -> Self:
        """The search among smaller sizes only, after memory ran out.

        Args:
            largest: the largest size that fits.

        Returns:
            A search that keeps what was measured of the sizes that are left.
        """
        smaller = replace(self, largest=largest)
        left = set(smaller.sizes())
        speeds = {size: speed for size, speed in self.speeds.items() if size in left}
        counts = {size: count for size, count in self.counts.items() if size in left}
        return replace(smaller, speeds=speeds, counts=counts)

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain values that JSON takes too."""
        return {
            "whole": self.whole,
            "largest": self.largest,
            "smallest": self.smallest,
            "speeds": [[size, speed, self.counts[size]] for size, speed in self.speeds.items()],
            "num_steps": self.num_steps,
            "choice": self.choice,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The search that was saved.

        Raises:
            StateError: it is not such a state.
        """
        try:
            measured = [(int(size), float(speed), int(count)) for size, speed, count in state["speeds"]]
            found = cls(
                **{name: int(state[name]) for name in ("whole", "largest", "smallest", "num_steps")},
                speeds={size: speed for size, speed, _ in measured},
                counts={size: count for size, _, count in measured},
                choice=None if state["choice"] is None else int(state["choice"]),
            )
            if min(found.whole, found.largest, found.smallest, 1 if found.choice is None else found.choice) < 1:
                raise ValueError("a size is below 1")
            if not found.speeds.keys() <= set(found.sizes()):
                raise ValueError(f"sizes {sorted(found.speeds)} were measured, and there are {found.sizes()}")
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the saved state of a micro-batch tuning: {error}") from error
