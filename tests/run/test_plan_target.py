import pytest
import torch

import accumulus as acc
from accumulus.errors import UsageError
from accumulus.run import plan_target
from accumulus.run.plan_config import PlanConfig
from accumulus.run.plan_target import fast_by_name, find_target


def test_the_cpu_and_what_is_free_on_it(monkeypatch):
    monkeypatch.setattr(acc.memory, "available_bytes", lambda device: 12345)
    target = find_target(PlanConfig(device="cpu"))
    assert (target.device, target.is_here) == (torch.device("cpu"), True)
    assert (target.limit.limit_bytes, target.limit.source) == (12345, "free on cpu now")
    assert str(target.fast) == str(acc.Precision.parse("auto", "cpu")) and target.fast.reason
    assert target.kernels.startswith("Counted for the kernels of ")


def test_an_accelerator_by_name_needs_none():
    target = find_target(PlanConfig(device="A100-40GB"))
    assert target.limit.limit_bytes == acc.memory.device_bytes("A100-40GB")
    assert target.limit.source == "all of A100-40GB"
    assert target.device.type == "cuda"
    assert not target.is_here
    assert "A100-40GB itself is not here" in target.kernels


@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_memory_that_was_given_counts(device):
    limit = find_target(PlanConfig(device=device, memory="1.5GiB")).limit
    assert (limit.limit_bytes, limit.source) == (3 * 2**29, "given")


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("A100-40GB", "bf16"),
        ("RTX-4090", "bf16"),
        ("MI300X", "bf16"),
        ("V100-32GB", "fp16"),
        ("Tesla V100 16GB", "fp16"),
        ("NVIDIA T4", "fp16"),
        ("p100", "fp32"),
    ],
)
def test_what_an_accelerator_does_fast_by_its_name(name, fast):
    precision = fast_by_name(name)
    assert str(precision) == fast
    assert name in precision.reason
    assert acc.memory.device_bytes(name) > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "toaster"}, "--device toaster is no torch device, and as an accelerator's name: .*not known"),
        ({"device": "V100"}, "did you mean V100-16GB or V100-32GB"),
        ({"device": ""}, "--device "),
        ({"device": "cuda:77"}, "--device cuda:77 cannot be used .*or an accelerator's name, such as A100-40GB"),
        ({"memory": "much"}, "--memory much: .*24GiB"),
        ({"memory": "-1GiB"}, "--memory -1GiB: "),
        ({"memory": "0"}, "--memory 0: .*at least 1 byte"),
        ({"memory": "nanGiB"}, "--memory nanGiB: "),
    ],
)
def test_bad_input_is_one_line(options, told):
    with pytest.raises(UsageError, match=told) as caught:
        find_target(PlanConfig(**options))
    assert "\n" not in str(caught.value)


def test_nothing_free(monkeypatch):
    monkeypatch.setattr(plan_target.memory, "available_bytes", lambda device: 0)
    with pytest.raises(UsageError, match="0 bytes are free on cpu now; free some, or give a size"):
        find_target(PlanConfig(device="cpu"))


def test_a_device_that_does_not_tell(monkeypatch):
    def refuse(device):
        raise acc.MemoryLimitError("free memory of cpu is not known")

    monkeypatch.setattr(plan_target.memory, "available_bytes", refuse)
    with pytest.raises(UsageError, match="--memory auto: free memory of cpu is not known; --memory 24GiB"):
        find_target(PlanConfig(device="cpu"))
