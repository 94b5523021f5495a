"""The norm of 40 million float32 numbers on a CPU: its time and its error beside torch's own kernel.

The errors are printed with the rows; the norm decides clipping, so its error is one of the update.
"""

from __future__ import annotations

import torch

from accumulus.norm import norm_of
from timing import Rows, medians, show

NUM_ELEMENTS = 40_000_000


def measure(rounds: int = 15) -> Rows:
    torch.manual_seed(0)
    gradient = torch.randn(NUM_ELEMENTS)
    right = float(gradient.double().norm())
    sides = {"ours": lambda: norm_of([gradient]), "torch": lambda: torch.linalg.vector_norm(gradient).item()}
    error = {name: abs(float(side()) / right - 1) for name, side in sides.items()}
    seconds = medians(sides, rounds=rounds)
    return [
        {
            "what": f"norm of {NUM_ELEMENTS / 1e6:g} M numbers, relative error {error['ours']:.0e}",
            "against": f"torch.linalg.vector_norm, relative error {error['torch']:.0e}",
            "ratio": seconds["ours"] / seconds["torch"],
            "bound": None,
            "seconds": seconds["ours"],
        }
    ]


if __name__ == "__main__":
    show(measure())
