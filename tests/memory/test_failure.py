"""What counts as running out of memory, and that letting go really frees."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import accumulus as acc
from accumulus.memory.failure import is_out_of_memory, let_go


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def wrapped():
    try:
        raise torch.OutOfMemoryError
    except torch.OutOfMemoryError as error:
        raise KeyError("a wrapper's") from error


def in_passing():
    try:
        raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        raise KeyError("another fault, while handling it")  # noqa: B904


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.empty(2**58),
        lambda: torch.zeros(2**40, 2**20, dtype=torch.uint8),
        lambda: bytearray(2**60),
        wrapped,
    ],
    ids=["empty", "zeros", "python", "cause"],
)
def test_allocators_are_told_by_what_they_raise(function):
    assert is_out_of_memory(raised(function))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("you tried to allocate 5 bytes"),
        ValueError("out of memory"),
        acc.OutOfMemoryError("ours is the end of it"),
        None,
    ],
)
def test_texts_are_not_believed(error):
    assert not is_out_of_memory(error)


def test_our_own_errors_end_it_whatever_caused_them():
    error = acc.CorruptStepError("half updated")
    error.__cause__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(raised(in_passing))


def test_the_code_of_cuda_itself():
    error = torch.AcceleratorError("a kernel could not be launched")
    error.error_code = 2
    assert is_out_of_memory(error)
    error.error_code = 700
    assert not is_out_of_memory(error)


def test_let_go_frees_what_the_frames_hold():
    class Held:
        pass

    found = []

    def fail():
        held = Held()
        found.append(weakref.ref(held))
        raise torch.OutOfMemoryError

    def outer():
        try:
            fail()
        except torch.OutOfMemoryError as error:
            raise MemoryError from error

    error = raised(outer)
    gc.disable()
    try:
        assert found[0]() is not None
        let_go(error, torch.device("cpu"))
        assert found[0]() is None
        assert error.__traceback__ is None and error.__cause__.__traceback__ is None
    finally:
        gc.enable()
