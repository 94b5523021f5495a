"""Seconds between two marks, and on CUDA without a wait before they are read."""

from __future__ import annotations

import time

import torch

from accumulus.memory.clock import Stopwatch


def test_a_reading_does_not_go_on():
    watch = Stopwatch(torch.device("cpu"))
    time.sleep(0.01)
    reading = watch.stop()
    seconds = reading()
    time.sleep(0.01)
    assert reading() == seconds >= 0.01


def test_events_of_cuda(monkeypatch):
    waited = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream"

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, other):
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    reading = Stopwatch(torch.device("cuda")).stop()
    assert not waited
    assert reading() == 0.25 and len(waited) == 1
