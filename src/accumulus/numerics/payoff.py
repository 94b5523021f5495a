"""Does the precision pay on this model and device? Measured, and why not, where it does not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from accumulus.numerics.subject import Subject
from accumulus.numerics.trace import TraceTable
from accumulus.precision import Precision, fastest
from accumulus.units import format_bytes

__all__ = ["Payoff", "measure_payoff"]

SMALL = 64
"""A matrix product with a side below this does not fill a matrix unit's tiles."""

FEW_OPERATIONS = 10**7
"""Additions and multiplications below which starting a product takes longer than doing it."""

PAYS_BELOW = 0.95


@dataclass(frozen=True, kw_only=True)
class Payoff:
    """The time of a forward and backward pass in a precision, against float32.

    Args:
        precision: its name.
        seconds: median, in this precision.
        fp32_seconds: median, in float32.
        small_ratio: share of the products' operations that are in small products.
        reasons: why it may not pay.
    """

    precision: str
    seconds: float
    fp32_seconds: float
    small_ratio: float
    reasons: tuple[str, ...]

    @property
    def time_ratio(self) -> float:
        """Below 1, the precision is faster."""
        return self.seconds / self.fp32_seconds

    @property
    def pays(self) -> bool:
        """Whether it is clearly faster."""
        return self.time_ratio < PAYS_BELOW

    def __str__(self) -> str:
        measured = f"a forward and backward pass took {self.time_ratio:.2f} of float32's time, measured on this device"
        if self.pays:
            return f"{self.precision} pays here: {measured}"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.precision} does not pay here: {measured}{why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "reasons": list(self.reasons), "time_ratio": self.time_ratio, "pays": self.pays}


def measure_payoff(subject: Subject, batch: Any, trace: TraceTable, *, rounds: int) -> Payoff:
    """Runs a batch in turns in its precision and in float32.

    Args:
        subject: a copy, which is run.
        batch: one.
        trace: what it multiplies.
        rounds: of each; the medians count.

    Returns:
        Times and reasons.

    Cost:
        Twice `rounds` and two more forward and backward passes.
    """
    wide = replace(subject, precision=Precision.parse("fp32"))
    times: dict[str, list[float]] = {"narrow": [], "wide": []}
    for number in range(rounds + 1):
        for name, side in (("narrow", subject), ("wide", wide)):
            seconds = timed(lambda side=side: side.run(batch, scale=subject.scale), subject.device)  # type: ignore[misc]
            side.drop_gradients()
            if number:  # the first round allocates, and looks kernels up
                times[name].append(seconds)
    small = small_ratio(trace)
    return Payoff(
        precision=str(subject.precision),
        seconds=statistics.median(times["narrow"]),
        fp32_seconds=statistics.median(times["wide"]),
        small_ratio=small,
        reasons=reasons(subject, trace, small),
    )


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that work takes until the device is done with it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def small_ratio(trace: TraceTable) -> float:
    """Share of the operations of all products that are in products too small to be worth it."""
    total = sum(product.num_operations for product in trace.products)
    small = sum(
        product.num_operations
        for product in trace.products
        if min(product.rows, product.inner, product.columns) < SMALL
        or product.num_operations / product.count < FEW_OPERATIONS
    )
    return small / total if total else 1.0


def reasons(subject: Subject, trace: TraceTable, small: float) -> tuple[str, ...]:
    """What speaks against a gain, as clauses."""
    found = []
    fast, why = fastest(subject.device)
    if fast == "fp32":
        found.append(why)
    elif str(subject.precision) == "fp16" and subject.device.type == "cpu":
        found.append("CPUs compute fp16 slowly; bf16 is what they have instructions for")
    if not trace.products:
        found.append("the model multiplies no matrices")
    elif small > 0.5:
        found.append(
            f"{small:.0%} of its arithmetic is in matrix products with a side below {SMALL} or too short to gain"
        )
    casts = sum(cast.num_bytes for cast in trace.casts)
    outputs = sum(use.num_bytes for use in trace.uses) or 1
    if casts > outputs / 4:
        found.append(f"casts read and write {format_bytes(casts)} where all operators write {format_bytes(outputs)}")
    return tuple(found)
