"""Printed quantities: bytes, rates, durations and counts, the same everywhere they appear."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count", "format_duration", "format_rate"]


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three significant digits.

    Args:
        num_bytes: a number of bytes, at least 0.

    Returns:
        For example `"512 B"`, `"1.50 KiB"`, `"23.4 GiB"`.
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_count(count: float) -> str:
    """A count with three significant digits.

    Args:
        count: any number, at least 0.

    Returns:
        For example `"950"`, `"12.3k"`, `"1.20M"`, `"4.00G"`.
    """
    size = float(count)
    for unit in ("", "k", "M", "G"):
        if size < 1000 or unit == "G":
            return f"{size:.0f}" if unit == "" else f"{_three_digits(size)}{unit}"
        size /= 1000
    raise AssertionError("unreachable: the last unit always returns")


def format_rate(per_second: float, what: str) -> str:
    """A rate.

    Args:
        per_second: how many a second.
        what: what is counted, in the plural.

    Returns:
        For example `"12.3k tokens/s"`.
    """
    return f"{format_count(per_second)} {what}/s"


def format_duration(seconds: float) -> str:
    """A duration in the two largest units that matter.

    Args:
        seconds: at least 0; infinity and NaN are unknown.

    Returns:
        For example `"0.8 s"`, `"45 s"`, `"2 min 05 s"`, `"3 h 20 min"`, `"unknown"`.
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _three_digits(size: float) -> str:
    return f"{size:.2f}" if size < 9.995 else f"{size:.1f}" if size < 99.95 else f"{size:.0f}"
