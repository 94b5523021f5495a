"""Live bytes: each storage once, views followed, freed when the last one dies, the same on fake and on real tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from accumulus import TrainStep
from accumulus.memory import LiveBytes
from accumulus.memory.live import PARTS

from . import models


def in_both(function):
    """What a function returns with real and with fake tensors, which must be the same."""
    results = []
    for mode in (None, FakeTensorMode()):
        with mode or torch.enable_grad():
            results.append(function())
    assert results[0] == results[1]
    return results[0]


def test_views_share_a_storage():
    def run():
        with LiveBytes() as live:
            whole = torch.empty(100)
            views = [whole[:50], whole.view(10, 10).t(), whole.detach()]
            shared = live.current_bytes
            del whole
            kept = live.current_bytes
            del views
        return shared, kept, live.current_bytes, live.peak_bytes

    assert in_both(run) == (400, 400, 0, 400)


def test_what_was_there_before_is_left_out():
    before = torch.empty(100)
    with LiveBytes() as live:
        view = before[:50]
        view.add_(1)
        made = view + 1
    assert live.current_bytes == made.numel() * 4 == 200


def test_what_torch_makes_where_no_mode_sees_is_counted():
    with LiveBytes() as live:
        kept = torch.tensor([1.0, 2.0])
    assert live.current_bytes == 4 * len(kept)


def test_a_storage_that_grows_in_place():
    with LiveBytes() as live:
        tensor = torch.empty(10)
        tensor.resize_(100)
        assert live.current_bytes == 400
        tensor.resize_(20)  # keeps its storage
        assert live.current_bytes == 400
    del tensor
    assert live.current_bytes == 0


def test_only_the_device_asked_for_in_whole_blocks():
    with FakeTensorMode():
        with LiveBytes("meta", block_bytes=512) as live:
            kept = torch.empty(1), torch.empty(1, device="meta"), torch.empty(129, device="meta")
        assert live.current_bytes == 512 + 1024
        assert len(kept) == 3


def test_a_sparse_tensor_is_its_indices_and_values():
    with LiveBytes() as live:
        kept = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (4, 5), check_invariants=False)
    assert live.current_bytes == 2 * 8 + 2 * 5 * 4
    assert kept._nnz() == 2


def test_nothing_counted_is_no_peak():
    live = LiveBytes()
    assert (live.peak_bytes, live.phase, live.parts) == (0, "forward", dict.fromkeys(PARTS, 0))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 1000)), max_size=40))
def test_the_peak_is_that_of_a_running_sum(operations):
    """Against a plain list: make a tensor in a slot, or clear the slot."""
    slots: dict[int, torch.Tensor] = {}
    right: dict[int, int] = {}
    peak = 0
    with LiveBytes() as live:
        for makes, slot, size in operations:
            slots.pop(slot, None)
            right.pop(slot, None)
            if makes:
                slots[slot], right[slot] = torch.empty(size), 4 * size
            peak = max(peak, sum(right.values()))
            assert live.current_bytes == sum(right.values())
    assert live.peak_bytes == peak


def test_autograd_frees_as_it_goes():
    """Each layer's activation dies when its backward has run: known sizes, counted by hand."""
    x = torch.randn(1000, requires_grad=True)

    def run():
        with LiveBytes() as live:
            y = x.sin().sin().sin().sum()  # keeps two results, and the input, which was there
            after_forward = live.current_bytes
            y.backward()
            after_backward = live.current_bytes  # the sum and the gradient
            x.grad = None
        return after_forward, after_backward

    assert run() == (8004, 4004)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_parts_of_a_step(precision):
    model = models.Transformer()
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, models.token_loss, precision=precision, microbatch=2)
    loss_fn, update = step.loss_fn, step.update
    with LiveBytes().watching(step) as live:
        step(models.tokens(6))
        step(models.tokens(6))
    assert (step.loss_fn, step.update) == (loss_fn, update)
    parts = live.parts
    assert parts["parameters"] == num_bytes + 4  # a tensor in a plain attribute
    assert parts["gradients"] <= num_bytes
    assert 2 * num_bytes <= parts["optimizer state"] <= 2 * num_bytes + 4 * len(list(model.parameters()))
    assert (parts["cast weights"] >= 2 * matrices) == (precision == "bf16")
    assert parts["activations"] > 0
    end = dict(zip(PARTS, live.timeline().part_bytes[-1], strict=True))
    assert end["gradients"] == end["cast weights"] == 0
    assert end["parameters"] == parts["parameters"] and end["optimizer state"] == parts["optimizer state"]
    assert (live.timeline().part_bytes >= 0).all()


def test_a_step_that_fails_is_put_back():
    model = models.Cubes()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), models.class_loss, precision="fp32", microbatch=2)
    loss_fn, update = step.loss_fn, step.update
    with pytest.raises(KeyError), LiveBytes().watching(step):
        step({"x": torch.zeros(2, models.WIDTH)})
    assert (step.loss_fn, step.update) == (loss_fn, update)
    step(models.vectors(4))


def test_a_gradient_taken_inside_the_loss_function_is_an_activation():
    """A gradient penalty keeps what its inner backward pass made until the outer one."""
    weight = torch.randn(50, requires_grad=True)
    with LiveBytes() as live, live._running("loss"):
        (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert live.parts["temporary"] == 0 and gradient.requires_grad


def test_timelines_of_equal_runs_are_equal():
    model = models.Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = [
        models.real_count(model, optimizer, models.class_loss, models.images(4), precision="fp32", microbatch=2)
        for _ in range(2)
    ]
    assert np.array_equal(runs[0].timeline().part_bytes, runs[1].timeline().part_bytes)
