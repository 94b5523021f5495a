"""Cutting trees: every container, every kind of leaf, the same rows in all of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulus import pytree
from accumulus.errors import BatchError

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    note: str = "shared"


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Encoding(UserDict):
    """As a tokenizer returns it: a UserDict with more to it."""


def cut(batch, sizes):
    return list(pytree.sliceable(batch).cut(sizes))


def rows(count=10):
    return torch.arange(count)[:, None].expand(count, 3).clone()


CONTAINERS = {
    "tensor": (lambda x: x, lambda b: b),
    "dict": (lambda x: {"x": x, "k": 3}, lambda b: b["x"]),
    "ordered": (lambda x: OrderedDict(x=x, k=None), lambda b: b["x"]),
    "user dict": (lambda x: Encoding(x=x, name="n"), lambda b: b["x"]),
    "proxy": (lambda x: MappingProxyType({"x": x}), lambda b: b["x"]),
    "tuple": (lambda x: (x, "text"), lambda b: b[0]),
    "list": (lambda x: [x, x.float()], lambda b: b[0]),
    "namedtuple": (lambda x: Pair(x, 2.0), lambda b: b.x),
    "dataclass": (lambda x: Record(x), lambda b: b.x),
    "slots": (lambda x: Slotted(x), lambda b: b.x),
    "nested": (lambda x: {"a": [Pair(x, {"b": (x, True)})]}, lambda b: b["a"][0].y["b"][0]),
    "numpy": (lambda x: {"x": x.numpy()}, lambda b: torch.from_numpy(b["x"])),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_comes_back_as_itself(name):
    make, get = CONTAINERS[name]
    batch = make(rows())
    assert pytree.sliceable(batch).length == 10
    parts = cut(batch, [4, 3, 3])
    assert [type(part) for part in parts] == [type(batch)] * 3
    assert torch.equal(torch.cat([get(part) for part in parts]), rows())
    assert torch.equal(get(batch), rows())  # the batch itself is untouched


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_row_i_of_one_leaf_meets_row_i_of_every_other(sizes):
    count = sum(sizes)
    batch = {
        "tensor": torch.arange(count),
        "array": np.arange(count),
        "texts": [str(i) for i in range(count)],
        "boxes": [{"box": torch.full((i % 3, 4), i)} for i in range(count)],
    }
    if count == 1:
        return  # one box of one row could be a container or a sample: said to be a container
    for part in cut(batch, sizes):
        assert part["tensor"].tolist() == part["array"].tolist() == [int(text) for text in part["texts"]]
        assert [b["box"].shape[0] for b in part["boxes"]] == [i % 3 for i in part["tensor"].tolist()]


def test_scalars_strings_and_none_go_to_every_micro_batch():
    shared = {
        "n": 3,
        "f": 0.5,
        "s": "text",
        "none": None,
        "zero_dim": torch.tensor(7),
        "dtype": torch.float32,
        "np": np.int64(2),
    }
    for part in cut({"x": rows(), **shared}, [5, 5]):
        assert {name: part[name] for name in shared} == shared


def test_a_list_of_tensors_of_the_batchs_length_is_a_container():
    x = torch.arange(2)
    assert [part[0].tolist() for part in cut([x, x], [1, 1])] == [[0], [1]]


def test_a_tuple_of_strings_is_cut_with_the_tensors():
    """As torch's default_collate returns the names of samples."""
    from torch.utils.data import default_collate

    batch = default_collate([(torch.tensor(i), f"s{i}") for i in range(4)])
    assert [(part[0].tolist(), list(part[1])) for part in cut(batch, [3, 1])] == [
        ([0, 1, 2], ["s0", "s1", "s2"]),
        ([3], ["s3"]),
    ]


def test_a_list_that_could_be_read_both_ways_is_refused():
    """One entry per sample, or one tensor per field? It must not depend on how many boxes an image happens to have."""
    with pytest.raises(BatchError, match=r"batch\.boxes.*Use a tuple for fields"):
        cut({"x": rows(3), "boxes": [rows(3), rows(3), rows(3)]}, [1, 2])
    fields = cut({"x": rows(3), "pair": (rows(3), rows(3), rows(3))}, [1, 2])
    assert [len(part["pair"]) for part in fields] == [3, 3]
    samples = cut({"x": rows(3), "boxes": [rows(2), rows(3), rows(1)]}, [1, 2])
    assert [len(part["boxes"]) for part in samples] == [1, 2]


def test_pieces_are_views():
    x = rows()
    assert cut(x, [5, 5])[1].data_ptr() == x[5:].data_ptr()


class Opaque:
    """Might hide a tensor."""


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": rows(4), "y": {"z": rows(3)}}, r"batch\.x has 4 but batch\.y\.z has 3"),
        ({"x": rows(0)}, "0 samples"),
        ({"x": 3}, "no tensor"),
        ([], "no tensor"),
        (None, "no tensor"),
        ({"x": rows(), "o": Opaque()}, r"batch\.o is a .*Opaque"),
        ({"x": rows(), 3: [Opaque()]}, r"batch\[3\]\[0\]"),
        ((i for i in range(3)), "generator"),
        ([rows(4), rows(3)], "collate="),
        ({"x": torch.eye(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, "nested|layout"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, says):
    with pytest.raises(BatchError, match=says):
        cut(batch, [1] * 3)


def test_map_tensors_keeps_everything_else():
    opaque = Opaque()
    found = pytree.map_tensors(lambda t: t + 1, {"x": torch.zeros(2), "o": [opaque, "s"], "r": Record(torch.ones(1))})
    assert found["x"].tolist() == [1, 1]
    assert found["o"] == [opaque, "s"]
    assert found["r"].x.item() == 2
