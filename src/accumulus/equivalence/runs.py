"""Runs a batch whole, in pieces and accumulated, each time on a fresh copy, so that no run sees what another did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from accumulus.equivalence.lab import Lab
from accumulus.equivalence.replica import Replica
from accumulus.errors import LossError
from accumulus.microbatch import Split
from accumulus.scaling import NoScale, StaticScale
from accumulus.step import TrainStep
from accumulus.terms import as_terms
from accumulus.types import Loss, at_least_float32

__all__ = ["Outcome", "Piece", "accumulated", "run_piece", "whole"]

SCALES = (16, 12, 8, 4, 0)
"""Exponents of the loss scales that are tried in fp16, until the gradient is finite."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one pass over the batch gave: mean loss, gradients, and the buffers afterwards."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    sizes: tuple[int, ...] = ()
    weights: Mapping[str, float] | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """One loss term of one micro-batch that ran by itself: sum, weight, and the gradient of the sum in one vector."""

    total: float
    weight: float
    gradient: Tensor

    def vector(self, factor: float = 1.0) -> Tensor:
        """The gradient and, as the last entry, the loss sum, times a factor."""
        return factor * torch.cat([self.gradient, self.gradient.new_tensor([self.total])])


class _Capture(torch.optim.Optimizer):
    """Stands in for the optimizer: keeps the gradients that it would have applied."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.found: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        """Keeps them."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        self.found = [_gradient_of(parameter) for parameter in held]


def whole(lab: Lab, rows: Sequence[int] | None = None) -> Outcome:
    """The batch in one plain forward and backward pass: the reference.

    Args:
        lab: under whose conditions.
        rows: the samples, in their order; None for all.
    """
    copied = lab.fresh()
    part = lab.part(rows)
    num_samples = lab.num_samples if rows is None else len(rows)
    with lab.conditions():
        terms = as_terms(lab.loss_of(copied)(copied.model, part), num_samples)
        means = [_mean(loss) for _, loss in terms if float(loss.weight) > 0]
        loss = sum(means[1:], start=means[0]) if means else None
        if loss is None or not loss.requires_grad:
            raise LossError("the loss of the whole batch has no element or no graph, so there is nothing to check")
        torch.autograd.backward([loss])
    if all(parameter.grad is None for parameter in copied.parameters().values()):
        raise LossError(
            "no gradient reached a parameter that is trained; use loss_fn's first argument, not a model from outside"
        )
    return _outcome(copied, float(loss.detach()), {name: float(term.weight) for name, term in terms})


def accumulated(
    lab: Lab, rule: Split, *, weights: Mapping[str, float] | None = None, precision: str = "fp32"
) -> Outcome:
    """The batch cut and run by `TrainStep`, as in training, up to what the optimizer would have got.

    Args:
        lab: under whose conditions.
        rule: how to cut it.
        weights: of the whole batch by loss term, where there are several.
        precision: to run in.
    """
    exponents = SCALES if precision == "fp16" else (0,)
    for exponent in exponents:
        copied = lab.fresh()
        parameters = copied.parameters()
        capture = _Capture(list(parameters.values()))
        step = TrainStep(
            copied.model,
            capture,
            lab.loss_of(copied),
            precision=precision,
            microbatch=rule,
            loss_scale=StaticScale(2.0**exponent) if exponent else NoScale(),
            skip_nonfinite=exponent != 0,
            collate=None if lab.collate is None else lab.collated,
            weigh=None if weights is None or len(weights) < 2 else lambda _: dict(weights),
            device=lab.device,
        )
        batch = lab.batch if lab.collate is not None else lab.cast(lab.batch)
        sizes = tuple(step.split(batch).sizes)
        with lab.conditions():
            result = step(batch)
        if capture.found is not None:
            break
    found = capture.found or [torch.full_like(p, torch.nan) for p in parameters.values()]
    gradients = dict(zip(parameters, found, strict=True))
    return Outcome(float(result.loss), gradients, _buffers_of(copied), sizes)


def run_piece(lab: Lab, part: Any, num_samples: int) -> dict[str, Piece]:
    """One micro-batch by itself, each loss term with its own gradient.

    Args:
        lab: under whose conditions.
        part: the micro-batch, from `part`.
        num_samples: samples in it.
    """
    copied = lab.fresh()
    parameters = list(copied.parameters().values())
    with lab.conditions():
        terms = as_terms(lab.loss_of(copied)(copied.model, part), num_samples)
        return {name: _piece(loss, parameters) for name, loss in terms}


def _outcome(copied: Replica, loss: float, weights: Mapping[str, float]) -> Outcome:
    gradients = {name: _gradient_of(parameter) for name, parameter in copied.parameters().items()}
    return Outcome(loss, gradients, _buffers_of(copied), (), weights)


def _mean(loss: Loss) -> Tensor:
    mean: Tensor = at_least_float32(loss.sum) / loss.weight
    return mean


def _piece(loss: Loss, parameters: Sequence[Parameter]) -> Piece:
    weight, root = float(loss.weight), at_least_float32(loss.sum)
    if weight == 0 or not root.requires_grad:
        size = sum(parameter.numel() for parameter in parameters)
        return Piece(0.0 if weight == 0 else float(root), weight, root.new_zeros(size).detach())
    found = torch.autograd.grad(root, list(parameters), retain_graph=True, allow_unused=True)
    flat = [
        (torch.zeros_like(p) if g is None else g.to_dense() if g.layout != torch.strided else g).flatten()
        for g, p in zip(found, parameters, strict=True)
    ]
    return Piece(float(root.detach()), weight, torch.cat(flat).detach())


def _gradient_of(parameter: Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter).detach()
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return dense.detach().clone()


def _buffers_of(copied: Replica) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in copied.buffers().items()}
