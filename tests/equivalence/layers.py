"""Small modules that the planted and the honest models are put together from."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 11


def tokens(lengths, *, width: int | None = None, seed: int = 0):
    """Padded token ids (0 is padding), their mask, and labels with -100 on padding."""
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator)
    labels = torch.randint(0, VOCABULARY, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "labels": torch.where(mask, labels, -100),
    }


def vectors(count: int = 9, width: int = 4, *, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, width, generator=generator),
        "z": torch.randn(count, width, generator=generator),
        "y": torch.randint(0, 3, (count,), generator=generator),
        "t": (torch.rand(count, 3, generator=generator) > 0.5).float(),
        "r": torch.rand(count, generator=generator),
    }


def pictures(count: int = 8, *, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, 3, 8, 8, generator=generator),
        "y": torch.randint(0, 3, (count,), generator=generator),
    }


def mlp(*inside: nn.Module, width: int = 4, out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), *inside, nn.Tanh(), nn.Linear(8, out))


def classify(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Block(nn.Module):
    """Attention and feed-forward, before either a LayerNorm."""

    def __init__(self, width: int, *, dropout: float = 0.0, masks: bool = True, batch_first: bool = True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=batch_first)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, width))
        self.masks = masks

    def forward(self, x, padding):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, key_padding_mask=padding if self.masks else None, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token classifier whose positions and attention leave padding alone, unless told otherwise."""

    def __init__(self, *, num_blocks: int = 2, dropout: float = 0.0, masks: bool = True, tied: bool = False, **block):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(8, dropout=dropout, masks=masks, **block) for _ in range(num_blocks))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch):
        padding = batch["attention_mask"] == 0
        x = self.embedding(batch["input_ids"])
        position = torch.arange(x.shape[1], device=x.device)[:, None] / (1 + torch.arange(8, device=x.device))
        x = x + position.to(x.dtype).sin()
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x)


def token_sum(model, batch):
    logits, labels = model(batch), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def token_mean(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def pad(samples):
    """Collates lists of token ids: padded to the longest of them."""
    lengths = [len(sample) for sample in samples]
    made = tokens(lengths)
    for row, sample in enumerate(samples):
        made["input_ids"][row, : len(sample)] = torch.tensor(sample)
        made["labels"][row, : len(sample)] = (torch.tensor(sample) * 3) % VOCABULARY
    return made


def sentences(lengths=(2, 7, 3, 5, 4, 6, 3), seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


class Experts(nn.Module):
    """Four experts, of which each row takes the best; also returns the router's probabilities."""

    def __init__(self, width: int = 8, num_experts: int = 4, capacity: int | None = None):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))
        self.capacity = capacity

    def forward(self, x):
        rates = self.router(x).softmax(-1)
        weight, choice = rates.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero()[: self.capacity, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out, rates


class Residual(nn.Module):
    """A small ResNet of two stages."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.stem_norm(self.stem(x)))
        x = self.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))
        return self.head(x.mean((2, 3)))


def sinusoid(length: int, width: int):
    position = torch.arange(length)[:, None] / (10 ** (torch.arange(width) / width) * math.pi)
    return position.sin()
