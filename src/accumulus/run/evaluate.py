"""Held-out numbers: the mean loss over all elements, exactly, whatever pieces the data is evaluated in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accumulus import Loss, Precision, to_device


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    data: Sequence[Any],
    *,
    loss_fn: Callable[[Any, Any], Any],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    precision: Precision,
    device: torch.device,
) -> float:
    """The mean loss over held-out data.

    Args:
        model: evaluated in eval mode, and put back into the mode it was in.
        data: samples.
        loss_fn: as `TrainStep` takes it.
        collate: makes a piece from a list of samples.
        batch_size: samples that go through the model at a time.
        precision: what the model computes in.
        device: where the model is.

    Returns:
        The sum over terms of `sum_k / weight_k`, summed in float64; NaN where every weight is zero.

    Cost:
        Waits for the device once per piece.
    """
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    with modes_kept(model), precision.region(device):
        model.eval()
        for samples in pieces(data, batch_size):
            terms = terms_of(loss_fn(model, to_device(collate(samples), device)), len(samples))
            add_terms_(sums, weights, terms)
    used = [name for name in sums if weights[name]]
    return sum(sums[name] / weights[name] for name in used) if used else float("nan")


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts every module back into the mode it was in; a frozen BatchNorm stays frozen."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def pieces(data: Sequence[Any], batch_size: int) -> Iterator[list[Any]]:
    """The samples in their order, `batch_size` at a time; the last piece may be smaller."""
    for start in range(0, len(data), batch_size):
        yield [data[index] for index in range(start, min(start + batch_size, len(data)))]


def add_terms_(sums: dict[str, float], weights: dict[str, float], terms: Mapping[str, Loss]) -> None:
    """Adds a piece's sums and weights in place."""
    for name, loss in terms.items():
        if loss.weight:  # a mean over nothing is NaN, and counts for nothing
            sums[name] += float(loss.sum)
            weights[name] += float(loss.weight)


def terms_of(returned: Any, num_samples: int) -> dict[str, Loss]:
    """What a loss function returned, as named sums."""
    named = returned if isinstance(returned, Mapping) else {"loss": returned}
    return {name: loss if isinstance(loss, Loss) else Loss.mean(loss, num_samples) for name, loss in named.items()}
