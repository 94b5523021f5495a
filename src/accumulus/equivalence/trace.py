"""One forward pass written down: which module was called with what, what it returned, and who drew random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumulus import pytree
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.modes import is_random
from accumulus.equivalence.replica import Replica
from accumulus.errors import AccumulusError

__all__ = ["LOSS_FUNCTION", "Call", "Trace", "labelled", "run_traced", "show"]

LOSS_FUNCTION = "the loss function"
COLLATION = "the collate function"


@dataclass(eq=False)
class Call:
    """One call of a module.

    Args:
        name: the module's path; empty for the model itself.
        kind: its class.
        index: place in the order in which calls began.
        parent: index of the call around it; -1 where the loss function called it.
        inputs: tensors that it got.
        outputs: tensors that it returned, with their place in what it returned.
        arguments: what it got, whole: positional and by name.
    """

    name: str
    kind: str
    index: int
    parent: int
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    arguments: tuple[Any, Any] = ((), {})

    @property
    def shown(self) -> str:
        """The module for people: path and class."""
        return show(self.name, self.kind)


@dataclass(eq=False)
class Trace:
    """All calls of one forward pass, in the order in which they began; what was returned; and who drew."""

    calls: list[Call] = field(default_factory=list)
    returned: Any = None
    draws: list[str] = field(default_factory=list)

    def inside(self, index: int) -> Iterator[Call]:
        """The calls that a call made, and those that they made."""
        found = {index}
        for call in self.calls:
            if call.parent in found:
                found.add(call.index)
                yield call


def show(name: str, kind: str) -> str:
    """A module for people: path and class."""
    return f"{name} ({kind})" if name else f"the model ({kind})"


def labelled(tree: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a tree with their paths."""
    leaves = pytree.flatten(tree, lambda node, path: False, strict=False)[0]
    return [(leaf.name, leaf.value) for leaf in leaves if isinstance(leaf.value, Tensor)]


def run_traced(
    lab: Lab,
    copied: Replica,
    part: Any,
    *,
    overrides: Mapping[int, Callable[[Any], Any]] | None = None,
    with_graph: bool = False,
    watch_draws: bool = False,
) -> Trace:
    """Calls the loss function once and writes down what happens.

    Args:
        lab: under whose conditions.
        copied: model and loss function to run; it is changed as any run changes it.
        part: the micro-batch.
        overrides: what to make of the output of the calls with these indices.
        with_graph: outputs keep their graph. Autograd records anyway, as a loss function may take gradients itself.
        watch_draws: note who draws random numbers.
    """
    recorder = _Recorder(overrides or {}, watch_draws=watch_draws)
    with lab.conditions(), recorder.attached(copied.model):
        recorder.trace.returned = lab.loss_of(copied)(copied.model, part)
    if not with_graph:
        for call in recorder.trace.calls:
            call.outputs = [(label, tensor.detach()) for label, tensor in call.outputs]
    return recorder.trace


class _Recorder:
    def __init__(self, overrides: Mapping[int, Callable[[Any], Any]], *, watch_draws: bool) -> None:
        self.trace = Trace()
        self._overrides = overrides
        self._open: list[Call] = []
        self._watch = _DrawWatch(self.blame) if watch_draws else None
        self._host = _host_random() if watch_draws else None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Inside, every call of the model's modules is written down."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            with self._watch or nullcontext():
                yield
                self._look_at_host()

    def blame(self) -> None:
        """Notes that whoever runs now has drawn."""
        owner = self._open[-1].shown if self._open else LOSS_FUNCTION
        if owner not in self.trace.draws:
            self.trace.draws.append(owner)

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, words: Any) -> None:
            self._look_at_host()
            parent = self._open[-1].index if self._open else -1
            call = Call(name, type(module).__name__, len(self.trace.calls), parent)
            call.inputs = [tensor.detach() for _, tensor in labelled((args, words))]
            call.arguments = (args, words)
            self.trace.calls.append(call)
            self._open.append(call)

        return enter

    def _leave(self, module: nn.Module, args: Any, words: Any, returned: Any) -> Any:
        self._look_at_host()
        call = self._open.pop()
        change = self._overrides.get(call.index)
        if change is not None:
            returned = change(returned)
        call.outputs = labelled(returned)
        return returned if change is not None else None

    def _look_at_host(self) -> None:
        if self._host is not None:
            now = _host_random()
            if now != self._host:
                self._host = now
                self.blame()


class _DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls back when an operator has drawn; those that only may draw, as attention without dropout, do not count."""

    def __init__(self, blame: Callable[[], None], *, private: bool = True) -> None:
        self._private = private
        super().__init__()  # type: ignore[no-untyped-call]
        self._blame = blame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        words = kwargs or {}
        if not is_random(func):
            return func(*args, **words)
        has_own = self._private and any(isinstance(value, torch.Generator) for value in (*args, *words.values()))
        before = _torch_random()
        made = func(*args, **words)
        if has_own or before != _torch_random():
            self._blame()
        return made


@contextmanager
def watched_draws(blame: Callable[[], None]) -> Iterator[None]:
    """Calls back when anything inside draws from the process's random numbers: torch's, numpy's or Python's."""
    before = _host_random()
    with _DrawWatch(blame, private=False):
        yield
    if _host_random() != before:
        blame()


def _torch_random() -> tuple[bytes, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return tuple(state.numpy().tobytes() for state in states)


def _host_random() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]


def fits(first: Trace, second: Trace) -> bool:
    """Whether the same modules were called in the same order."""
    return [(call.name, call.parent) for call in first.calls] == [(call.name, call.parent) for call in second.calls]


def changed(first: Tensor, second: Tensor) -> Tensor | None:
    """Which elements differ by more than rounding; None where the shapes do."""
    if first.shape != second.shape:
        return None
    if not first.is_floating_point():
        return first != second
    size = torch.nan_to_num(first, 0.0, 0.0, 0.0).abs().max() if first.numel() else 0.0
    bound = size * (1e-10 if first.dtype == torch.float64 else 1e-5)
    return ~(((first - second).abs() <= bound) | (first == second) | (first.isnan() & second.isnan()))


def first_differences(first: Trace, second: Trace) -> list[Call]:
    """The innermost modules that got the same in both runs and returned something else.

    Args:
        first: a run.
        second: another one of the same samples.

    Raises:
        AccumulusError: never; runs that took different ways have no such module.
    """
    if not fits(first, second):
        return []
    culprits: list[Call] = []
    for call, other in zip(reversed(first.calls), reversed(second.calls), strict=True):
        same_inputs = _same(call.inputs, other.inputs)
        same_outputs = _same([tensor for _, tensor in call.outputs], [tensor for _, tensor in other.outputs])
        if same_inputs and not same_outputs:
            inside = {inner.index for inner in first.inside(call.index)}
            if not any(found.index in inside for found in culprits):
                culprits.append(call)
    return culprits[::-1]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        mask = changed(one, other)
        if mask is None or bool(mask.any()):
            return False
    return True


def no_trace(work: Callable[[], Any]) -> Any:
    """What an experiment found; None where the user's code cannot be run as it asks, as with odd shapes."""
    try:
        return work()
    except AccumulusError:
        raise
    except Exception:
        return None
