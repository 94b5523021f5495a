"""How large a micro-batch may be, as far as is known: in numbers of its tensors, so that lengths can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

__all__ = ["NO_BOUND", "Bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest micro-batch that is known to fit.

    Args:
        elements: numbers that its tensors may hold.
        sample_elements: of these in one sample, in the micro-batch that the bound was found with.
    """

    elements: float
    sample_elements: float

    def excess(self, elements: int, size: int) -> float:
        """How many times too large a micro-batch is; at most 1 where it fits.

        Samples that are longer than those known may need more memory than in proportion to their length, as attention
        does: up to its square.

        Args:
            elements: numbers in its tensors.
            size: its samples.
        """
        if self.elements == math.inf or not elements:
            return 0.0
        return elements * max(1.0, self.longer(elements, size)) / self.elements

    def longer(self, elements: int, size: int) -> float:
        """How many times as large a micro-batch's samples are as those that the bound was found with."""
        return elements / size / self.sample_elements if self.sample_elements else 1.0

    def widened(self, elements: int, size: int) -> Self:
        """The larger of the bound and a micro-batch."""
        return replace(
            self,
            elements=max(self.elements, elements),
            sample_elements=max(self.sample_elements, elements / size),
        )

    def scaled(self, ratio: float) -> Self:
        """The bound of micro-batches that are smaller in this ratio."""
        return replace(self, elements=self.elements * ratio)

    def state_dict(self) -> dict[str, Any]:
        """Every field; infinity as None, for JSON."""
        return {
            "elements": None if self.elements == math.inf else self.elements,
            "sample_elements": self.sample_elements,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The bound that was saved.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        elements = state["elements"]
        found = cls(math.inf if elements is None else float(elements), float(state["sample_elements"]))
        if not (found.elements > 0 and 0 <= found.sample_elements < math.inf):
            raise ValueError(f"a bound must be above 0, not {found}")
        return found


NO_BOUND = Bound(elements=math.inf, sample_elements=0.0)
