"""The slow, obvious reference: the whole batch in one piece, in float64, by autograd and a plain optimizer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import accumulus as acc

IGNORED = -100


def tokens_model(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 17)).to(dtype)


def tokens_batch(counts: list[int], length: int = 100, *, seed: int = 0) -> dict[str, Tensor]:
    """One sample per entry, with that many valid labels of `length`; `counts` may hold zeros."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 17, (len(counts), length), generator=generator)
    labels = torch.randint(0, 17, (len(counts), length), generator=generator)
    keep = torch.arange(length)[None] < torch.tensor(counts)[:, None]
    return {"tokens": tokens, "labels": torch.where(keep, labels, IGNORED)}


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> acc.Loss:
    logits = model(batch["tokens"])
    labels = batch["labels"]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    right = ((logits.argmax(-1) == labels) & (labels != IGNORED)).sum()
    weight = (labels != IGNORED).sum()
    return acc.Loss(total, weight, metrics={"accuracy": (right, weight), "length": (labels.numel(), len(labels))})


@dataclass
class Whole:
    loss: float
    grad_norm: float
    gradients: list[Tensor]
    metrics: dict[str, float]
    model: nn.Module


def whole_batch(
    model: nn.Module, loss_fn: Any, batch: Any, *, max_grad_norm: float | None = None, lr: float = 1.0
) -> Whole:
    """The gradient of the batch in one piece, and the model after one plain SGD step on it, in float64."""
    model = copy.deepcopy(model).double()
    returned = loss_fn(model, batch)
    terms = returned if isinstance(returned, dict) else {"loss": returned}
    loss = sum(term.sum / float(term.weight) for term in terms.values())
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [
        g if g is not None else torch.zeros_like(p)
        for g, p in zip(torch.autograd.grad(loss, parameters, allow_unused=True), parameters, strict=True)
    ]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / float(norm))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * factor * gradient
    pairs = {name: pair for term in terms.values() for name, pair in (term.metrics or {}).items()}
    metrics = {
        name: float(pair[0]) / float(pair[1]) for name, pair in pairs.items() if not isinstance(pair, acc.Metric)
    }
    return Whole(float(loss.detach()), float(norm), [factor * g for g in gradients], metrics, model)


def applied_gradients(step: acc.TrainStep, batch: Any) -> list[Tensor]:
    """The gradients that the optimizer applied, as it leaves them; a fused kernel writes the multiplied ones back."""
    optimizer: Any = step.update.optimizer
    found: list[Tensor] = []
    take_step = optimizer.step

    def step_and_keep() -> None:  # not a hook: with hooks the fused kernels would be driven differently
        take_step()
        found.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    optimizer.step = step_and_keep
    step.last = step(batch)
    del optimizer.step
    return found


def relative_error(found: list[Tensor], right: list[Tensor]) -> float:
    a = torch.cat([t.detach().double().flatten() for t in found])
    b = torch.cat([t.detach().double().flatten() for t in right])
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def snapshot(model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> Any:
    """Everything that a skipped step must leave alone."""
    return copy.deepcopy(
        (
            dict(model.state_dict()),
            optimizer.state_dict() if optimizer is not None else None,
            scheduler.state_dict() if scheduler is not None else None,
        )
    )


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Bitwise equality of nested state."""
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
    else:
        assert a == b or (a != a and b != b), path
