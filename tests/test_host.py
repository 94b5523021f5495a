"""One formula for numbers on the host and tensors on a device."""

from __future__ import annotations

import math

import pytest
import torch

from accumulus import host

LIKE = torch.zeros(())


def test_the_cpu_is_read_freely_and_nothing_else():
    assert host.reads_freely(torch.device("cpu"))
    assert not any(host.reads_freely(torch.device(kind)) for kind in ("cuda", "mps", "xpu", "meta"))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_values(shape, where):
    value = host.value_of(torch.full(shape, 2.5, requires_grad=True))
    assert float(value) == 2.5
    assert isinstance(value, float) == (where == "host")
    if where == "device":
        assert value.shape == ()
        assert not value.requires_grad


@pytest.mark.parametrize("number", [0.0, 3.0, -2.0, math.inf, math.nan])
def test_both_kinds_agree(number):
    tensor = torch.tensor(number)
    assert host.is_finite(number) == bool(host.is_finite(tensor))
    a, b = host.at_least(number, 1.0), float(host.at_least(tensor, 1.0))
    assert a == b or (math.isnan(a) and math.isnan(b))


def test_tensors_made_of_numbers():
    assert host.as_tensor(0.1, LIKE).dtype == torch.float64
    assert host.as_tensor(0.1, LIKE, torch.float32).dtype == torch.float32
    assert host.as_tensor(torch.tensor(0.5), LIKE).item() == 0.5
    assert host.as_flag(True, LIKE).dtype == torch.bool
    assert host.as_flag(torch.tensor(False), LIKE).item() is False


def test_waiting():
    assert host.wait_for(True) is True
    assert host.wait_for(torch.tensor(False)) is False
