"""The update alone: 40 million float32 parameters in fp16 mode, with clipping and fused AdamW, against GradScaler.

GradScaler's way reads and writes the gradients for `unscale_`, reads them for the norm, reads and writes them to clip,
and reads them to step. Ours reads them for the norm and to step. Both start from the same scaled gradients.
"""

from __future__ import annotations

import torch

from accumulus.guard import Guard
from accumulus.update import Update
from timing import Rows, medians, show

NUM_PARAMETERS = 40_000_000
SHAPES = [(1024, 1024)] * 36 + [(4096, 512)] + [(1024,)] * 64
SCALE = 2.0**16


class Bag(torch.nn.Module):
    """Parameters of a transformer's sizes and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.ParameterList(torch.randn(shape) * 0.02 for shape in SHAPES)
        self.gradients = [torch.randn(shape) * SCALE * 1e-3 for shape in SHAPES]

    def fill(self) -> None:
        """Gives every parameter its scaled gradient, as the last backward pass leaves it."""
        for parameter, gradient in zip(self.bag, self.gradients, strict=True):
            parameter.grad = gradient.clone()


def measure(rounds: int = 15) -> Rows:
    by_scaler, ours, norm_and_step = Bag(), Bag(), Bag()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.AdamW(by_scaler.parameters(), fused=True)
    folded = torch.optim.AdamW(ours.parameters(), fused=True)
    update = Update(ours, folded, Guard(ours, folded), max_grad_norm=1.0, needs_loss_scale=True)
    floor = torch.optim.AdamW(norm_and_step.parameters(), fused=True)

    def grad_scaler() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(by_scaler.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def accumulus() -> None:
        update(SCALE, True)

    def norm_pass_and_fused_step() -> None:
        torch.nn.utils.get_total_norm([p.grad for p in norm_and_step.bag])
        floor.step()
        floor.zero_grad()

    sides = {"GradScaler": grad_scaler, "accumulus": accumulus, "floor": norm_pass_and_fused_step}
    # Filling is not timed. Both sides write into the gradients, so each round needs new ones.
    before = {"GradScaler": by_scaler.fill, "accumulus": ours.fill, "floor": norm_and_step.fill}
    seconds = medians(sides, rounds=rounds, warmup=2, before=before)
    what = f"update of {NUM_PARAMETERS // 10**6} M parameters, fp16 + clip + fused AdamW"
    return [
        {
            "what": what,
            "against": "GradScaler: unscale_, clip_grad_norm_, step, update",
            "ratio": seconds["accumulus"] / seconds["GradScaler"],
            "bound": 0.80,
            "seconds": seconds["accumulus"],
        },
        {
            "what": "the same, of torch's own norm and fused step alone (no scale, no clip)",
            "against": "GradScaler: unscale_, clip_grad_norm_, step, update",
            "ratio": seconds["floor"] / seconds["GradScaler"],
            "bound": None,
            "seconds": seconds["floor"],
        },
    ]


if __name__ == "__main__":
    show(measure())
