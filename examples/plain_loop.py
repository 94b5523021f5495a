"""The loop that everybody writes, and where it goes wrong.

Four micro-batches of four samples, mean squared error: dividing each micro-batch's loss by four is right, and
`TrainStep` agrees with it. Micro-batches of 7, 5, 3 and 1 make the same loop wrong, and `TrainStep` is not.
Then the same in fp16 with loss scaling, and in bf16.

    python examples/plain_loop.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import accumulus as acc


@dataclass(frozen=True)
class Sizes:
    """A rule that cuts the batch into pieces of these sizes."""

    pieces: tuple[int, ...]

    def sizes(self, num_samples: int) -> Sequence[int]:
        """The sizes, for a batch of as many samples."""
        return self.pieces


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, pieces: Sequence[int]) -> None:
    """One update over micro-batches, as most people write it."""
    for xs, ys in zip(x.split(pieces), y.split(pieces), strict=True):
        loss = nn.functional.mse_loss(model(xs), ys) / len(pieces)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_fn(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the micro-batch's samples: a bare scalar is enough."""
    x, y = microbatch
    return nn.functional.mse_loss(model(x), y)


def train_step(model: nn.Module, x: Tensor, y: Tensor, pieces: tuple[int, ...], precision: str) -> acc.StepResult:
    """One update over the same micro-batches by accumulus.

    In fp16 the loss scale begins high and comes down by skipped steps, which change nothing.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = acc.TrainStep(model, optimizer, loss_fn, precision=precision, microbatch=Sizes(pieces))
    result = step((x, y))
    while not result.applied:
        result = step((x, y))
    return result


def update_of(before: nn.Module, after: nn.Module) -> Tensor:
    """The change of all parameters, as one float64 vector."""
    pairs = zip(after.parameters(), before.parameters(), strict=True)
    return torch.cat([(a.detach().double() - b.detach().double()).flatten() for a, b in pairs])


def whole_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The right update: of the whole batch in one piece, in float64."""
    after = copy.deepcopy(model).double()
    nn.functional.mse_loss(after(x.double()), y.double()).backward()
    torch.optim.SGD(after.parameters(), lr=0.01).step()
    return update_of(model, after)


def compare(pieces: tuple[int, ...], precision: str = "fp32") -> dict[str, float]:
    """Relative error of the update, against the whole batch's.

    Returns:
        The error of the `plain` loop (in fp32) and of `TrainStep` in the precision given, and how far `apart` they are.
    """
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    x = torch.randn(16, 10)
    y = x.sum(1, keepdim=True) + torch.arange(16.0)[:, None] / 4
    right = whole_batch(model, x, y)
    by_hand, ours = copy.deepcopy(model), copy.deepcopy(model)
    plain_loop(by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.01), x, y, pieces)
    train_step(ours, x, y, pieces, precision)
    plain, step = update_of(model, by_hand), update_of(model, ours)
    error = {
        "plain": float((plain - right).norm() / right.norm()),
        "TrainStep": float((step - right).norm() / right.norm()),
    }
    return error | {"apart": float((plain - step).abs().max())}


def main() -> None:
    """Prints the comparison."""
    print("relative error of one update, against the whole batch in float64\n")
    print(f"{'micro-batches':<16}{'precision':<12}{'plain loop':>12}{'TrainStep':>12}")
    for pieces in ((4, 4, 4, 4), (7, 5, 3, 1)):
        for precision in ("fp32", "fp16", "bf16"):
            found = compare(pieces, precision)
            plain = f"{found['plain']:>12.1e}" if precision == "fp32" else " " * 12
            print(f"{'+'.join(map(str, pieces)):<16}{precision:<12}{plain}{found['TrainStep']:>12.1e}")
    assert compare((4, 4, 4, 4))["apart"] < 1e-7
    assert compare((7, 5, 3, 1))["plain"] > 0.05 > 1e-5 > compare((7, 5, 3, 1))["TrainStep"]


if __name__ == "__main__":
    main()
