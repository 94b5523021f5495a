"""Which weight makes a mean over a micro-batch exact: every count that the batch offers is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulus import pytree
from accumulus.equivalence.compare import relative
from accumulus.equivalence.runs import Piece

__all__ = ["Weighting", "candidates", "find_weighting"]

IGNORED = -100
TELLING = ("label", "target", "mask", "samples", "weight")


@dataclass(frozen=True)
class Weighting:
    """The weight that is right.

    Args:
        expression: how to count it on a micro-batch; empty where none of the batch's fields gives it.
        form: what the loss is: a "mean", an "unweighted" one that was returned as a sum, a "sum" that was returned as
            a mean, a mean by some "ratio" that nothing counts, or each piece's own times a "factor".
        error: of the gradient with it.
        shares: of the pieces that were tried.
    """

    expression: str
    form: str
    error: float
    shares: tuple[float, ...]


def candidates(part: Any, num_samples: int, called: str = "batch") -> dict[str, float]:
    """What can be counted on a micro-batch, by the expression that counts it.

    Args:
        part: the micro-batch.
        num_samples: in it.
        called: what the loss function calls it.
    """
    counted: dict[str, float] = {"the number of samples": float(num_samples)}
    for leaf in pytree.flatten(part, lambda node, path: False, strict=False)[0]:
        name = called + _path(leaf.name)
        if isinstance(leaf.value, (bool, str, bytes)):
            continue
        if isinstance(leaf.value, (int, float)):
            counted[name] = float(leaf.value)
        elif pytree.is_array(leaf.value) and leaf.value.ndim:
            value = torch.as_tensor(np.asarray(leaf.value)) if isinstance(leaf.value, np.ndarray) else leaf.value
            counted |= _counts(name, value.detach())
    return {name: count for name, count in counted.items() if math.isfinite(count) and count >= 0}


def _counts(name: str, value: Tensor) -> dict[str, float]:
    counted: dict[str, float] = {}
    forms = [(name, value)]
    if value.ndim > 1:
        forms.append((f"{name}[:, 1:]", value[:, 1:]))
    for text, values in forms:
        if values.dtype == torch.bool:
            counted[f"{text}.sum()"] = float(values.sum())
            counted[f"(~{text}).sum()"] = float((~values).sum())
            continue
        if not values.is_floating_point():
            counted[f"({text} != {IGNORED}).sum()"] = float((values != IGNORED).sum())
            counted[f"({text} != 0).sum()"] = float((values != 0).sum())
            counted[f"({text} >= 0).sum()"] = float((values >= 0).sum())
        counted[f"{text}.sum()"] = float(values.sum(dtype=torch.float64))
        if text == name:
            counted[f"len({text})"] = float(len(values))
        counted[f"({text} > 0).sum()"] = float((values > 0).sum())
        counted[f"{text}.numel()"] = float(values.numel())
    return counted


def _path(name: str) -> str:
    parts = [part for part in name.split(".") if part]
    return "".join(f"[{part}]" if part.isdecimal() else f'["{part}"]' for part in parts)


def find_weighting(
    whole: Piece, pieces: Sequence[Piece], counted: Sequence[Mapping[str, float]], tolerance: float
) -> Weighting | None:
    """The weights with which the pieces add up to the whole.

    Args:
        whole: the loss term of the whole batch.
        pieces: of its micro-batches.
        counted: `candidates` of each micro-batch.
        tolerance: relative error up to which it is rounding.

    Returns:
        None where there are no such weights: it is neither a weighted mean of the pieces nor a sum of them.
    """
    names = sorted((name for name in counted[0] if all(name in found for found in counted)), key=_rank)
    for form, value_of in FORMS.items():
        right, parts = value_of(whole), [value_of(piece) for piece in pieces]
        if form == "sum":
            if (error := relative(_sum(parts, [1.0] * len(parts)), right)) <= tolerance:
                return Weighting("", form, error, (1.0,) * len(parts))
            continue
        for name in names:
            shares = _shares([found[name] for found in counted])
            if shares and (error := relative(_sum(parts, shares), right)) <= tolerance:
                return Weighting(name, form, error, tuple(shares))
    return _solve(whole, pieces, tolerance)


FORMS: dict[str, Callable[[Piece], Tensor]] = {
    "mean": lambda piece: piece.vector(1 / piece.weight if piece.weight else 0.0),
    "unweighted": lambda piece: piece.vector(),
    "sum": lambda piece: piece.vector(1 / piece.weight if piece.weight else 0.0),
}
"""What to make of a returned sum and weight: a mean; a sum that is itself a mean; a mean that is itself a sum."""


def _rank(name: str) -> int:
    """Where several counts agree, labels say it best, then masks."""
    return next((rank for rank, word in enumerate(TELLING) if word in name.lower()), len(TELLING))


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total > 0 else []


def _sum(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    used = [share * part for part, share in zip(parts, shares, strict=True) if share]
    return torch.stack(used).sum(0)


def _solve(whole: Piece, pieces: Sequence[Piece], tolerance: float) -> Weighting | None:
    """Any weights at all that fit: many more equations than weights."""
    value_of = FORMS["mean"]
    right, parts = value_of(whole), torch.stack([value_of(piece) for piece in pieces], dim=1)
    if len(right) < 4 * len(pieces) or not bool(parts.isfinite().all()):
        return None
    found = torch.linalg.lstsq(parts.double().cpu(), right.double().cpu()[:, None]).solution[:, 0]
    error = relative((parts.double().cpu() @ found), right.double().cpu())
    if error > 10 * tolerance or not bool((found > 0).all()):
        return None
    form = "ratio" if abs(float(found.sum()) - 1) < 1e-6 else "factor"
    return Weighting("", form, error, tuple(found.tolist()))
