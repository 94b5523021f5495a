"""Whether an error means that memory ran out, by its type, and how to let go of what it holds."""

from __future__ import annotations

import functools
import gc
import traceback

import torch

from accumulus.errors import AccumulusError

__all__ = ["is_out_of_memory", "let_go"]

CUDA_OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation`: what an `AcceleratorError` carries where CUDA itself had none."""

IMPOSSIBLE_BYTES = 2**60
BAD_ALLOC = "std::bad_alloc"
"""The C++ type's own name, which is all that torch passes on of it."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is an allocator's.

    torch has a type for it on accelerators and none on the CPU, whose allocator raises a plain `RuntimeError`. That one
    is told by asking the allocator for an impossible amount once, and comparing: no wording is known here.

    Args:
        error: what was raised.

    Returns:
        True for `torch.OutOfMemoryError`, `MemoryError`, CUDA's own error code, and the CPU allocator's error. False
        for the errors of this library, whatever caused them.
    """
    while error is not None and not isinstance(error, AccumulusError):
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY and isinstance(error, torch.AcceleratorError):
            return True
        if type(error) is RuntimeError and _is_of_the_cpu(str(error)):
            return True
        error = error.__cause__
    return False


def _is_of_the_cpu(text: str) -> bool:
    return text.startswith(_cpu_prefix()) or text == BAD_ALLOC


@functools.cache
def _cpu_prefix() -> str:
    """How the CPU allocator of this torch begins its complaint, up to the number of bytes."""
    try:
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    except RuntimeError as error:
        return str(error).split(str(IMPOSSIBLE_BYTES))[0]
    raise AssertionError("unreachable: no machine has an exbibyte")


def let_go(error: BaseException | None, device: torch.device) -> None:
    """Frees what an error's frames hold, activations above all, and hands cached memory back to the device.

    Args:
        error: caught, and not to be raised again. Its traceback is emptied, and that of all that caused it.
        device: where the model computes.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()  # graphs and their hooks are held in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
