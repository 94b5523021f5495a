"""Whose memory a plan is for: a device that is here, or an accelerator known by its name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from accumulus import AccumulusError, Precision, memory
from accumulus.errors import UsageError
from accumulus.run.config import PlanConfig
from accumulus.run.machine import choose_device, device_name
from accumulus.run.plan_rows import Limit
from accumulus.units import format_bytes

VOLTA_AND_TURING = ("V100", "TITAN V", "T4", "RTX 20", "RTX 8000")
OLDER = ("P100", "P40", "GTX")
"""Accelerators without bf16 matrix units, by how their names begin. Source: the compute capabilities that NVIDIA
lists (https://developer.nvidia.com/cuda-gpus): below 8.0, and below 7.0."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a plan is made for.

    Args:
        name: the device's, as the user gave it or as torch calls it.
        device: whose kernels the estimates assume.
        limit: its memory, or what the user gave.
        fast: the precision that it does fast, with the reason.
        kernels: a sentence about `device`.
        is_here: it is a device of this machine, which training can name.
    """

    name: str
    device: torch.device
    limit: Limit
    fast: Precision
    kernels: str
    is_here: bool


def find_target(config: PlanConfig) -> Target:
    """The device and the memory that the options name.

    Args:
        config: `device` and `memory`.

    Returns:
        The target.

    Raises:
        UsageError: the device is neither here nor a known name, or the memory is not a size.
    """
    given_bytes = None if config.memory == "auto" else parse_memory(config.memory)
    named_bytes = known_bytes(config.device)
    if named_bytes is None:
        return target_here(config, given_bytes)
    source = f"all that an {config.device} has"
    return Target(
        name=config.device,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        limit=make_limit(config.memory, given_bytes, named_bytes, source),
        fast=fast_by_name(config.device),
        kernels=kernels_by_name(config.device),
        is_here=False,
    )


def target_here(config: PlanConfig, given_bytes: int | None) -> Target:
    """A device of this machine."""
    if config.device != "auto" and not is_torch_device(config.device):
        raise UsageError(
            f"--device {config.device!r} is neither a torch device (cpu, cuda, ...) nor the name of an accelerator whose "
            "memory is known; give --memory 24GiB instead"
        )
    device = choose_device(config.device)
    free_bytes = memory.available_bytes(device) if given_bytes is None else 0
    return Target(
        name=str(device),
        device=device,
        limit=make_limit(config.memory, given_bytes, free_bytes, f"free on {device} now"),
        fast=Precision.parse("auto", device),
        kernels=f"Counted for the kernels of {device_name(device) or device}.",
        is_here=True,
    )


def make_limit(given: str, given_bytes: int | None, own_bytes: int, source: str) -> Limit:
    """What the user gave, or else the device's own."""
    if given_bytes is not None:
        return Limit(limit_bytes=given_bytes, source=f"--memory {given}")
    if own_bytes <= 0:
        raise UsageError(f"--memory auto: the limit is {format_bytes(0)} ({source}); give one, such as --memory 24GiB")
    return Limit(limit_bytes=own_bytes, source=source)


def parse_memory(text: str) -> int:
    """`--memory` in bytes.

    Args:
        text: such as "24GiB".

    Returns:
        At least 1.

    Raises:
        UsageError: it is not a size.
    """
    try:
        num_bytes = memory.parse_bytes(text)
    except (AccumulusError, ValueError) as error:
        raise UsageError(f"--memory {text}: {error}") from None
    if num_bytes < 1:
        raise UsageError(f"--memory {text} must be larger than 0; 24GiB is an example")
    return num_bytes


def known_bytes(name: str) -> int | None:
    """The memory of a well-known accelerator; None where the name is not one of them."""
    try:
        return memory.device_bytes(name)
    except (AccumulusError, ValueError, KeyError):
        return None


def is_torch_device(name: str) -> bool:
    """Whether torch can read the name, whether or not there is such a device."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def fast_by_name(name: str) -> Precision:
    """The precision that an accelerator does fast, as far as its name tells.

    Args:
        name: such as "V100-32GB".

    Returns:
        fp32, fp16 or bf16, and why.
    """
    upper = name.upper().removeprefix("NVIDIA ").removeprefix("TESLA ")
    if upper.startswith(OLDER):
        return named_precision("fp32", f"{name} has no 16-bit matrix units")
    if upper.startswith(VOLTA_AND_TURING):
        return named_precision("fp16", f"{name} has fp16 matrix units and none for bf16")
    return named_precision("bf16", f"{name} has bf16 matrix units")




def named_precision(name: str, reason: str) -> Precision:
    """A precision and why it was chosen."""
    return replace(Precision.parse(name), reason=reason)


def kernels_by_name(name: str) -> str:
    """Whose kernels the estimates for an accelerator that is known by its name assume."""
    if torch.cuda.is_available():
        return f"Counted for the kernels of {torch.cuda.get_device_name()}, which is here; {name}'s may differ."
    return (
        f"Counted for this CPU's kernels, because no CUDA device is here: {name}'s own attention kernels and workspaces "
        "may need more or less."
    )
