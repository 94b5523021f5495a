"""When gradients are reduced over ranks: `GradSync`, chosen once by looking at the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from accumulus.dist.collectives import num_ranks
from accumulus.dist.process import this_process
from accumulus.errors import UnsupportedError

__all__ = ["GradSync", "NoSync", "choose_sync"]

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


class GradSync(Protocol):
    """What a step needs to know of a model that lives on several ranks."""

    averaged_over: int
    """Over how many ranks the wrapper averages gradients; 1 where it does not."""

    reduces: bool
    """Whether `only_if` does anything."""

    def only_if(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduces the gradients of the backward passes inside only if `is_last`."""


class NoSync:
    """One rank: nothing to reduce."""

    averaged_over = 1
    reduces = False
    _nothing: AbstractContextManager[object] = nullcontext()

    def only_if(self, is_last: bool) -> AbstractContextManager[object]:
        """Does nothing.

        Args:
            is_last: whether this is the window's last micro-batch.

        Returns:
            An empty context.
        """
        return self._nothing


def choose_sync(model: Any) -> GradSync:
    """The way this model's gradients are reduced.

    Args:
        model: plain, compiled or wrapped.

    Returns:
        `NoSync` for a model on one rank.

    Raises:
        UnsupportedError: the model is wrapped for several ranks, or several ranks run.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    # By name: importing FSDP to ask would cost every user its import time.
    for kind in type(inner).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
            raise UnsupportedError(f"a model wrapped in {kind.__name__} is not supported yet; pass the plain model")
    # Processes that torchrun started and that have not found each other would each train a model of its own.
    ranks = max(num_ranks(), this_process().num_ranks)
    if ranks > 1:
        raise UnsupportedError(f"training over {ranks} ranks is not available yet; run one process")
    return NoSync()
