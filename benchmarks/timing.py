"""How everything here is timed: the sides alternate in one process, and medians are compared.

These are ratios within one run: a machine that is busy or slow for a while is so for every side.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Rows = list[dict[str, Any]]


def medians(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Median seconds of each side; every round runs all of them, in an order drawn anew. `before` is not timed."""
    names = list(sides)
    prepare = before or {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmup):
        for name in names:
            prepare.get(name, _nothing)()
            sides[name]()
    gc.collect()
    gc.disable()  # a collection would fall on whichever side happens to allocate
    try:
        for _ in range(rounds):
            random.shuffle(names)
            for name in names:
                prepare.get(name, _nothing)()
                started = time.perf_counter()
                sides[name]()
                seconds[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in seconds.items()}


def _nothing() -> None:
    pass


def show(rows: Rows) -> None:
    """Prints the rows as a table."""
    for row in rows:
        verdict = "" if row.get("bound") is None else f"   bound {row['bound']:.2f}"
        print(f"{row['what']:<75} {row['ratio']:.3f} x {row['against']}{verdict}")
