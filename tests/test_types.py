"""`Loss` and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import accumulus as acc
from accumulus.types import describe, to_python


@pytest.mark.parametrize(
    ("weight", "right"),
    [
        (3, 3),
        (0, 0),
        (2.5, 2.5),
        (True, 1),
        (np.int64(4), 4),
        (torch.tensor(5), 5),
        (torch.tensor([6.0]), 6.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_weights_on_the_host_are_plain_numbers(weight, right):
    found = acc.Loss(torch.ones(()), weight).weight
    assert found == right
    assert type(found) in (int, float)


def test_weights_on_a_device_stay_there(accelerator):
    weight = torch.tensor([3])
    found = acc.Loss(torch.ones(()), weight).weight
    assert isinstance(found, torch.Tensor)
    assert found.shape == ()
    assert acc.Loss.mean(torch.ones(()), weight).weight == 3  # a mean's is read: see its docstring


@pytest.mark.parametrize("bad", [3.0, None, torch.ones(2), "loss", torch.tensor(3), torch.tensor(1j)])
@pytest.mark.parametrize("make", [acc.Loss, acc.Loss.mean])
def test_sums_must_be_tensors_of_one_element(bad, make):
    with pytest.raises(acc.LossError, match="one real floating number"):
        make(bad, 1)


def test_mean_multiplies_in_float32():
    loss = acc.Loss.mean(torch.tensor(100.0, dtype=torch.float16), 1000)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == 100_000


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float16])
def test_masked_ignores_what_is_masked(dtype):
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    loss = acc.Loss.masked(values, torch.tensor([1, 0, 1]).to(dtype))
    assert (loss.sum.item(), loss.weight) == (4.0, 2)
    loss.sum.backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_masked_wants_equal_shapes():
    with pytest.raises(acc.LossError, match=r"\(3,\).*\(2,\)"):
        acc.Loss.masked(torch.ones(3), torch.ones(2))


def test_descriptions():
    assert describe(torch.ones(2, 3)) == "a tensor of shape (2, 3) and torch.float32"
    assert describe(None) == "None"
    assert describe([1]) == "a list"


def test_to_python():
    assert to_python({"a": torch.tensor(1.5), "b": 2}) == {"a": 1.5, "b": 2}
