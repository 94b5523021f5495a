"""What a step that failed has changed, and how it is put back: buffers, plain attributes of modules, random states.

Gradients and tallies go with their window, which drops them itself; the loss scale advances only after a step.
"""

from __future__ import annotations

import enum
import functools
import random
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from accumulus.errors import CorruptStepError
from accumulus.rng import States
from accumulus.step import TrainStep
from accumulus.together import members
from accumulus.update import Update

__all__ = ["Protection", "Undo"]

SMALL_BYTES = 2**20
"""Buffers up to this size are copied before every step; larger ones (masks, tables) once they were seen to change."""

MODULES_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that torch gives every module; of these a forward pass changes none but its mode and the buffers."""

UNCHANGING = (bool, int, float, str, type(None), enum.Enum, torch.dtype, torch.device, torch.nn.Module)

MANY = 1000
"""Lists with more entries are not copied before each step."""

MISSING = object()


class Undo:
    """How things were before a step.

    Args:
        step: about to learn from a batch.
        changing: names of large buffers that forward passes are known to change. A name is added when that is seen.

    Cost:
        A copy of the small buffers; a few microseconds for each, and about one for each module.
    """

    def __init__(self, step: TrainStep, changing: set[str]) -> None:
        self._step = step
        self._changing = changing
        self._reference = step.window.reference
        self._random = States.now(step.device)
        self._modules: list[tuple[torch.nn.Module, dict[str, Tensor | None], dict[str, Attribute]]] = []
        self._tensors: dict[str, tuple[Tensor, int]] = {}  # buffers, and tensors in plain attributes; with versions
        for prefix, module in step.model.named_modules():
            attributes = {name: Attribute(vars(module)[name]) for name in vars(module).keys() - MODULES_OWN}
            self._modules.append((module, dict(module._buffers), attributes))
            plain = {name: kept.value for name, kept in attributes.items() if isinstance(kept.value, Tensor)}
            for name, tensor in (*module._buffers.items(), *plain.items()):
                if tensor is not None:
                    self._tensors[f"{prefix}.{name}" if prefix else name] = tensor, _version(tensor)
        self._copies = {
            name: _dense(tensor).detach().clone()
            for name, (tensor, _) in self._tensors.items()
            if _num_bytes(tensor) <= SMALL_BYTES or name in changing
        }

    def note_changes(self) -> None:
        """After a step that went well: which large buffers change?"""
        now = {id(buffer) for module, _, _ in self._modules for buffer in module._buffers.values()}
        for name, (tensor, version) in self._tensors.items():
            if _version(tensor) != version and id(tensor) in now:
                self._changing.add(name)

    def restore(self) -> None:
        """Puts everything back.

        Raises:
            CorruptStepError: a large buffer changed that never had before, so there is no copy of it.
        """
        self._step.window.reference = self._reference
        self._random.restore()
        for module, buffers, attributes in self._modules:
            _restore_buffers(module._buffers, buffers)
            _restore_attributes(module, attributes)
        with torch.no_grad():
            for name, (tensor, version) in self._tensors.items():
                self._put_back(name, tensor, version)

    def _put_back(self, name: str, tensor: Tensor, version: int) -> None:
        if name in self._copies:  # whatever the version says: BatchNorm's kernels do not count their changes
            with torch.inference_mode(tensor.is_inference()):
                _dense(tensor).copy_(self._copies[name])
        elif _version(tensor) != version:
            self._changing.add(name)
            raise CorruptStepError(
                f"memory ran out in the first step that changed the buffer {name!r} ({_num_bytes(tensor):,} bytes), "
                "which was too large to copy unasked; load the last state, and start with a smaller micro-batch"
            )


class Attribute:
    """A plain attribute of a module, as it was: what it was bound to, and what that held.

    Activations that a module keeps of its last forward pass are held weakly: the next one replaces them, and that they
    were held until its end would take memory.

    Args:
        value: a number, a tensor, a list of losses, a generator of random numbers, anything.
    """

    __slots__ = ("_is_passing", "_put_back", "_value")

    def __init__(self, value: Any) -> None:
        self._is_passing = isinstance(value, Tensor) and (value.grad_fn is not None or _num_bytes(value) > SMALL_BYTES)
        self._value = weakref.ref(value) if self._is_passing else value
        self._put_back = None if isinstance(value, UNCHANGING) else _restorer(value)

    @property
    def value(self) -> Any:
        """What it was bound to; None for an activation, which is not put back."""
        return None if self._is_passing else self._value

    def restore(self, module: torch.nn.Module, name: str) -> None:
        """Binds it to what it was bound to, with the contents that this had."""
        value = self._value() if self._is_passing else self._value
        if value is None and self._is_passing:
            return
        if vars(module).get(name, MISSING) is not value:
            vars(module)[name] = value
        if self._put_back is not None:
            self._put_back()


def _restore_buffers(now: Any, before: dict[str, Tensor | None]) -> None:
    """A forward pass may have added some, or put others in their place."""
    for name in [name for name, _ in now.items() if name not in before]:  # a scripted module's is no whole dict
        del now[name]
    for name, buffer in before.items():
        if name not in now or now[name] is not buffer:
            now[name] = buffer


def _restore_attributes(module: torch.nn.Module, attributes: dict[str, Attribute]) -> None:
    for name in vars(module).keys() - MODULES_OWN - attributes.keys():
        del vars(module)[name]
    for name, attribute in attributes.items():
        attribute.restore(module, name)


def _restorer(value: Any) -> Callable[[], object] | None:
    """What puts the contents of an object back; None for what has none that can be seen, or holds activations."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if type(value) is list and not _holds_activations(value):
        return functools.partial(value.__setitem__, slice(None), value.copy())
    if type(value) in (dict, set) and not _holds_activations(value.values() if type(value) is dict else value):
        return functools.partial(_refill, value, value.copy())
    return None


def _holds_activations(values: Collection[Any]) -> bool:
    return len(values) > MANY or any(
        isinstance(value, Tensor) and (value.grad_fn is not None or _num_bytes(value) > SMALL_BYTES) for value in values
    )


def _refill(target: Any, source: Any) -> None:
    target.clear()
    target.update(source)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # such a tensor counts none


def _dense(tensor: Tensor) -> Tensor:
    """A tensor without the dimensions along which it is only repeated: those cannot be written to."""
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.strided:
        return int(_dense(tensor).nbytes)
    return int(tensor.element_size() * tensor._nnz()) if tensor.is_sparse else SMALL_BYTES + 1


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
        self.has_stepped = False  # since this was last set to False

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
            self.has_stepped = True
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
            if any(_address(t) in self._storages for t in tensors if isinstance(t, Tensor)):
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
        self._contents: list[tuple[Any, Any]] = []  # dicts and lists, with what was in them
        self._entries: list[tuple[Any, dict[Any, Any]]] = []  # states, with those that may change
        self._attributes: list[tuple[Any, dict[str, Any]]] = []  # counters that some keep in the optimizer itself
        self._parameters = frozenset(parameters)
        self._tensors: list[Tensor] = list(parameters)
        for optimizer in optimizers:
            numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (bool, int, float)}
            self._attributes.append((optimizer, numbers))
            for group in optimizer.param_groups:
                self._keep(group, without="params")
            entries = {key: optimizer.state[key] for key in self._own(optimizer.state)}
            self._entries.append((optimizer.state, entries))
            self._walk(entries.values())
        self._large = [tensor for tensor in self._tensors if tensor.numel() > 1]
        # To the host, also where that is where they are: an accelerator is what is short of memory.
        self._copies = [
            (tensor, tensor.detach().to("cpu", copy=True) if with_copies else tensor.detach().clone())
            for tensor in self._tensors
            if with_copies or tensor.numel() <= 1  # step counters
        ]

    def storages(self) -> frozenset[int]:
        """Where the large tensors lie."""
        return frozenset(_address(tensor) for tensor in self._large)

    def restore(self) -> None:
        """Puts back what was copied, and removes states that are new."""
        with torch.no_grad():
            for tensor, copied in self._copies:
                tensor.copy_(copied)
        for container, before in self._contents:
            container.clear()
            container.update(before) if isinstance(before, dict) else container.extend(before)
        for optimizer, numbers in self._attributes:
            vars(optimizer).update(numbers)
        for states, entries in self._entries:
            for key in [key for key in self._own(states) if key not in entries]:
                del states[key]
            states.update(entries)

    def _own(self, states: Any) -> list[Any]:
        """The keys of states that a step may change: the parameters', and what stands there for all of them."""
        return [key for key in states if key in self._parameters or not isinstance(key, Tensor)]

    def _walk(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._tensors.append(value)
            elif isinstance(value, (dict, list)):
                self._keep(value)

    def _keep(self, container: Any, without: str | None = None) -> None:
        self._contents.append((container, container.copy()))
        is_dict = isinstance(container, dict)
        self._walk((v for k, v in container.items() if k != without) if is_dict else container)


def _address(tensor: Tensor) -> int:
    """Where a tensor's data lies; 0 for what has no storage of its own, as sparse tensors."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
