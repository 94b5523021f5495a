"""How long it takes to know a step's memory before anything runs, and how far that is from the real step's count."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import accumulus as acc
from timing import Rows, medians, show

NUM_LAYERS, WIDTH, VOCABULARY = 12, 512, 1000
LENGTH = 64
BOUND_SECONDS = 2.0


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def loss_fn(model: nn.Module, tokens: Tensor) -> acc.Loss:
    logits = model(tokens[:, :-1])
    summed = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return acc.Loss(summed, tokens[:, 1:].numel())


def measure(rounds: int = 5) -> Rows:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(VOCABULARY, (4, LENGTH + 1))

    def estimate(microbatch: int, precision: str = "bf16") -> acc.memory.MemoryEstimate:
        return acc.memory.estimate(model, optimizer, loss_fn, batch, precision=precision, microbatch=microbatch)

    started = time.perf_counter()
    estimate(2)
    first_seconds = time.perf_counter() - started
    seconds = medians({"small": lambda: estimate(2), "large": lambda: estimate(2000)}, rounds=rounds, warmup=0)
    what = f"memory of a {NUM_LAYERS}-layer transformer of width {WIDTH}"
    rows: Rows = [
        row(
            f"{what}, estimated ({seconds['small']:.2f} s; first in a process {first_seconds:.2f} s)",
            f"{BOUND_SECONDS:g} s",
            first_seconds / BOUND_SECONDS,
            1.0,
            first_seconds,
        ),
        row(
            "the same for a micro-batch of 2000",
            "that of 2",
            seconds["large"] / seconds["small"],
            None,
            seconds["large"],
        ),
    ]
    for precision in ("fp32", "bf16"):
        found = estimate(2, precision)
        started = time.perf_counter()
        counted = real_peak_bytes(model, batch, precision)
        ratio = found.peak_bytes / counted
        rows.append(
            row(
                f"peak bytes estimated, {precision} ({found.peak_bytes / 2**20:.0f} MiB)",
                "live bytes of the real step",
                ratio,
                1.01,
                time.perf_counter() - started,
            )
        )
    return rows


def row(what: str, against: str, ratio: float, bound: float | None, seconds: float) -> dict[str, object]:
    return {"what": what, "against": against, "ratio": ratio, "bound": bound, "seconds": seconds}


def real_peak_bytes(model: nn.Module, batch: Tensor, precision: str) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = acc.TrainStep(model, optimizer, loss_fn, precision=precision, microbatch=2)
    with acc.memory.LiveBytes().watching(step) as live:
        for _ in range(2):
            step(batch)
    return live.peak_bytes


if __name__ == "__main__":
    show(measure())
