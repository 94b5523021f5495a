"""Why gradients are non-finite: at any loss scale or only at this one, and who made them so? Found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["find_cause", "untouched"]

STEPS_DOWN = (0, 4, 8, 12, 16, 24, 32)
"""Powers of two below the present scale to try: 2**-32 of it leaves any gradient that fp32 can hold in fp16's range."""


def find_cause(
    run: Callable[[float], tuple[bool, bool]], scale: float, trace: Callable[[float], object] = lambda scale: None
) -> str:
    """Runs the batch again at smaller and smaller loss scales, then once more, operator by operator.

    Args:
        run: `run(scale)` runs the whole window and changes nothing; returns whether the loss was finite and whether
            all gradients were.
        scale: the scale at which they were not.
        trace: `trace(scale)` does the same and returns who made the first non-finite value, to print; None for nobody.

    Returns:
        One clause that says where the fault lies and what to do.

    Cost:
        Up to eight times the forward and backward passes of one step, once, before training stops.
    """
    for steps in STEPS_DOWN:
        tried = scale * 2.0**-steps
        loss_finite, all_finite = run(tried)
        if not loss_finite:
            return (
                "non-finite at any scale: the loss itself is NaN or infinite before any backward pass"
                f"{by(trace, tried)}; look at the data and the forward pass of this batch"
            )
        if all_finite and steps == 0:
            return "finite when the same batch was run again: look for randomness in the forward pass"
        if all_finite:
            return (
                f"only at this scale: at {tried:g} this batch's gradients are finite; use a loss scale of at most that"
                f"{by(trace, scale, f'; at {scale:g}, ')}"
            )
    return (
        f"non-finite at any scale: the loss is finite but its gradient is not, from {scale:g} down to {tried:g}"
        f"{by(trace, min(scale, 1.0))}; look for a division by zero, log(0), sqrt(0) or a norm of zeros, whose "
        "derivative is infinite"
    )


def by(trace: Callable[[float], object], scale: float, lead: str = ": ") -> str:
    """Who made the first non-finite value, as a clause to append; empty where nobody is known.

    Args:
        trace: as in `find_cause`.
        scale: at which loss scale.
        lead: goes before what was found.
    """
    try:
        origin = trace(scale)
    except Exception as error:  # it runs the user's code in an unusual way, and must not hide what is known already
        return f" (which operator made it could not be traced: {type(error).__name__}: {error})"
    return "" if origin is None else f"{lead}{origin}"


@contextmanager
def untouched(model: Any, device: torch.device) -> Iterator[None]:
    """Puts buffers and random states back as they were.

    Args:
        model: whose buffers to keep.
        device: whose random state to keep, with the CPU's.

    Yields:
        None, once.

    Cost:
        A copy of the buffers.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            _put_back(model, before)


@torch.no_grad()
def _put_back(model: Any, before: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in before and before[name].shape == buffer.shape:
            buffer.copy_(before[name])
