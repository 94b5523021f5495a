"""A window that is run to see what it takes, and not to learn: same code, same order, nothing kept."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulus import pytree, rng
from accumulus.microbatch import Split
from accumulus.scaling import NoScale
from accumulus.step import TrainStep

__all__ = ["Pieces", "Rehearsal", "drop_gradients", "resized", "undisturbed"]


class Pieces:
    """The micro-batches of a rehearsed window: `count` times what `make()` gives, of `size` samples each.

    Args:
        make: makes one micro-batch on the device.
        size: samples in it.
        count: how many.
    """

    def __init__(self, make: Callable[[], Any], size: int, count: int) -> None:
        self._make = make
        self.sizes = [size] * count
        self.num_samples = size * count
        self.order = None

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        for index in range(1, len(self.sizes) + 1):
            yield self._make(), index == len(self.sizes)


class Rehearsal(TrainStep):
    """A step that takes `Pieces`, and after the update settles nothing: no loss scale, no scheduler, no counters.

    It takes no norm either, which makes only scalars and on a CPU goes through large gradients in many pieces.
    """

    def __init__(self, model: Any, optimizer: Any, loss_fn: Any, *, precision: Any, device: torch.device) -> None:
        super().__init__(
            model,
            optimizer,
            loss_fn,
            precision=precision,
            microbatch=1,
            loss_scale=NoScale(),
            skip_nonfinite=False,
            device=device,
        )

    def split(self, batch: Any, rule: Split | None = None) -> Any:
        """The pieces themselves.

        Args:
            batch: `Pieces`.
            rule: not used.

        Returns:
            The same.
        """
        return batch

    def _finish(self, window: Any, totals: Any, **_: Any) -> Any:
        return self.update(totals.divisor, totals.is_valid)


def resized(tree: pytree.Sliceable, size: int, resize: Callable[[Tensor, int], Tensor]) -> Any:
    """A batch like another, with another number of samples.

    Args:
        tree: the example.
        size: number of samples.
        resize: makes a tensor of `size` rows of one of `tree.length`, or a tensor that all samples share if `size`
            is None.

    Returns:
        A tree of the same types. Arrays and lists repeat the example's rows from the first on.
    """
    return tree.rebuild(iter([_resized_leaf(leaf.value, tree.length, size, resize) for leaf in tree.leaves]))


def _resized_leaf(value: Any, length: int, size: int, resize: Callable[[Tensor, int], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return resize(value, size if value.ndim else -1)
    if isinstance(value, np.ndarray) and value.ndim:
        if size <= length:
            return value[:size]
        return np.broadcast_to(value[:1], (size, *value.shape[1:]))  # takes no memory, however many
    if isinstance(value, (list, tuple)) and len(value) == length:
        whole, rest = divmod(size, length)
        pieces: Any = value
        return pieces * whole + pieces[:rest]
    return value


def drop_gradients(model: Any) -> None:
    """Leaves the parameters without gradients."""
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def undisturbed(device: torch.device, model: Any) -> Iterator[None]:
    """Nothing of the process changes: random states, gradients of the model, warnings shown, garbage collection.

    Args:
        device: whose random state to keep, with the CPU's, numpy's and Python's.
        model: whose gradients to keep.

    Yields:
        None, once. The model has no gradients inside.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = rng.States.now(device)
    was_collecting = gc.isenabled()
    gc.disable()  # a cycle that it frees at some chance moment would make two runs differ
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the step itself will give them
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            drop_gradients(model)
            yield
        finally:
            torch.clear_autocast_cache()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            states.restore()
            if was_collecting:
                gc.enable()
