"""Small models of every kind that holds memory in its own way, and the count of a real run to compare with."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumulus as acc

LENGTH, WIDTH, VOCABULARY = 6, 16, 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Tied embedding, two blocks, and where told dropout, recomputation and a sparse gradient."""

    def __init__(self, *, dropout: float = 0.0, recompute: bool | None = None, tied: bool = True, sparse: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute
        self.scale = torch.full((1,), 0.5)  # a tensor in a plain attribute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens)) * self.scale
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def in_groups(width: int) -> nn.Module:
    return nn.GroupNorm(4, width)


class Images(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            norm(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            norm(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(tokens))[0])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Cubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Cube.apply(self.first(x)))


class Frozen(nn.Module):
    """A frozen trunk, of which no gradient is kept, below a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Transformer(tied=False).requires_grad_(False)
        self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(tokens).relu())


class Routed(nn.Module):
    """Boolean indexing: how many rows go through the layer depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.layer, self.head = nn.Linear(WIDTH, 10), nn.Linear(10, 10)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.dropout(self.norm(x))
        return self.head(self.layer(x[x[:, 0] > -100.0]))


def token_loss(model: Any, batch: Any) -> acc.Loss:
    logits = model(batch["tokens"])
    labels = batch["labels"]
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return acc.Loss(summed, (labels != -1).sum())


def class_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(count: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(VOCABULARY, (count, LENGTH)),
        "labels": torch.randint(-1, VOCABULARY, (count, LENGTH)),
    }


def images(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 3, 12, 12), "y": torch.randint(10, (count,))}


def vectors(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, WIDTH), "y": torch.randint(10, (count,))}


def real_count(
    model: Any, optimizer: Any, loss_fn: Callable[..., Any], batch: Any, **options: Any
) -> acc.memory.LiveBytes:
    """Live bytes of three real steps of two micro-batches; garbage collection off, as chance would free its cycles."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of BatchNorm
            step = acc.TrainStep(model, optimizer, loss_fn, **options)
        with acc.memory.LiveBytes().watching(step) as live:
            for _ in range(3):
                step(batch)
        return live
    finally:
        gc.enable()
