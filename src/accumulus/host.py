"""What the host may read without waiting: the one place that knows, so that everything else is written once.

Values are plain numbers where they lie on the CPU, which has computed them when the call returns, and tensors without
dimensions on an accelerator, which has not. The same formulas serve both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Flag",
    "Scalar",
    "as_flag",
    "as_tensor",
    "as_wide",
    "at_least",
    "is_finite",
    "reads_freely",
    "value_of",
    "wait_for",
]

Scalar = float | Tensor
Flag = bool | Tensor


def reads_freely(device: torch.device) -> bool:
    """Whether the host reads what lies on the device without waiting for it."""
    return device.type == "cpu"


def value_of(tensor: Tensor) -> Scalar:
    """A tensor of one element as a number where that costs no wait, else without dimensions as it is."""
    if reads_freely(tensor.device):
        number: Any = (tensor.reshape(()) if tensor.ndim else tensor).tolist()  # .item() would run an operator
        return float(number)
    return tensor.detach().reshape(())


def is_finite(value: Scalar) -> Flag:
    """Whether a scalar is neither NaN nor infinite."""
    return value.isfinite() if isinstance(value, Tensor) else math.isfinite(value)


def at_least(value: Scalar, bound: float) -> Scalar:
    """The larger of a scalar and a bound. NaN stays NaN."""
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def negate(flag: Any) -> Flag:
    """The opposite of a flag, or of whatever a user's function gave for one; a tensor must hold one element."""
    return ~flag.reshape(()).bool() if isinstance(flag, Tensor) else not flag


def wait_for(flag: Flag) -> bool:
    """The truth of a flag. Of a tensor on an accelerator it waits for the device."""
    return bool(flag.tolist()) if isinstance(flag, Tensor) else flag


def as_tensor(value: Scalar, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A scalar as a tensor without dimensions on the other's device, written there without a copy.

    Args:
        value: a number, flag or tensor.
        like: any tensor on that device.
        dtype: of the result; that of `value` where it is a tensor, else float64 where the device has it.
    """
    if isinstance(value, Tensor):
        return value.to(like.device, dtype or value.dtype)
    default = torch.float32 if like.device.type == "mps" else torch.float64
    return torch.full((), value, dtype=dtype or default, device=like.device)


def as_wide(value: Scalar, like: Tensor) -> Tensor:
    """A scalar as a tensor on the other's device, in float64 where that has it."""
    return as_tensor(value, like, torch.float32 if like.device.type == "mps" else torch.float64)


def to_cpu(value: Scalar) -> Scalar:
    """For saving: a tensor moves to the CPU and stays one, so that a resumed run computes with the same dtypes."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def to_device(value: Scalar, device: torch.device) -> Scalar:
    """What `to_cpu` saved, back on its device."""
    return value.to(device) if isinstance(value, Tensor) else value


def as_flag(flag: Flag, like: Tensor) -> Tensor:
    """A flag as a bool tensor without dimensions on the other's device."""
    return flag if isinstance(flag, Tensor) else torch.full((), flag, dtype=torch.bool, device=like.device)
