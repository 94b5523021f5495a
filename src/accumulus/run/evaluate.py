"""Held-out numbers: the mean loss over all elements, exactly, whatever pieces the data is evaluated in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from accumulus import Loss, Precision, by_tokens, to_device
from accumulus.memory.failure import is_out_of_memory, let_go


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    data: Sequence[Any],
    *,
    loss_fn: Callable[[Any, Any], Any],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    length: Callable[[Any], int] | None = None,
    precision: Precision,
    device: torch.device,
) -> float:
    """The mean loss over held-out data.

    Args:
        model: evaluated in eval mode, and put back into the mode it was in.
        data: samples.
        loss_fn: as `TrainStep` takes it.
        collate: makes a piece from a list of samples.
        batch_size: samples that go through the model at a time; half as many where memory runs out.
        length: of a sample. `batch_size` then counts tokens, padding included.
        precision: what the model computes in.
        device: where the model is.

    Returns:
        The sum over terms of `sum_k / weight_k`, summed in float64; NaN where every weight is zero.

    Cost:
        Waits for the device once per piece.
    """

    def evaluate(samples: list[Any]) -> dict[str, Loss]:
        return terms_of(loss_fn(model, to_device(collate(samples), device)), len(samples))

    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    with modes_kept(model), precision.region(device):
        model.eval()
        for samples in pieces(data, batch_size, length):
            for terms in in_halves(evaluate, samples, device):
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


def in_halves(
    evaluate: Callable[[list[Any]], dict[str, Loss]], samples: list[Any], device: torch.device
) -> list[dict[str, Loss]]:
    """Evaluates samples at once; in halves, where memory runs out.

    Args:
        evaluate: gives the terms of some samples.
        samples: at least one.
        device: where memory is freed in between.

    Returns:
        The terms of all pieces.
    """
    try:
        return [evaluate(samples)]
    except Exception as error:
        if len(samples) == 1 or not is_out_of_memory(error):
            raise
        failure = error
    # Outside the except block, whose error would hold on to the failed frames.
    let_go(failure, device)
    middle = len(samples) // 2
    return [*in_halves(evaluate, samples[:middle], device), *in_halves(evaluate, samples[middle:], device)]


def pieces(data: Sequence[Any], batch_size: int, length: Callable[[Any], int] | None = None) -> Iterator[list[Any]]:
    """The samples, as many as may go through the model at a time.

    Args:
        data: samples.
        batch_size: the most samples of a piece, which are in their order; with `length`, the most tokens, and the
            longest samples come first. A longer sample makes room for itself: it has to run anyway.
        length: of a sample.
    """
    if length is None:
        for start in range(0, len(data), batch_size):
            yield [data[index] for index in range(start, min(start + batch_size, len(data)))]
        return
    samples = [data[index] for index in range(len(data))]
    rule = by_tokens(batch_size, length=length)
    longest = max(rule.padded_length(length(sample)) for sample in samples)
    groups = replace(rule, max_tokens=max(batch_size, longest)).groups(samples)
    order = iter(groups.order)
    for size in groups.sizes:
        yield [samples[index] for index in islice(order, size)]


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
