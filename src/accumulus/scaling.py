"""Loss scales: three frozen classes with one interface. `scale.next(all_finite)` returns the successor.

A loss scale S multiplies the loss before the backward pass, so that gradients which fp16 would flush to zero stay
representable, and is divided out inside the optimizer's own update. Powers of two change no mantissa bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, Self

from accumulus.errors import PrecisionError, ScaleCollapseError, StateError

__all__ = ["DynamicScale", "LossScale", "NoScale", "StaticScale"]

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
IN_FLOAT32 = "a normal number of float32, between 1.2e-38 and 3.4e38"

MAX_SKIPS = 32
"""Skipped steps in a row before training stops: more than the 17 it takes to get from 2**16 below 1."""


class LossScale(Protocol):
    """What a step needs of a loss scale."""

    @property
    def num_skips(self) -> int:
        """Non-finite steps in a row until now."""

    def __float__(self) -> float: ...

    def next(self, all_finite: bool) -> Self:
        """The scale of the next step, after one whose gradients were all finite or not."""

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """The scale that a saved state describes."""


class Saved:
    """What all loss scales share: their state is their fields, so nobody keeps a second list of them."""

    __slots__ = ()

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain values.

        Returns:
            Field name to value, and the class's name as `kind`.
        """
        return {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """The scale that a saved state describes. Frozen: returns it and changes nothing.

        Args:
            state: from `state_dict`.

        Returns:
            The restored scale.

        Raises:
            StateError: the state is of another kind of scale, or a field is missing or unknown.
        """
        kind = type(self).__name__
        if state.get("kind") != kind:
            raise StateError(
                f"the saved loss scale is a {state.get('kind', 'torch.amp.GradScaler')}, this step uses {kind}; "
                "use the precision and loss_scale it was saved with, or leave 'loss_scale' out to start anew"
            )
        names = {f.name for f in fields(self)}  # type: ignore[arg-type]
        if state.keys() - {"kind"} != names:
            raise StateError(f"a saved {kind} has the fields {sorted(names)}, not {sorted(state.keys() - {'kind'})}")
        return type(self)(**{name: state[name] for name in names})


class Constant(Saved):
    """A scale that never changes, and only counts the steps that were skipped in a row."""

    __slots__ = ()
    max_skips: int
    num_skips: int

    def next(self, all_finite: bool) -> Self:
        """The successor.

        Args:
            all_finite: whether every gradient of the step was finite.

        Returns:
            The scale of the next step.

        Raises:
            ScaleCollapseError: this was the `max_skips`-th non-finite step in a row.
        """
        return replace(self, num_skips=_count_skips(self, all_finite))  # type: ignore[type-var,arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScale(Constant):
    """No loss scaling: the scale is 1. A disabled `torch.amp.GradScaler`'s empty state may be loaded.

    Args:
        max_skips: stop after this many non-finite steps in a row.
        num_skips: non-finite steps in a row until now (state).

    Raises:
        PrecisionError: `max_skips` is below 1.
    """

    max_skips: int = MAX_SKIPS
    num_skips: int = 0

    def __post_init__(self) -> None:
        _check(self.max_skips >= 1, "max_skips", self.max_skips, "at least 1")

    def __float__(self) -> float:
        return 1.0

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """The scale that a saved state describes. Frozen: returns it and changes nothing.

        Args:
            state: from `state_dict`, or the empty state of a disabled `torch.amp.GradScaler`.

        Returns:
            The restored scale.

        Raises:
            StateError: the state is of another kind of scale, or a field is missing or unknown.
        """
        # By name: super() does not work in a dataclass with slots.
        return Constant.load_state_dict(self, state) if state else self


@dataclass(frozen=True, slots=True)
class StaticScale(Constant):
    """A loss scale that never changes; a non-finite step is skipped.

    Args:
        value: the scale, positive and finite; a power of two changes no mantissa bit.
        max_skips: stop after this many non-finite steps in a row.
        num_skips: non-finite steps in a row until now (state).

    Raises:
        PrecisionError: an argument is out of its bounds.
    """

    value: float
    max_skips: int = MAX_SKIPS
    num_skips: int = 0

    def __post_init__(self) -> None:
        _check(SMALLEST <= self.value <= LARGEST, "value", self.value, IN_FLOAT32)
        _check(self.max_skips >= 1, "max_skips", self.max_skips, "at least 1")

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale(Saved):
    """A loss scale that grows after a run of finite steps and shrinks after non-finite ones.

    With `hysteresis=1` and the scale above `minimum` its sequence equals `torch.amp.GradScaler`'s, step for step.

    Args:
        initial: scale of the first step.
        growth: factor after `growth_interval` finite steps in a row, above 1.
        backoff: factor after a non-finite step, between 0 and 1.
        growth_interval: finite steps in a row before growing.
        hysteresis: non-finite steps to tolerate before shrinking; the tolerance is restored by growing.
        minimum: the scale never goes below it.
        max_skips: stop after this many non-finite steps in a row.
        scale: the present scale (state); `initial` if not given.
        num_finite: finite steps in a row until now (state).
        num_skips: non-finite steps in a row until now (state).
        tolerance_left: non-finite steps still tolerated before shrinking (state).

    Raises:
        PrecisionError: an argument is out of its bounds.

    Source:
        Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.

    Example:
        >>> scale = DynamicScale(initial=1024.0)
        >>> float(scale.next(all_finite=False))
        512.0
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    max_skips: int = MAX_SKIPS
    scale: float | None = None
    num_finite: int = 0
    num_skips: int = 0
    tolerance_left: int | None = None

    def __post_init__(self) -> None:
        _check(SMALLEST <= self.minimum <= LARGEST, "minimum", self.minimum, IN_FLOAT32)
        _check(
            self.minimum <= self.initial < math.inf,
            "initial",
            self.initial,
            f"finite and at least {self.minimum}",
        )
        _check(1 < self.growth < math.inf, "growth", self.growth, "above 1")
        _check(0 < self.backoff < 1, "backoff", self.backoff, "between 0 and 1")
        for name in ("growth_interval", "hysteresis", "max_skips"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.scale is None:
            object.__setattr__(self, "scale", _as_float32(float(self.initial)))
        if self.tolerance_left is None:
            object.__setattr__(self, "tolerance_left", self.hysteresis)
        _check(SMALLEST <= float(self) <= LARGEST, "scale", self.scale, IN_FLOAT32)

    def __float__(self) -> float:
        assert self.scale is not None  # set in __post_init__
        return float(self.scale)

    def next(self, all_finite: bool) -> Self:
        """The successor.

        Args:
            all_finite: whether every gradient of the step was finite.

        Returns:
            The scale of the next step.

        Raises:
            ScaleCollapseError: a non-finite step at the minimum, or the `max_skips`-th in a row.
        """
        num_skips = _count_skips(self, all_finite)
        return self._after_finite() if all_finite else self._after_nonfinite(num_skips)

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """The scale that a saved state describes. Frozen: returns it and changes nothing.

        Args:
            state: from `state_dict`, or from `torch.amp.GradScaler.state_dict()`; what the latter does not know
                (hysteresis, minimum, max_skips) is taken from this scale.

        Returns:
            The restored scale.

        Raises:
            StateError: the state is of another kind of scale, or a field is missing or unknown.
        """
        if "_growth_tracker" not in state:
            return Saved.load_state_dict(self, state)
        scale = float(state["scale"])
        return replace(
            self,
            initial=scale,
            minimum=min(self.minimum, scale),
            growth=float(state["growth_factor"]),
            backoff=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
            scale=scale,
            num_finite=int(state["_growth_tracker"]),
            num_skips=0,
            tolerance_left=None,
        )

    def _after_finite(self) -> Self:
        if self.num_finite + 1 < self.growth_interval:
            return replace(self, num_finite=self.num_finite + 1, num_skips=0)
        grown = _as_float32(float(self) * self.growth)
        scale = grown if math.isfinite(grown) else float(self)
        return replace(self, scale=scale, num_finite=0, num_skips=0, tolerance_left=self.hysteresis)

    def _after_nonfinite(self, num_skips: int) -> Self:
        assert self.tolerance_left is not None  # set in __post_init__
        left = max(0, self.tolerance_left - 1)
        if left > 0:
            return replace(self, num_finite=0, num_skips=num_skips, tolerance_left=left)
        if float(self) <= self.minimum:
            raise ScaleCollapseError(
                f"non-finite gradients at loss scale {float(self):g}, which is the minimum, "
                f"after {num_skips} skipped steps in a row"
            )
        scale = max(_as_float32(float(self) * self.backoff), self.minimum)
        return replace(self, scale=scale, num_finite=0, num_skips=num_skips, tolerance_left=left)


def _count_skips(scale: LossScale, all_finite: bool) -> int:
    num_skips = 0 if all_finite else scale.num_skips + 1
    limit: int = getattr(scale, "max_skips", MAX_SKIPS)
    if num_skips >= limit:
        raise ScaleCollapseError(
            f"{num_skips} steps in a row had non-finite gradients, the last at loss scale {float(scale):g}"
        )
    return num_skips


def _as_float32(value: float) -> float:
    """Rounded to float32, where GradScaler keeps its scale; infinity beyond its range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf
    return rounded


def _check(holds: bool, name: str, value: object, bound: str) -> None:
    if not holds:
        raise PrecisionError(f"a loss scale's {name} must be {bound}, not {value}")
