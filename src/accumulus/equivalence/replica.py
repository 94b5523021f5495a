"""Private copies of a model and its loss function: whatever runs on them leaves the user's own untouched."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import DataLoader, Dataset

from accumulus.errors import UnsupportedError
from accumulus.together import as_one

__all__ = ["Replica", "cast", "replicate", "replicate_original"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
CONTAINERS = (list, dict, set, deque)
SHARED = (types.ModuleType, type, types.BuiltinFunctionType, str, bytes, int, float, complex, type(None), torch.dtype)
"""What may hold no state of its own that a run could change."""


@dataclass(frozen=True, eq=False)
class Replica:
    """A model, the loss function that goes with it, and parameters that only the optimizer knows.

    Args:
        model: the module.
        loss_fn: called with the model and a micro-batch.
        extras: trained parameters outside the model, such as a loss function's own.
        trained: names of the model's parameters whose gradients count.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    extras: tuple[Parameter, ...]
    trained: tuple[str, ...]

    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters by name; those outside the model as `optimizer[0]` and so on."""
        own = dict(self.model.named_parameters())
        found = {name: own[name] for name in self.trained}
        return found | {f"optimizer[{index}]": extra for index, extra in enumerate(self.extras)}

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that are saved with the model."""
        saved = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}


def replicate_original(model: nn.Module, loss_fn: Callable[..., Any], optimizer: Any) -> Replica:
    """The first copy, of the user's own.

    Args:
        model: the user's; not touched.
        loss_fn: the user's. What a function holds in its closure and uses of its module's globals is copied, too.
        optimizer: says which parameters are trained; None for all that require a gradient.

    Returns:
        The copy.

    Raises:
        UnsupportedError: the model cannot be copied.
    """
    if optimizer is None:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return replicate(Replica(model, loss_fn, (), tuple(trained)))
    held = [p for group in as_one(optimizer).param_groups for p in group["params"] if p.requires_grad]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = [names[id(parameter)] for parameter in held if id(parameter) in names]
    extras = tuple(parameter for parameter in held if id(parameter) not in names)
    return replicate(Replica(model, loss_fn, extras, tuple(known)))


def replicate(replica: Replica) -> Replica:
    """A deep copy in which what was shared is shared again.

    Args:
        replica: what to copy.

    Returns:
        The copy, without gradients.

    Raises:
        UnsupportedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        model, extras = copy.deepcopy((replica.model, replica.extras), memo)
        loss_fn = _copied(replica.loss_fn, memo)
    except Exception as error:  # whatever the user's classes raise
        raise UnsupportedError(
            f"check works on copies, and the model or its loss function cannot be copied ({type(error).__name__}: "
            f"{error}); give it a __deepcopy__, or keep what cannot be copied outside"
        ) from error
    for module in model.modules():
        for hooks in (getattr(module, name, None) or {} for name in HOOKS):
            for key, hook in list(hooks.items()):
                hooks[key] = _copied(hook, memo)
    for parameter in (*model.parameters(), *extras):
        parameter.grad = None
    old = (*replica.model.parameters(), *replica.extras)
    for source, made in zip(old, (*model.parameters(), *extras), strict=True):
        for hook in list((source._backward_hooks or {}).values()):  # which torch's own copy leaves out
            made.register_hook(_copied(hook, memo))  # type: ignore[no-untyped-call]
        for hook in list((getattr(source, "_post_accumulate_grad_hooks", None) or {}).values()):
            made.register_post_accumulate_grad_hook(_copied(hook, memo))  # type: ignore[no-untyped-call]
    return Replica(model, loss_fn, extras, replica.trained)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that, unlike Python's, copies functions too, with what they hold."""
    if isinstance(value, types.FunctionType):
        return _copied_function(value, memo)
    if isinstance(value, types.MethodType):
        _share_data(value.__self__, memo)
        return types.MethodType(value.__func__, copy.deepcopy(value.__self__, memo))
    if isinstance(value, functools.partial):
        words = {name: _held(item, memo) for name, item in value.keywords.items()}
        return functools.partial(_copied(value.func, memo), *(_held(item, memo) for item in value.args), **words)
    return copy.deepcopy(value, memo)


def _held(value: Any, memo: dict[int, Any]) -> Any:
    """What a function refers to: copied where it may hold state; itself where it cannot be copied."""
    if isinstance(value, SHARED):
        return value
    _share_data(value, memo)
    with suppress(Exception):  # locks and files of the user's, which nobody changes in a loss function
        return _copied(value, memo)
    return value


def _share_data(value: Any, memo: dict[int, Any]) -> None:
    """Data sets and loaders, held directly or by a trainer, are not copied: they may be large, and stay as they are."""
    held = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, SHARED) else []
    for item in (value, *held):
        if isinstance(item, (Dataset, DataLoader)):
            memo[id(item)] = item


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    scope = _copied_globals(function, memo)
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    memo[id(function)] = made
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        is_ours = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        is_ours |= hasattr(value, "__dict__") and type(value).__module__ == function.__module__
        if is_ours or isinstance(value, (nn.Module, Tensor, *GENERATORS, *CONTAINERS)):
            scope[name] = _held(value, memo)
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            cell.cell_contents = _held(old.cell_contents, memo)
    return made


def _copied_globals(function: types.FunctionType, memo: dict[int, Any]) -> dict[str, Any]:
    """One new namespace for all functions of a module, so that they see each other's changes, and nobody else's."""
    scope: dict[str, Any] = memo.setdefault(id(function.__globals__), dict(function.__globals__))
    return scope


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def cast(replica: Replica, dtype: torch.dtype) -> Replica:
    """Turns every floating tensor of a replica into another dtype, in place.

    Args:
        replica: a copy of our own.
        dtype: to hold them in.

    Returns:
        The same replica.
    """
    replica.model.to(dtype)
    for module in replica.model.modules():
        _cast_held(vars(module), dtype)
    for extra in replica.extras:
        _cast_held([extra], dtype)
    _cast_function(replica.loss_fn, dtype, set())
    return replica


def _cast_function(function: Any, dtype: torch.dtype, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        _cast_held([*function.args, *function.keywords.values()], dtype)
        _cast_function(function.func, dtype, seen)
    elif isinstance(function, types.MethodType):
        _cast_held([function.__self__], dtype)
    elif isinstance(function, types.FunctionType):
        held = [function.__globals__.get(name) for name in _names(function.__code__)]
        for cell in function.__closure__ or ():
            with suppress(ValueError):
                held.append(cell.cell_contents)
        _cast_held(held, dtype)
        for value in held:
            if isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch"):
                _cast_function(value, dtype, seen)
    else:
        _cast_held([function], dtype)


def _cast_held(values: Any, dtype: torch.dtype) -> None:
    for value in list(values.values() if isinstance(values, Mapping) else values):
        if isinstance(value, nn.Module):
            value.to(dtype)
        elif isinstance(value, Tensor):
            if value.is_floating_point() and value.dtype != dtype and value.is_leaf:
                value.data = value.data.to(dtype)
        elif isinstance(value, (list, tuple, dict)) and any(isinstance(item, Tensor) for item in _items(value)):
            _cast_held(value, dtype)
        elif hasattr(value, "__dict__") and not isinstance(value, (*SHARED, types.FunctionType, types.MethodType)):
            _cast_tensors(vars(value), dtype)


def _cast_tensors(values: Mapping[str, Any], dtype: torch.dtype) -> None:
    _cast_held([value for value in values.values() if isinstance(value, (Tensor, nn.Module))], dtype)


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value
