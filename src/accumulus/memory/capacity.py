"""How much memory there is: free on a device now, of a device known by name, or written by the user."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from accumulus.errors import MemoryLimitError
from accumulus.types import describe

__all__ = ["available_bytes", "device_bytes", "parse_bytes"]

UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

DEVICE_GIGABYTES = {
    "A10": 24,
    "A10G": 24,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "A30": 24,
    "A40": 48,
    "B200": 180,
    "GH200": 96,
    "H100": 80,
    "H100-NVL": 94,
    "H200": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "MI210": 64,
    "MI250X": 64,  # of each of its two dies, which are devices of their own
    "MI300X": 192,
    "MI325X": 256,
    "P100": 16,
    "RTX-3060": 12,
    "RTX-3080": 10,
    "RTX-3090": 24,
    "RTX-4060": 8,
    "RTX-4070": 12,
    "RTX-4080": 16,
    "RTX-4090": 24,
    "RTX-5080": 16,
    "RTX-5090": 32,
    "RTX-6000-ADA": 48,
    "RTX-A6000": 48,
    "T4": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
}
"""Gigabytes of the data sheets."""


def available_bytes(device: torch.device | str) -> int:
    """The memory that a process can still take on a device, as of now.

    Args:
        device: a CUDA device, another accelerator that torch can ask, or the CPU.

    Returns:
        Bytes. CUDA: what is free, and what torch's caching allocator holds unused. CPU: the smallest of available RAM,
        what the process's control groups leave (v1 and v2, up to the root; file caches count as free), and what its
        address space may still grow (`RLIMIT_AS`).

    Raises:
        MemoryLimitError: the device is not there, or does not tell.

    Cost:
        CPU: reads a few small files. CUDA: asks the driver, and does not wait for kernels.

    Example:
        >>> available_bytes("cpu") > 0
        True
    """
    device = torch.device(device)
    if device.type == "cpu":
        return max(0, min(int(psutil.virtual_memory().available), *_cgroup_bytes(), *_address_space_bytes()))
    try:
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int(torch.cuda.mem_get_info(device)[0]) + unused
        if device.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    except Exception as error:  # torch raises RuntimeError, AssertionError or AttributeError, by backend
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemoryLimitError(f"free memory of {device} is not known ({reason}); give a number of bytes") from None


def device_bytes(name: str) -> int:
    """The memory of a well-known accelerator.

    Args:
        name: such as "H100", "A100-80GB" or "RTX-4090"; case and spaces do not matter.

    Returns:
        The data sheet's gigabytes, as 10**9 bytes each. Devices hold up to 7 % more (many count 2**30), of which
        driver and context take some hundred megabytes.

    Raises:
        MemoryLimitError: the name is not known; the text names the nearest.

    Example:
        >>> device_bytes("A100-40GB")
        40000000000
    """
    key = re.sub(r"[\s_-]+", "-", str(name).strip().upper())
    key = re.sub(r"^(NVIDIA|AMD|TESLA|GEFORCE|INSTINCT|-)+", "", key)
    if key in DEVICE_GIGABYTES:
        return DEVICE_GIGABYTES[key] * 10**9
    same = [known for known in DEVICE_GIGABYTES if key and known.startswith(f"{key}-")]
    nearest = same or difflib.get_close_matches(key, DEVICE_GIGABYTES, n=1, cutoff=0.0)
    raise MemoryLimitError(f"device {name!r} is not known; did you mean {' or '.join(nearest)}?")


def parse_bytes(text: str | int) -> int:
    """An amount of memory as written by a person.

    Args:
        text: a number of bytes; or a number and a unit, such as "24GiB" (2**30), "24GB" (10**9), "24g" (as GiB),
            "512m", "1.5 TiB".

    Returns:
        Bytes, at least 1.

    Raises:
        MemoryLimitError: it is not such an amount.

    Example:
        >>> parse_bytes("24GiB")
        25769803776
    """
    if isinstance(text, int) and not isinstance(text, bool):
        num_bytes = float(text)
    else:
        matched = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
        unit = UNITS.get(matched[2].lower()) if matched else None
        if matched is None or unit is None:
            shown = repr(text) if isinstance(text, str) else describe(text)
            raise MemoryLimitError(f"an amount of memory is a number and a unit, such as 24GiB, not {shown}")
        num_bytes = float(matched[1]) * unit
    if not 1 <= num_bytes < math.inf:
        raise MemoryLimitError(f"an amount of memory must be at least 1 byte, not {text}")
    return int(num_bytes)


def _cgroup_bytes(process: Path = Path("/proc/self")) -> list[int]:
    """What each control group of the process, and each one above it, leaves: its limit minus what is in use."""
    try:
        found = [_left_in(folder) for folder in _cgroup_folders(process)]
    except (OSError, ValueError, IndexError):  # not Linux, or hidden
        return []
    return [left for left in found if left is not None]


def _cgroup_folders(process: Path) -> Iterator[Path]:
    paths = {}  # "" for v2, controllers for v1
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths["memory" if "memory" in controllers.split(",") else controllers] = path
    for line in (process / "mountinfo").read_text().splitlines():
        own, _, rest = line.partition(" - ")
        kind, options = rest.split()[0], rest.split()[-1].split(",")
        name = "" if kind == "cgroup2" else "memory"
        if name not in paths or (kind != "cgroup2" and not (kind == "cgroup" and "memory" in options)):
            continue
        root, mount = own.split()[3], Path(own.split()[4])
        inside = paths[name].removeprefix(root.rstrip("/")).strip("/")
        folder = mount / inside if (mount / inside).is_dir() else mount  # a container may see another tree
        yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _left_in(folder: Path) -> int | None:
    """Limit minus use of one control group; None where it has no limit."""
    for limit_name, use_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (folder / limit_name).exists() or not (folder / use_name).exists():
            continue
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / use_name).read_text())
        statistics = (folder / "memory.stat").read_text().split() if (folder / "memory.stat").exists() else []
        cached = int(statistics[statistics.index(cache_name) + 1]) if cache_name in statistics else 0
        return int(limit) - used + cached
    return None


def _address_space_bytes() -> list[int]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return [] if limit == resource.RLIM_INFINITY else [limit - int(psutil.Process().memory_info().vms)]
