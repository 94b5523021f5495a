"""The loss scales at which a format holds every gradient, for each layer and for all, and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accumulus.numerics.formats import Format
from accumulus.numerics.histogram import Histogram
from accumulus.numerics.ranges import RangeRow

__all__ = ["LayerScales", "Scales", "find_scales", "layer_of"]

SMALLEST, LARGEST = -100, 100
"""Powers of two between which a scale is looked for."""

HEADROOM = 2.0**4
"""How far below overflow the chosen scale stays where it can: gradients of later steps may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """The window of one layer.

    Args:
        layer: path of the module.
        low: the smallest power of two at which little enough of its gradients underflows.
        high: the largest one at which none overflows.
    """

    layer: str
    low: float
    high: float

    @property
    def is_open(self) -> bool:
        """Whether any scale serves this layer."""
        return self.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The window of all layers.

    Args:
        form: name of the format.
        underflow_ratio: the share of a layer's gradient, by magnitude, that may underflow.
        layers: each layer's window.
        low: the largest of the layers' lower ends.
        high: the smallest of their upper ends.
        chosen: a power of two: inside of the window if there is one, else the largest that is safe from overflow.
    """

    form: str
    underflow_ratio: float
    layers: tuple[LayerScales, ...]
    low: float
    high: float
    chosen: float

    @property
    def one_serves_all(self) -> bool:
        """Whether some scale lies in every layer's window."""
        return self.low <= self.high

    @property
    def needs_most(self) -> LayerScales:
        """The layer that needs the largest scale."""
        return max(self.layers, key=lambda layer: layer.low)

    @property
    def bears_least(self) -> LayerScales:
        """The layer that overflows first."""
        return min(self.layers, key=lambda layer: layer.high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **asdict(self),
            "layers": [asdict(layer) for layer in self.layers],
            "one_serves_all": self.one_serves_all,
        }

    def __str__(self) -> str:
        if self.low <= 2.0**SMALLEST and self.high >= 2.0**LARGEST:
            return f"{self.form}: any scale serves all layers; it would take {power(self.chosen)}"
        if self.one_serves_all:
            return (
                f"{self.form}: every scale from {power(self.low)} to {power(self.high)} serves all layers; "
                f"it would take {power(self.chosen)}"
            )
        return (
            f"{self.form}: no scale serves all layers: {self.needs_most.layer!r} needs {power(self.low)}, and "
            f"{self.bears_least.layer!r} overflows above {power(self.high)}; it would take {power(self.chosen)}"
        )


def find_scales(
    rows: Sequence[RangeRow], form: Format, *, underflow_ratio: float, counts: Callable[[RangeRow], bool]
) -> Scales | None:
    """The window of scales.

    Args:
        rows: gradients measured at scale 1.
        form: what has to hold them.
        underflow_ratio: the share of a layer's gradient, by magnitude, that may become zero.
        counts: whether a row's gradients must survive in this format.

    Returns:
        The window; None where there is no gradient that counts.
    """
    gradients = [row for row in rows if row.kind.endswith("gradient") and counts(row)]
    layers: dict[str, list[tuple[float, float]]] = {}
    for row in gradients:
        if row.histogram.num_nonzero and 0 < row.histogram.largest < math.inf:
            ends = lowest_scale(row.histogram, form, underflow_ratio), highest_scale(row.histogram, form)
            layers.setdefault(layer_of(row), []).append(ends)
    if not layers:
        return None
    windows = tuple(
        LayerScales(layer=name, low=max(low for low, _ in ends), high=min(high for _, high in ends))
        for name, ends in layers.items()
    )
    low, high = max(window.low for window in windows), min(window.high for window in windows)
    return Scales(
        form=form.name,
        underflow_ratio=underflow_ratio,
        layers=windows,
        low=low,
        high=high,
        chosen=choose(low, high, form),
    )


def choose(low: float, high: float, form: Format) -> float:
    """The scale to take: below overflow by some headroom, above underflow; 1 where the format has float32's range."""
    if form.smallest_normal <= 2.0**-126 and low <= 1.0 <= high:
        return 1.0
    return max(low, high / HEADROOM) if low <= high else high / 2


def lowest_scale(histogram: Histogram, form: Format, underflow_ratio: float) -> float:
    """The smallest power of two at which at most this share of the sum underflows."""
    low, high = SMALLEST, LARGEST
    while low < high:
        middle = (low + high) // 2
        if histogram.lost_ratio(form, 2.0**middle) <= underflow_ratio:
            high = middle
        else:
            low = middle + 1
    return 2.0**low


def highest_scale(histogram: Histogram, form: Format) -> float:
    """The largest power of two at which nothing overflows."""
    exponent = math.floor(math.log2(form.overflow_from / histogram.largest))
    while histogram.overflows(form, 2.0**exponent):
        exponent -= 1
    return 2.0 ** max(SMALLEST, min(LARGEST, exponent))


def layer_of(row: RangeRow) -> str:
    """The module that a row belongs to: a parameter's owner."""
    return row.name.rpartition(".")[0] or row.name if row.kind in ("weight", "weight gradient", "update") else row.name


def power(scale: float) -> str:
    """A power of two as such; another number as it is."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
