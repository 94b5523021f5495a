import json

import numpy as np
import pytest
import torch

import accumulus as acc
from accumulus.errors import UsageError
from accumulus.run.machine import choose_device, describe_environment, peak_bytes, resident_bytes

CPU = torch.device("cpu")


def test_devices():
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda", "mps", "xpu")
    for name in ("toaster", "cuda:99"):
        with pytest.raises(UsageError, match=f"--device {name} cannot be used"):
            choose_device(name)


def test_peak_memory_sees_what_is_gone_again():
    before = peak_bytes(CPU)
    size = before + 50_000_000 - resident_bytes()
    np.ones(size, np.uint8)
    assert peak_bytes(CPU) >= before + 40_000_000
    assert peak_bytes(CPU) >= resident_bytes()


def test_environment_is_plain():
    environment = describe_environment(CPU, acc.Precision.parse("auto", CPU))
    assert json.loads(json.dumps(environment)) == environment
    assert environment["precision_reason"]
    assert environment["num_threads"] > 0
