"""Under which conditions copies of a model run: dtype, random states, draws, modules in evaluation mode."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accumulus import pytree
from accumulus.equivalence.modes import Draws, Widened
from accumulus.equivalence.replica import Replica, replicate
from accumulus.microbatch import to_device
from accumulus.rng import States

__all__ = ["Lab", "undisturbed"]

TILT = 0.29
"""A quantile away from the mean of any distribution in use, and below the chance to be kept of any usual dropout."""


@contextmanager
def undisturbed(device: torch.device) -> Iterator[States]:
    """The process is afterwards as before: random states, default dtype, warnings, gradient mode.

    Args:
        device: whose random state to keep, with the CPU's.

    Yields:
        The random states, with which every run begins.
    """
    states, dtype = States.now(device), torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the user's own step gives them
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield states
        finally:
            torch.set_default_dtype(dtype)
            torch.clear_autocast_cache()
            states.restore()


@dataclass(frozen=True, kw_only=True, eq=False)
class Lab:
    """A prototype that is never run itself, the batch, and under which conditions to run copies of it.

    Args:
        prototype: model and loss function, in `dtype`.
        batch: a tree of tensors; with `collate`, a list of samples.
        collate: makes a micro-batch from a list of samples.
        device: where the model computes.
        dtype: what floating tensors are cast to; None leaves them as they are.
        states: the random states with which every run begins.
        draws: "own", or how draws are made comparable: "shared", "mean" or "tilted", which is off the mean.
        frozen: modules that run in evaluation mode.
    """

    prototype: Replica
    batch: Any
    collate: Callable[[Any], Any] | None
    device: torch.device
    dtype: torch.dtype | None
    states: States
    draws: str = "own"
    frozen: frozenset[str] = frozenset()

    def but(self, **changes: Any) -> Lab:
        """The same with other conditions."""
        return replace(self, **changes)

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self.batch) if self.collate is not None else pytree.sliceable(self.batch).length

    def fresh(self) -> Replica:
        """A copy to run."""
        made = replicate(self.prototype)
        for name, module in made.model.named_modules():
            if name in self.frozen:
                module.eval()
            if self.draws in ("mean", "tilted") and isinstance(module, torch.nn.RNNBase):
                module.dropout = 0.0  # cuDNN's kernel draws by itself
        return made

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What every run happens in: the random states at their start, no autocast of the user's, and the modes."""
        self.states.restore()
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            if torch.amp.is_autocast_available(self.device.type):
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.dtype is torch.float64:
                torch.set_default_dtype(torch.float64)
                stack.enter_context(Widened())
            if self.draws != "own":
                stack.enter_context(Draws(by_mean=self.draws == "mean", at=TILT if self.draws == "tilted" else None))
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def loss_of(self, copied: Replica) -> Callable[[Any, Any], Any]:
        """The loss function; where draws are to be comparable, each call begins with the same random states."""
        if self.draws == "own":
            return copied.loss_fn

        def seeded(model: Any, part: Any) -> Any:
            self.states.restore()
            return copied.loss_fn(model, part)

        return seeded

    def collated(self, samples: list[Any]) -> Any:
        """A list of samples as a micro-batch; where draws are to be comparable, those of the collation are, too."""
        assert self.collate is not None
        if self.draws != "own":
            self.states.restore()
        return self.cast(self.collate(samples))

    def part(self, rows: Sequence[int] | None = None) -> Any:
        """A micro-batch of some samples on the device, whose tensors are nobody else's.

        Args:
            rows: places in the batch; None for all.
        """
        if self.collate is not None:
            with self.conditions():
                return self.collated(list(self.batch) if rows is None else [self.batch[row] for row in rows])
        if rows is None:
            return self.cast(self.batch)
        return self.cast(next(pytree.sliceable(self.batch).pick(list(rows), [len(rows)])))

    def cast(self, tree: Any) -> Any:
        """A copy of a batch's tensors, in the lab's dtype and on its device."""

        def moved(tensor: Tensor) -> Tensor:
            is_narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype=self.dtype if is_narrow and self.dtype else tensor.dtype, copy=True)

        return to_device(pytree.map_tensors(moved, tree), self.device)
