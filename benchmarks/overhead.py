"""What a `TrainStep` costs beside the loop one writes by hand, on a model so small that nothing hides it.

Both sides do the same: cut the batch, run each micro-batch, weigh it by its tokens, report the mean loss, clip by the
norm, skip a non-finite step, update, drop the gradients. They run alternately in one process; the ratio is of medians.
"""

from __future__ import annotations

import torch

import accumulus as acc
from timing import Rows, medians

IGNORED = -100
NUM_MICROBATCHES = 16
NUM_SAMPLES = 64


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, 8, (NUM_SAMPLES,))
    labels[::5] = IGNORED
    return torch.randn(NUM_SAMPLES, 16), labels


def hand_written(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]):
    """The exact loop, as an expert writes it: sums over the batch's own token count."""
    inputs, labels = batch
    size = NUM_SAMPLES // NUM_MICROBATCHES
    total = int((labels != IGNORED).sum())
    loss_sum = torch.zeros(())
    for start in range(0, NUM_SAMPLES, size):
        x, y = inputs[start : start + size], labels[start : start + size]
        loss = torch.nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum") / total
        loss.backward()
        loss_sum += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss_sum, norm


def loss_fn(model: torch.nn.Module, microbatch: tuple[torch.Tensor, torch.Tensor]) -> acc.Loss:
    x, y = microbatch
    loss = torch.nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
    return acc.Loss(loss, (y != IGNORED).sum())


def measure(rounds: int = 300) -> Rows:
    batch = make_batch()
    sides = {}
    for name, fused in (("AdamW", None), ("AdamW fused", True)):
        by_hand, ours = make_model(), make_model()
        optimizer = torch.optim.AdamW(by_hand.parameters(), fused=fused)
        step = acc.TrainStep(
            ours,
            torch.optim.AdamW(ours.parameters(), fused=fused),
            loss_fn,
            precision="fp32",
            microbatch=acc.by_count(NUM_MICROBATCHES),
            max_grad_norm=1.0,
        )
        sides[f"{name}, by hand"] = lambda m=by_hand, o=optimizer: hand_written(m, o, batch)
        sides[f"{name}, TrainStep"] = lambda s=step: s(batch)
    seconds = medians(sides, rounds=rounds)
    return [
        {
            "what": f"TrainStep, {NUM_MICROBATCHES} micro-batches of a tiny model, {name}",
            "against": "hand-written loop",
            "ratio": seconds[f"{name}, TrainStep"] / seconds[f"{name}, by hand"],
            "bound": 1.10,
            "seconds": seconds[f"{name}, TrainStep"],
        }
        for name in ("AdamW", "AdamW fused")
    ]


if __name__ == "__main__":
    from timing import show

    show(measure())
