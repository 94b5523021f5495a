"""Micro-batches by token budget against micro-batches in random order of the same peak number of tokens.

The data is that of the built-in task `bytes`: functions of Python's own library, cut at 1,024 bytes, 256 of them in a
batch, in random order as a loader gives them. Both sides may hold `MAX_TOKENS` padded tokens at once. In random order a
micro-batch must be so small that it would fit if it held the longest sample, as it may; by tokens, short samples run
with short ones. Collating is in the time, and so are clip and update.

Accelerate's loop is that of its documentation, over the ordinary padded loader with the same small micro-batches. It is
left out where it is not installed.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

import accumulus as acc
from accumulus.run.batches import Batches
from accumulus.run.bytes_data import load_texts, split_texts
from accumulus.run.bytes_model import ByteModel
from accumulus.run.bytes_task import LENGTH_MULTIPLE, collate, loss_fn, make_adamw
from timing import Rows, medians, show

MAX_LENGTH, BATCH_SIZE, NUM_BATCHES = 1024, 256, 3
MAX_TOKENS = 16 * MAX_LENGTH
SIZES = {"d_model": 64, "num_layers": 2, "num_heads": 1}

Samples = list[bytes]


def load_samples() -> Samples:
    return split_texts(load_texts((), max_length=MAX_LENGTH))[0]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return ByteModel(**SIZES)


def make_step(microbatch: object) -> acc.TrainStep:
    model = make_model()
    optimizer = make_adamw(model)
    return acc.TrainStep(
        model, optimizer, loss_fn, precision="fp32", microbatch=microbatch, collate=collate, max_grad_norm=1.0
    )


def make_accelerate(size: int) -> Callable[[Samples], None]:
    """Accelerate's loop over one batch of samples."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=-(-BATCH_SIZE // size), cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_adamw(model))

    def loop(batch: Samples) -> None:
        loader = accelerator.prepare(torch.utils.data.DataLoader(batch, batch_size=size, collate_fn=collate))
        for part in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model, part)
                accelerator.backward(loss.sum / loss.weight)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return loop


def num_padded_tokens(step: acc.TrainStep, batches: list[Samples]) -> int:
    """How many tokens go through the model, padding included."""
    return sum(part["inputs"].numel() for batch in batches for part, _ in step.split(batch))


def measure(rounds: int = 5) -> Rows:
    shuffled = Batches(load_samples(), batch_size=BATCH_SIZE, seed=0)  # without length=, so not sorted
    batches = [shuffled[index] for index in range(min(NUM_BATCHES, shuffled.per_epoch))]
    longest = max(len(sample) for batch in batches for sample in batch)
    size = MAX_TOKENS // (-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    grouped = make_step(acc.by_tokens(MAX_TOKENS, multiple_of=LENGTH_MULTIPLE))
    in_order = make_step(size)
    loops: dict[str, Callable[[Samples], object]] = {"by tokens": grouped, "random order": in_order}
    if find_spec("accelerate") is None:
        print("Accelerate is left out: accelerate is not installed", file=sys.stderr)
    else:
        loops["Accelerate"] = make_accelerate(size)
    sides = {name: functools.partial(run_next, loop, itertools.cycle(batches)) for name, loop in loops.items()}
    seconds = medians(sides, rounds=rounds, warmup=1)
    tokens = {name: num_padded_tokens(step, batches) for name, step in (("ours", grouped), ("random", in_order))}
    what = f"by_tokens({MAX_TOKENS}), {BATCH_SIZE} functions of up to {MAX_LENGTH} bytes"
    against = {
        "random order": (f"random order, {size} at a time: the same peak tokens", 0.50),
        "Accelerate": (f"Accelerate's accumulate(), padded loader of {size} at a time", None),
    }
    rows: Rows = [
        {
            "what": what,
            "against": against[name][0],
            "ratio": seconds["by tokens"] / seconds[name],
            "bound": against[name][1],
            "seconds": seconds["by tokens"],
            "samples_per_second": {side: BATCH_SIZE / seconds[side] for side in ("by tokens", name)},
        }
        for name in sides
        if name != "by tokens"
    ]
    ratio = tokens["ours"] / tokens["random"]
    count = {
        "what": "the same, padded tokens instead of time",
        "against": "random order",
        "ratio": ratio,
        "bound": None,
    }
    return [*rows, count | {"seconds": seconds["by tokens"]}]


def run_next(loop: Callable[[Samples], object], batches: itertools.cycle[Samples]) -> None:
    loop(next(batches))


if __name__ == "__main__":
    show(measure())
