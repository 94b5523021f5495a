"""Small models: honest ones, and ones with one planted fault each."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Run(nn.Module):
    """A function as a module, so that it has a path."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def squares(model, batch):
    return model(batch).float().square().mean()


def classes(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float(), labels)


def rows(count=3, *shape):
    shape = shape or (16, 8)
    return [torch.randn(*shape) for _ in range(count)]


class Attention(nn.Module):
    """One head; `mask` makes the additive mask from the scores."""

    def __init__(self, mask, width=16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mask, self.scores = mask, Run(lambda q, k, mask: (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1))

    def forward(self, x):
        query, key = self.query(x), self.key(x)
        return self.scores(query, key, self.mask(query)) @ self.value(x)


def causal(query):
    length = query.shape[-2]
    return torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)


def fully_masked(minimum):
    """The first row sees nothing at all."""

    def mask(query):
        length = query.shape[-2]
        hidden = torch.ones(length, length).triu(1)
        hidden[0] = 1
        return (hidden * minimum).to(query.dtype)

    return mask


class Encoder(nn.Module):
    """torch's own layers, with its causal mask of -inf."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        return F.linear(hidden, self.embedding.weight)  # tied


class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0])


def next_tokens(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def honest():
    """Name to model, loss and batches."""
    images = [(torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    vectors = [(torch.randn(16, 8), torch.randint(0, 5, (16,))) for _ in range(2)]
    tokens = [torch.randint(0, 50, (4, 12)) for _ in range(2)]
    return {
        "mlp": (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)), classes, vectors),
        "cnn": (
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
            ),
            classes,
            images,
        ),
        "attention": (nn.Sequential(Attention(causal), nn.Linear(16, 2)), squares, rows(2, 4, 6, 16)),
        "transformer": (Encoder(), next_tokens, tokens),
        "lstm": (Rnn(), squares, rows(2, 4, 6, 8)),
        "embedding bag": (
            nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 5)),
            classes,
            [(torch.randint(0, 50, (8, 4)), torch.randint(0, 5, (8,))) for _ in range(2)],
        ),
    }
