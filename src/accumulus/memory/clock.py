"""How long a step takes, on the device and without making the host wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Reading", "Stopwatch"]

Reading = Callable[[], float]
"""Gives the seconds. On CUDA it waits until the end that was marked has been reached."""


class Stopwatch:
    """Starts when it is made.

    Args:
        device: whose work is timed; on CUDA by events in its own queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._started = self._mark()

    def stop(self) -> Reading:
        """Marks the end."""
        started, stopped = self._started, self._mark()
        if self._stream is None:
            return lambda: float(stopped - started)

        def read() -> float:
            stopped.synchronize()
            return float(started.elapsed_time(stopped)) / 1000

        return read

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
