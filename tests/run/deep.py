"""A deep model for the tests of a plan, in the form that a user's own file has; and one that fake tensors refuse."""

import torch
from torch import nn

import accumulus as acc


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.output(torch.relu(self.input(hidden)))


class Deep(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.register_buffer("shift", torch.ones(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, hidden):
        hidden = hidden + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Gated(Deep):
    """Its shapes depend on the data."""

    def forward(self, hidden):
        kept = hidden[hidden.sum((1, 2)) > -1e9]
        return super().forward(kept)


def loss_fn(model, rows):
    return acc.Loss(model(rows).square().sum(), rows.shape[0] * rows.shape[1])


def make(model, loss_fn=loss_fn):
    lengths = torch.randint(3, 17, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return acc.Task(
        model=model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        loss_fn=loss_fn,
        train_data=[torch.randn(length, 32) for length in lengths],
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        length=len,
    )


def task():
    return make(Deep())


def double():
    return make(Deep().double())


def gated():
    return make(Gated())


def failing():
    def loss_fn(model, rows):
        raise RuntimeError("the loss is lost")

    return make(Deep(), loss_fn=loss_fn)


def no_loss():
    return make(Deep(), loss_fn=lambda model, rows: "nothing")
