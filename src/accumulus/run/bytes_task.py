"""The built-in task `bytes`: next-byte prediction on source code that every Python brings along."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from accumulus import Loss
from accumulus.errors import UsageError
from accumulus.run.bytes_data import load_texts, split_texts
from accumulus.run.bytes_model import START, VOCABULARY_SIZE, ByteModel
from accumulus.run.task import Task

IGNORED = -100
LENGTH_MULTIPLE = 16
PROMPT = b"def "
NUM_SAMPLE_BYTES = 200
MAX_HELDOUT_SAMPLES = 384
"""Enough that the mean is steady to about 0.02 bits, few enough that an evaluation takes a few steps' time."""


def bytes_task(
    *,
    data: Sequence[str] = (),
    max_length: int = 128,
    d_model: int = 128,
    num_layers: int = 2,
    num_heads: int = 2,
) -> Task:
    """Makes the task.

    Args:
        data: text files or folders; none means the running Python's standard library.
        max_length: samples are cut after so many bytes.
        d_model: width of the model.
        num_layers: number of its blocks.
        num_heads: attention heads of a block; few and wide ones, because the CPU's attention kernel is slow per head.

    Returns:
        The task; its samples are `bytes`, its weight is the number of predicted bytes.

    Raises:
        UsageError: the data cannot be read or the sizes do not fit.
    """
    model = ByteModel(d_model=d_model, num_layers=num_layers, num_heads=num_heads)
    train, heldout = split_texts(load_texts(data, max_length=max_length))
    if not train or not heldout:
        raise UsageError("--data holds a single piece of text, so nothing can be held out; give more text")
    return Task(
        model=model,
        optimizer=make_adamw,
        loss_fn=loss_fn,
        train_data=train,
        eval_data=sorted(heldout[:MAX_HELDOUT_SAMPLES], key=len),  # similar lengths together: little padding
        collate=collate,
        length=len,
        sample=sample_text,
        unit="bytes",
        derived={"bits_per_byte": bits_of},
    )


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only; fused, so that it can apply the step's one multiplier itself."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), fused=True)


def collate(samples: list[bytes]) -> dict[str, Any]:
    """Pads samples on the right to the longest of them, rounded up to a multiple of 16.

    Rounded, because kernels are chosen and kept per shape: 128 different lengths cost more time and memory in bf16 on
    a CPU than the padding does.

    Args:
        samples: non-empty texts.

    Returns:
        `inputs` (int64, a start token and all bytes but the last), `labels` (int64, the bytes; -100 where there is
        padding) and `num_bytes`, counted here on the host so that nobody has to ask the device for it.
    """
    lengths = np.fromiter(map(len, samples), np.int64, len(samples))
    padded = -(-int(lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    tokens = np.full((len(samples), padded + 1), START, np.int64)
    tokens[:, 1:][np.arange(padded) < lengths[:, None]] = np.frombuffer(b"".join(samples), np.uint8)
    labels = np.where(tokens[:, 1:] == START, IGNORED, tokens[:, 1:])
    return {
        "inputs": torch.from_numpy(tokens[:, :-1].copy()),
        "labels": torch.from_numpy(labels),
        "num_bytes": int(lengths.sum()),
    }


def loss_fn(model: nn.Module, microbatch: dict[str, Any]) -> Loss:
    """Cross-entropy of the next byte, summed in float32.

    Args:
        model: tokens to logits.
        microbatch: what `collate` made.

    Returns:
        The sum in nats over `num_bytes`.
    """
    logits: Tensor = model(microbatch["inputs"])
    loss_sum = F.cross_entropy(
        logits.float().flatten(0, 1), microbatch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(loss_sum, microbatch["num_bytes"])


def bits_of(nats: float) -> float:
    """A mean cross-entropy in bits."""
    return nats / math.log(2)


@torch.no_grad()
def sample_text(model: nn.Module, *, seed: int = 0, temperature: float = 0.7) -> str:
    """Lets the model write, starting with `def `.

    Args:
        model: tokens to logits.
        seed: of the draws; the global random state is left alone.
        temperature: below 1 prefers likely bytes.

    Returns:
        About 200 bytes, as text.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = [START, *PROMPT]
    for _ in range(NUM_SAMPLE_BYTES):
        logits = model(torch.tensor([tokens], device=device))[0, -1].float().cpu()
        logits[START:VOCABULARY_SIZE] = -math.inf
        tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    return printable(bytes(tokens[1:]))


def printable(content: bytes) -> str:
    """Bytes as text that cannot disturb a terminal: everything but printable characters, tabs and line ends is "?"."""
    text = content.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
