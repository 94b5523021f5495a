"""bf16 against fp32 on a stack of transformer blocks of width 512, beside a hand-written autocast loop.

What bf16 gains depends on the machine (matrix units or not), so the bound is on the ratio to the loop by hand: a
`TrainStep` must not be slower. Forward, backward, clip and fused AdamW are in the time.
"""

from __future__ import annotations

import torch

import accumulus as acc
from timing import Rows, medians, show

WIDTH, NUM_BLOCKS, LENGTH = 512, 4, 128
NUM_SAMPLES, NUM_MICROBATCHES = 16, 4


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(block, NUM_BLOCKS, enable_nested_tensor=False)


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> acc.Loss:
    return acc.Loss(model(x).float().square().sum(), x.shape[0] * LENGTH)


def autocast_loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, *, bf16: bool) -> None:
    """The loop by hand: autocast around each forward pass, as its documentation shows."""
    total = NUM_SAMPLES * LENGTH
    for x in batch.split(NUM_SAMPLES // NUM_MICROBATCHES):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(x).float().square().sum() / total
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()


def measure(rounds: int = 15) -> Rows:
    torch.manual_seed(1)
    batch = torch.randn(NUM_SAMPLES, LENGTH, WIDTH)
    sides = {}
    for precision in ("fp32", "bf16"):
        by_hand, ours = make_model(), make_model()
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-5, fused=True)
        step = acc.TrainStep(
            ours,
            torch.optim.AdamW(ours.parameters(), lr=1e-5, fused=True),
            loss_fn,
            precision=precision,
            microbatch=acc.by_count(NUM_MICROBATCHES),
            max_grad_norm=1.0,
        )
        bf16 = precision == "bf16"
        sides[f"{precision}, by hand"] = lambda m=by_hand, o=optimizer, b=bf16: autocast_loop(m, o, batch, bf16=b)
        sides[f"{precision}, TrainStep"] = lambda s=step: s(batch)
    seconds = medians(sides, rounds=rounds, warmup=2)
    what = f"{NUM_BLOCKS} transformer blocks of width {WIDTH}, TrainStep"
    rows: Rows = [
        {
            "what": f"{what}, {precision}",
            "against": f"hand-written {'autocast ' if precision == 'bf16' else ''}loop in {precision}",
            "ratio": seconds[f"{precision}, TrainStep"] / seconds[f"{precision}, by hand"],
            "bound": 1.03 if precision == "bf16" else None,
            "seconds": seconds[f"{precision}, TrainStep"],
        }
        for precision in ("fp32", "bf16")
    ]
    rows.append(
        {
            "what": f"{what}, bf16",
            "against": "TrainStep in fp32",
            "ratio": seconds["bf16, TrainStep"] / seconds["fp32, TrainStep"],
            "bound": None,
            "seconds": seconds["bf16, TrainStep"],
        }
    )
    return rows


if __name__ == "__main__":
    show(measure())
