"""Whose memory a plan is for: a device that is here, or an accelerator known by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from accumulus import AccumulusError, Precision, memory
from accumulus.errors import UsageError
from accumulus.run.machine import choose_device, device_name
from accumulus.run.plan_config import PlanConfig
from accumulus.run.plan_rows import Limit

WITHOUT_BF16 = {"V100": "fp16", "T4": "fp16", "P100": "fp32"}
"""Known accelerators that are older than bf16 matrix units, and what they do fast. Source: NVIDIA's table of compute
capabilities (https://developer.nvidia.com/cuda-gpus): 7.0, 7.5 and 6.0, and bf16 came with 8.0."""


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
    if config.device == "auto" or is_torch_device(config.device):
        return target_here(config.device, given_bytes)
    own_bytes = known_bytes(config.device)
    return Target(
        name=config.device,
        device=torch.device("cuda"),
        limit=make_limit(given_bytes, own_bytes, f"all of {config.device}"),
        fast=fast_by_name(config.device),
        kernels=kernels_by_name(config.device),
        is_here=False,
    )


def target_here(name: str, given_bytes: int | None) -> Target:
    """A device of this machine.

    Args:
        name: "auto" or a torch device.
        given_bytes: what the user gave as its memory.

    Returns:
        The target.

    Raises:
        UsageError: it is not there, or does not say how much memory is free.
    """
    try:
        device = choose_device(name)
    except UsageError as error:
        raise UsageError(f"{error}, or an accelerator's name, such as A100-40GB") from None
    try:
        free_bytes = memory.available_bytes(device) if given_bytes is None else 0
    except AccumulusError as error:
        raise UsageError(f"--memory auto: {error}; --memory 24GiB is an example") from None
    return Target(
        name=str(device),
        device=device,
        limit=make_limit(given_bytes, free_bytes, f"free on {device} now"),
        fast=Precision.parse("auto", device),
        kernels=f"Counted for the kernels of {device_name(device)}.",
        is_here=True,
    )


def make_limit(given_bytes: int | None, own_bytes: int, source: str) -> Limit:
    """What the user gave, or else the device's own.

    Args:
        given_bytes: what the user gave.
        own_bytes: what the device has.
        source: what the latter is.

    Returns:
        A limit of at least 1 byte.

    Raises:
        UsageError: nothing is free.
    """
    if given_bytes is not None:
        return Limit(limit_bytes=given_bytes, source="given")
    if own_bytes < 1:
        raise UsageError(f"--memory auto: 0 bytes are {source}; free some, or give a size, such as --memory 24GiB")
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
        return memory.parse_bytes(text)
    except AccumulusError as error:
        raise UsageError(f"--memory {text}: {error}") from None


def known_bytes(name: str) -> int:
    """The memory of a well-known accelerator.

    Args:
        name: such as "A100-40GB".

    Returns:
        Bytes.

    Raises:
        UsageError: it is not known; the text names the nearest.
    """
    try:
        return memory.device_bytes(name)
    except AccumulusError as error:
        raise UsageError(f"--device {name} is no torch device, and as an accelerator's name: {error}") from None


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
    words = re.split(r"[\s_-]+", name.upper())
    fast = next((WITHOUT_BF16[word] for word in words if word in WITHOUT_BF16), "bf16")
    reasons = {
        "bf16": f"{name} has bf16 matrix units",
        "fp16": f"{name} has fp16 matrix units and none for bf16",
        "fp32": f"{name} has no 16-bit matrix units",
    }
    return replace(Precision.parse(fast), reason=reasons[fast])


def kernels_by_name(name: str) -> str:
    """What may be different on an accelerator that is known by its name only."""
    here = f"Counted for {torch.cuda.get_device_name()}. " if torch.cuda.is_available() else ""
    return f"{here}{name} itself is not here: its own attention kernels and workspaces may need more or less."
