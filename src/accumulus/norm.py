"""The norm of all gradients as one vector, read once; and their multiplication, each kind in its own dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.host import Scalar
from accumulus.types import HALF_DTYPES

__all__ = ["multiply_", "norm_of"]

BLAS_ELEMENTS = 2**20
"""Elements summed in float32 before float64 takes over: a sum of 40 million in one go is off by 5e-5, this by 1e-8."""

TINY = 1e-30
"""Sums of squares below this are taken again in float64."""

BLAS_DTYPES = frozenset({torch.float32, torch.float64})


def norm_of(gradients: list[Tensor], order: float = 2.0) -> Scalar:
    """The norm of all gradients as one vector; NaN or infinite where they hold such a value, or where it overflows.

    Args:
        gradients: dense real tensors of any floating dtypes and devices, at least one.
        order: 2 or infinity.

    Returns:
        A number, or a tensor without dimensions on the first gradient's device.

    Cost:
        One read of the gradients. 16-bit ones are summed in float32, so their squares cannot overflow.
    """
    first = gradients[0].device
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return 0.0
    if order == 2 and all(g.is_cpu and g.dtype in BLAS_DTYPES for g in gradients) and host.reads_freely(first):
        total = sum(_square(gradient) for gradient in gradients)
        if not TINY < total < math.inf:  # squares may have left float32's range; or it is truly zero or not finite
            total = sum(_dot(gradient.double().reshape(-1)) for gradient in gradients)
        return math.sqrt(total)
    parts: list[Tensor] = []
    for group in by_kind(gradients):
        dtype = torch.float32 if group[0].dtype in HALF_DTYPES else None
        norms = torch._foreach_norm(group, order, dtype=dtype)
        parts.extend(norm.to(first, non_blocking=True) for norm in norms)
    if len({part.dtype for part in parts}) > 1:
        parts = [part.double() for part in parts]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(parts), order)
    return host.value_of(whole)


def _square(gradient: Tensor) -> float:
    """BLAS reads a contiguous gradient twice as fast as the norm kernel does; in pieces its sum is exact enough."""
    if not gradient.is_contiguous():
        square: Any = torch.linalg.vector_norm(gradient, dtype=torch.float64).tolist()
        return float(square) ** 2
    return sum(_dot(piece) for piece in torch.split(gradient.view(-1), BLAS_ELEMENTS))


def _dot(piece: Tensor) -> float:
    square: Any = torch.dot(piece, piece).tolist()
    return float(square)


def multiply_(gradients: list[Tensor], multiplier: Scalar) -> None:
    """Multiplies all gradients in place, each kind by the multiplier in its own dtype and on its own device."""
    if not isinstance(multiplier, Tensor) and multiplier == 1.0:
        return
    for group in by_kind(gradients):
        first = group[0]
        factor = multiplier.to(first.device, first.dtype) if isinstance(multiplier, Tensor) else multiplier
        torch._foreach_mul_(group, factor)


def by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device and dtype, as the foreach kernels want them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
