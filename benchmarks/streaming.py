"""What the streaming form costs beside the loop one writes by hand, and what two peers' loops cost beside the same.

The model, the samples and the number of micro-batches are those of `overhead`. The hand-written loop and ours do the
same: weigh each micro-batch by the number of labels it came with, report the mean loss, clip by the norm, skip a
non-finite step, update, drop the gradients. By hand the window is a list, so its total is known before the first
backward pass; ours takes the micro-batches one by one.

The peers' loops are those of their documentation, with clipping and a running loss. They do less: every micro-batch
counts the same, however many labels it has, and Accelerate's does not look for non-finite gradients. A peer that is
not installed (`pip install "accumulus[peers]"`) is left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import accumulus as acc
from overhead import IGNORED, NUM_MICROBATCHES, NUM_SAMPLES, make_model
from timing import Rows, medians, show

Microbatch = tuple[Tensor, Tensor, int]
"""Inputs, labels, and how many of the labels count, as a collate function gives it."""


def make_microbatches() -> list[Microbatch]:
    torch.manual_seed(1)
    labels = torch.randint(0, 8, (NUM_SAMPLES,))
    labels[::5] = IGNORED
    size = NUM_SAMPLES // NUM_MICROBATCHES
    pairs = zip(torch.randn(NUM_SAMPLES, 16).split(size), labels.split(size), strict=True)
    return [(x.clone(), y.clone(), int((y != IGNORED).sum())) for x, y in pairs]


def hand_written(
    model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[Microbatch]
) -> tuple[Tensor, Tensor]:
    """The exact loop, as an expert writes it, over a window that is a list."""
    total = sum(count for _, _, count in microbatches)
    loss_sum = torch.zeros(())
    for x, y, _ in microbatches:
        loss = nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum") / total
        loss.backward()
        loss_sum += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss_sum, norm


def streaming(accumulator: acc.Accumulator, model: nn.Module, microbatches: list[Microbatch]) -> acc.StepResult:
    """Ours."""
    for (x, y, count), is_last in acc.windows(microbatches, size=NUM_MICROBATCHES):
        with accumulator.microbatch(is_last):
            loss = nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
            accumulator.backward(acc.Loss(loss, count))
        if is_last:
            result = accumulator.step()
    return result


def make_accumulator(model: nn.Module, fused: bool | None) -> acc.Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return acc.Accumulator(model, optimizer, precision="fp32", max_grad_norm=1.0)


def make_accelerate(model: nn.Module, microbatches: list[Microbatch]) -> Callable[[], Tensor]:
    """Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=NUM_MICROBATCHES, cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def loop() -> Tensor:
        loss_sum = torch.zeros(())
        for x, y, _ in microbatches:
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(x), y, ignore_index=IGNORED)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.detach()
        return loss_sum / NUM_MICROBATCHES

    return loop


def make_fabric(model: nn.Module, microbatches: list[Microbatch]) -> Callable[[], Tensor]:
    """Lightning Fabric's loop. On one device `no_backward_sync` does nothing; it is there as users have it."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    prepared, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

    def loop() -> Tensor:
        loss_sum = torch.zeros(())
        for index, (x, y, _) in enumerate(microbatches):
            is_accumulating = (index + 1) % NUM_MICROBATCHES != 0
            with fabric.no_backward_sync(prepared, enabled=is_accumulating):
                loss = nn.functional.cross_entropy(prepared(x), y, ignore_index=IGNORED)
                fabric.backward(loss / NUM_MICROBATCHES)
            if not is_accumulating:
                fabric.clip_gradients(prepared, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.detach()
        return loss_sum / NUM_MICROBATCHES

    return loop


PEERS = {
    "Accelerate's accumulate()": ("accelerate", make_accelerate),
    "Lightning Fabric's loop": ("lightning_fabric", make_fabric),
}


def installed_peers() -> dict[str, Callable[[nn.Module, list[Microbatch]], Callable[[], Tensor]]]:
    """The peers that are here; says on stderr which are not."""
    found = {}
    for name, (package, make) in PEERS.items():
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed", file=sys.stderr)
        else:
            found[name] = make
    return found


def measure(rounds: int = 600) -> Rows:
    microbatches = make_microbatches()
    sides: dict[str, Callable[[], object]] = {}
    cases: list[tuple[str, str, float | None]] = []  # of each row: whose time, with which optimizer, bound
    for optimizer_name, fused in (("AdamW", None), ("AdamW fused", True)):
        by_hand, ours = make_model(), make_model()
        optimizer = torch.optim.AdamW(by_hand.parameters(), fused=fused)
        accumulator = make_accumulator(ours, fused)
        sides[f"by hand, {optimizer_name}"] = functools.partial(hand_written, by_hand, optimizer, microbatches)
        sides[f"Accumulator, {optimizer_name}"] = functools.partial(streaming, accumulator, ours, microbatches)
        cases.append(("Accumulator", optimizer_name, 1.10))
    for name, make in installed_peers().items():
        sides[f"{name}, AdamW"] = make(make_model(), microbatches)
        cases.append((name, "AdamW", None))
    seconds = medians(sides, rounds=rounds)
    return [
        {
            "what": f"{whose}, {NUM_MICROBATCHES} micro-batches of a tiny model, {optimizer_name}",
            "against": "hand-written loop",
            "ratio": seconds[f"{whose}, {optimizer_name}"] / seconds[f"by hand, {optimizer_name}"],
            "bound": bound,
            "seconds": seconds[f"{whose}, {optimizer_name}"],
        }
        for whose, optimizer_name, bound in cases
    ]


if __name__ == "__main__":
    show(measure())
