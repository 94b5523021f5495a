"""What a `TrainStep` costs beside the loop one writes by hand, on a model so small that nothing hides it.

Both sides do the same: cut the batch, run each micro-batch, weigh it by its labels, report the mean loss, clip by the
norm, skip a non-finite step, update, drop the gradients. They run alternately in one process; the ratio is of medians.

In the first rows the number of labels of each sample comes with the batch, as a collate function counts it. In the last
one it is counted from the labels: by hand once for the batch, in the loss function once for each micro-batch, which
costs two more operators there.
"""

from __future__ import annotations

import functools

import torch

import accumulus as acc
from timing import Rows, medians

IGNORED = -100
NUM_MICROBATCHES = 16
NUM_SAMPLES = 64


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


Batch = tuple[torch.Tensor, torch.Tensor, list[int]]


def make_batch() -> Batch:
    torch.manual_seed(1)
    labels = torch.randint(0, 8, (NUM_SAMPLES,))
    labels[::5] = IGNORED
    return torch.randn(NUM_SAMPLES, 16), labels, (labels != IGNORED).int().tolist()


def hand_written(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, *, counts_labels: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact loop, as an expert writes it: sums over the batch's own number of labels."""
    inputs, labels, counts = batch
    size = NUM_SAMPLES // NUM_MICROBATCHES
    total = int((labels != IGNORED).sum()) if counts_labels else sum(counts)
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


def with_counts(model: torch.nn.Module, microbatch: Batch) -> acc.Loss:
    x, y, counts = microbatch
    return acc.Loss(torch.nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum"), sum(counts))


def counting_labels(model: torch.nn.Module, microbatch: Batch) -> acc.Loss:
    x, y, _ = microbatch
    loss = torch.nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
    return acc.Loss(loss, (y != IGNORED).sum())


CASES = {
    "AdamW": (None, with_counts),
    "AdamW fused": (True, with_counts),
    "AdamW fused, labels counted": (True, counting_labels),
}


def measure(rounds: int = 300) -> Rows:
    batch = make_batch()
    sides = {}
    for name, (fused, loss_fn) in CASES.items():
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
        loop = functools.partial(hand_written, by_hand, optimizer, batch, counts_labels=loss_fn is counting_labels)
        sides[f"{name}, by hand"] = loop
        sides[f"{name}, TrainStep"] = functools.partial(step, batch)
    seconds = medians(sides, rounds=rounds)
    return [
        {
            "what": f"TrainStep, {NUM_MICROBATCHES} micro-batches of a tiny model, {name}",
            "against": "hand-written loop",
            "ratio": seconds[f"{name}, TrainStep"] / seconds[f"{name}, by hand"],
            "bound": None if "counted" in name else 1.10,  # there the two sides do not do the same
            "seconds": seconds[f"{name}, TrainStep"],
        }
        for name in CASES
    ]


if __name__ == "__main__":
    from timing import show

    show(measure())
