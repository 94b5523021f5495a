"""How much memory there is, from files laid out as the kernel lays them out, and as people write it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import accumulus as acc
from accumulus.memory import available_bytes, capacity, device_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("24g", 24 * 2**30),
        ("24 gb", 24 * 10**9),
        (" 1.5 TiB ", 3 * 2**39),
        (".5k", 512),
        ("512m", 2**29),
        ("100", 100),
        ("7b", 7),
        (12345, 12345),
    ],
)
def test_amounts_as_people_write_them(text, right):
    assert parse_bytes(text) == right


@pytest.mark.parametrize(
    "text", ["", "GiB", "24 GiBs", "-1GB", "1e9", "0", "0.1", 0, -5, None, True, 1.5, "1.2.3g", "auto", "9" * 400]
)
def test_amounts_that_are_none(text):
    with pytest.raises(acc.MemoryLimitError, match="an amount of memory") as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("A100-40GB", 40),
        ("a100 80gb", 80),
        ("NVIDIA H100", 80),
        ("Tesla T4", 16),
        ("rtx_4090", 24),
        ("AMD Instinct MI300X", 192),
    ],
)
def test_devices_by_name(name, gigabytes):
    assert device_bytes(name) == gigabytes * 10**9


def test_every_name_of_the_table_is_found():
    for name, gigabytes in capacity.DEVICE_GIGABYTES.items():
        assert device_bytes(name) == device_bytes(name.lower().replace("-", " ")) == gigabytes * 10**9


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("A100", "A100-40GB or A100-80GB"), ("H1000", "H100"), ("RTX-4091", "RTX-4090"), ("mi300", "MI300X"), ("", "")],
)
def test_an_unknown_device_is_refused_with_the_nearest_name(name, nearest):
    with pytest.raises(acc.MemoryLimitError, match=f"is not known; did you mean .*{nearest}"):
        device_bytes(name)


def group(folder: Path, *, limit: object, used: int, cached: int = 0, version: int = 2) -> Path:
    folder.mkdir(parents=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit_name, use_name, cache_name = names[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / use_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"active_file 5\n{cache_name} {cached}\n")
    return folder


def process(folder: Path, cgroup: str, mounts: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mounts)
    return folder


def test_control_groups_v2_up_to_the_root(tmp_path):
    mount = tmp_path / "cgroup"
    group(mount, limit="max", used=900)
    group(mount / "job", limit=1000, used=700, cached=100)
    group(mount / "job" / "task", limit="max", used=300)
    mounts = f"31 23 0:28 / {mount} rw,relatime - cgroup2 cgroup2 rw\n"
    assert capacity._cgroup_bytes(process(tmp_path / "self", "0::/job/task\n", mounts)) == [400]
    (mount / "job" / "task" / "memory.max").write_text("350")
    assert sorted(capacity._cgroup_bytes(tmp_path / "self")) == [50, 400]


def test_control_groups_v1_inside_a_container(tmp_path):
    """The container's root is a group of the host; it sees the mount point only."""
    mount = tmp_path / "memory"
    group(mount, limit=5000, used=1000, cached=10, version=1)
    mounts = (
        f"35 31 0:32 /docker/abc {mount} ro - cgroup cgroup rw,memory\n36 31 0:33 / /nowhere rw - cgroup c rw,cpu\n"
    )
    cgroup = "4:cpu:/docker/abc\n3:memory:/docker/abc\n0::/\n"
    assert capacity._cgroup_bytes(process(tmp_path / "self", cgroup, mounts)) == [4010]


def test_without_control_groups(tmp_path):
    assert capacity._cgroup_bytes(tmp_path / "nothing") == []
    assert capacity._cgroup_bytes(process(tmp_path / "self", "0::/\n", "")) == []
    assert capacity._cgroup_bytes(process(tmp_path / "odd", "nonsense\n", "")) == []


def test_the_smallest_bound_counts(monkeypatch):
    assert 0 < available_bytes("cpu") <= psutil.virtual_memory().total
    monkeypatch.setattr(capacity, "_cgroup_bytes", lambda: [1000, 2000])
    assert available_bytes(torch.device("cpu")) == 1000
    monkeypatch.setattr(capacity, "_cgroup_bytes", lambda: [-50])
    assert available_bytes("cpu") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no RLIMIT_AS")
def test_a_limit_on_the_address_space():
    code = (
        "import resource, psutil, torch; from accumulus.memory import available_bytes\n"
        "used = psutil.Process().memory_info().vms; limit = used + 2**28\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); print(available_bytes('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 2**28


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(acc.MemoryLimitError, match="free memory of cuda is not known"):
        available_bytes("cuda")
    with pytest.raises(acc.MemoryLimitError, match="free memory of meta is not known"):
        available_bytes("meta")
