"""What a step that failed has changed, and how it is put back: buffers, random states, the reference weight.

Gradients and tallies go with their window, which drops them itself; the loss scale advances only after a step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from accumulus.errors import CorruptStepError
from accumulus.rng import random_state, set_random_state
from accumulus.step import TrainStep
from accumulus.together import members
from accumulus.update import Update

__all__ = ["Protection", "Undo"]

SMALL_BYTES = 2**20
"""Buffers up to this size are copied before every step; larger ones (masks, tables) once they were seen to change."""


class Undo:
    """How things were before a step.

    Args:
        step: about to learn from a batch.
        changing: names of large buffers that forward passes are known to change. A name is added when that is seen.

    Cost:
        A copy of the small buffers; a few microseconds for each.
    """

    def __init__(self, step: TrainStep, changing: set[str]) -> None:
        self._step = step
        self._changing = changing
        self._reference = step.window.reference
        self._random = random_state(step.device), random.getstate(), np.random.get_state()
        self._buffers: list[tuple[torch.nn.Module, str, Tensor, int]] = []
        self._names: list[str] = []
        for prefix, module in step.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers.append((module, name, buffer, buffer._version))
                    self._names.append(f"{prefix}.{name}" if prefix else name)
        self._copies = {
            name: buffer.clone()
            for name, (_, _, buffer, _) in zip(self._names, self._buffers, strict=True)
            if buffer.nbytes <= SMALL_BYTES or name in changing
        }

    def note_changes(self) -> None:
        """After a step that went well: which large buffers change?"""
        for name, (module, own, buffer, version) in zip(self._names, self._buffers, strict=True):
            if buffer._version != version and module._buffers.get(own) is buffer:
                self._changing.add(name)

    def restore(self) -> None:
        """Puts everything back.

        Raises:
            CorruptStepError: a large buffer changed that never had before, so there is no copy of it.
        """
        self._step.window.reference = self._reference
        cpu, python, numpy = self._random
        set_random_state(cpu, self._step.device)
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for name, (module, own, buffer, version) in zip(self._names, self._buffers, strict=True):
                self._put_back(name, buffer, version)
                module._buffers[own] = buffer  # a forward pass may have put another one in its place

    def _put_back(self, name: str, buffer: Tensor, version: int) -> None:
        if name in self._copies:  # whatever the version says: BatchNorm's kernels do not count their changes
            buffer.copy_(self._copies[name])
        elif buffer._version != version:
            self._changing.add(name)
            raise CorruptStepError(
                f"memory ran out in the first step that changed the buffer {name!r} ({buffer.nbytes:,} bytes), which "
                "was too large to copy unasked; load the last state, and start with a smaller micro-batch"
            )


class Protection:
    """Lets an optimizer's step fail and leave nothing half done, as far as that can be.

    In a parameter's first step the optimizer makes its state, parameter by parameter: that allocates, so parameters and
    states are copied to the host beforehand. Later steps are not copied. One that fails before anything changed is as
    if it had not begun; else the parameters cannot be trusted any more.

    Args:
        update: whose optimizer steps.

    Cost:
        In the first step one copy of the parameters in host memory. After that a walk over parameters and states, and
        with a fused optimizer some 100 microseconds to see whether its kernel has run.
    """

    def __init__(self, update: Update) -> None:
        self._update = update

    @contextmanager
    def __call__(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """The context that the optimizer steps in.

        Args:
            parameters: those that it is about to change.

        Yields:
            None.

        Raises:
            CorruptStepError: the step failed when some parameters or states had been changed already.
        """
        is_first = not self._update.has_state(parameters)
        before = Kept(members(self._update.optimizer), parameters, with_copies=is_first)
        watch = nullcontext(None) if is_first else ChangeWatch(before.storages())
        try:
            with watch as seen:
                yield
        except Exception as error:
            if seen is not None and seen.has_changed:
                raise CorruptStepError(
                    f"the optimizer's step failed half way ({type(error).__name__}: {_first_line(error)}), so some "
                    "parameters are updated and others are not; load the last state. An optimizer with fused=True "
                    "needs no memory in its step"
                ) from error
            before.restore()
            raise


class ChangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether an operator changes certain tensors. Their versions would not do: fused kernels do not count.

    Args:
        storages: addresses of the tensors' data.
    """

    def __init__(self, storages: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self.has_changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable and not self.has_changed and self._are_changed(func, args)
        is_whole = func.__name__.startswith("_fused_")  # they check first and need no memory; others may stop half way
        self.has_changed |= changes and not is_whole
        result = func(*args, **(kwargs or {}))
        self.has_changed |= changes
        return result

    def _are_changed(self, func: Any, args: Sequence[Any]) -> bool:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            tensors = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._storages for t in tensors):
                return True
        return False


class Kept:
    """Optimizers' groups, states and parameters as they were, with copies of the tensors or only of the small ones.

    Args:
        optimizers: those that are about to step.
        parameters: those that they will change.
        with_copies: copy the large tensors too, so that a change can be undone.
    """

    def __init__(self, optimizers: Sequence[Any], parameters: Sequence[Parameter], *, with_copies: bool) -> None:
        self._groups = [(group, _without_parameters(group)) for o in optimizers for group in o.param_groups]
        self._states = [
            (o.state, p, dict(o.state[p]) if p in o.state else None) for o in optimizers for p in parameters
        ]
        inside = [value for _, kept in self._groups for value in kept.values()]
        inside += [value for _, _, kept in self._states for value in (kept or {}).values()]
        tensors = [*parameters, *(value for value in inside if isinstance(value, Tensor))]
        self._large = [tensor for tensor in tensors if tensor.numel() > 1]
        small = [tensor for tensor in tensors if tensor.numel() <= 1]  # step counters
        # To the host, also where that is where they are: an accelerator is what is short of memory.
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (tensors if with_copies else ())]
        self._copies += [(tensor, tensor.detach().clone()) for tensor in (() if with_copies else small)]

    def storages(self) -> frozenset[int]:
        """Where the large tensors lie."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self._large)

    def restore(self) -> None:
        """Puts back what was copied, and removes states that are new."""
        with torch.no_grad():
            for tensor, copied in self._copies:
                tensor.copy_(copied)
        for group, kept in self._groups:
            group.update(kept)
        for states, parameter, kept_state in self._states:
            if kept_state is not None:
                states[parameter] = kept_state
            elif parameter in states:
                del states[parameter]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
