"""What the run needs to know of the machine: which device, how much memory at most, and what to note down about it."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

import accumulus
from accumulus.errors import UsageError

PROCESS_STATUS = Path("/proc/self/status")


def choose_device(name: str) -> torch.device:
    """The device that a `--device` option names.

    Args:
        name: "auto" for the accelerator if there is one and the CPU otherwise, or a torch device.

    Returns:
        A device on which a tensor could be made.

    Raises:
        UsageError: torch does not know it, or it is not there.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch raises RuntimeError, AssertionError or NotImplementedError, by backend
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--device {name} cannot be used ({reason}); use auto or cpu") from None
    return device


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use so far.

    Args:
        device: where the model computes.

    Returns:
        On CUDA: the most bytes that torch held at a time. Elsewhere: the most resident bytes of this process,
        code and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def resident_bytes() -> int:
    """What of this process lies in memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most resident bytes of this process.

    On Linux from VmHWM, because `getrusage` also counts the parent's memory at the time of the fork.
    """
    if PROCESS_STATUS.exists():
        for line in PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return int(getattr(psutil.Process().memory_info(), "peak_wset", psutil.Process().memory_info().rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_environment(device: torch.device, precision: accumulus.Precision) -> dict[str, Any]:
    """What a reader of the records needs to judge them.

    Args:
        device: where the model computes.
        precision: in which precision.

    Returns:
        Plain values: versions, device, threads, memory, precision and why it was chosen.
    """
    return {
        "accumulus": accumulus.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": device_name(device),
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "precision": str(precision),
        "precision_reason": precision.reason,
    }


def device_name(device: torch.device) -> str:
    """The name its maker gave the device, as far as the system tells."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or device.type
