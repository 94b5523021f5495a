from __future__ import annotations

import gc
import os

# Before torch is loaded, and for the processes that tests start: two workers with two threads each would spin against
# each other on two cores, and take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish() -> None:
    """What was loaded until now stays: the collections that the library and its tests ask for need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _threads_and_seed():
    """Workers of a parallel run must not fight over the cores, and every test starts from the same random state."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def accelerator(monkeypatch):
    """Treats the CPU as a device that the host must not read: the very code that runs on CUDA, without one."""
    from accumulus import host

    monkeypatch.setattr(host, "reads_freely", lambda device: False)


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Runs a test twice: with numbers that the host reads, and with tensors that stay on their device."""
    if request.param == "device":
        from accumulus import host

        monkeypatch.setattr(host, "reads_freely", lambda device: False)
    return request.param
