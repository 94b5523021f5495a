"""Notices when gradients or parameters change behind a window's back, in the loss function most likely."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from accumulus.errors import OptimizerError, UnsupportedError, WindowError
from accumulus.together import members
from accumulus.types import Model, Optimizer

__all__ = ["Guard", "StepRefusal"]

ADVICE = (
    "leave backward(), optimizer.step() and zero_grad() to accumulus, and take gradients that you need in the loss "
    "function with torch.autograd.grad()"
)

watching: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()
"""The guards of all windows that are open now, by id: two windows must not add to the same gradient. Not a WeakSet:
no thread may go over one while another thread, with a step of its own, adds to it."""


class StepRefusal:
    """A hook on the optimizer's step that refuses to run while a window is open. Holds its guard weakly."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.ref(guard)

    def __call__(self, *_: Any) -> None:
        """What the optimizer calls before it steps."""
        guard = self._guard()
        if guard is not None and id(guard) in watching:
            raise WindowError(f"optimizer.step() was called inside a window, whose gradient is not whole yet; {ADVICE}")

    def __deepcopy__(self, memo: dict[int, Any]) -> StepRefusal:
        guard = self._guard()
        copied = None if guard is None else memo.get(id(guard))
        return self if copied is None else StepRefusal(copied)


class Watch:
    """One parameter and its gradient, as the last backward pass left them."""

    __slots__ = ("gradient", "parameter", "versions")

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self.versions = (parameter._version, 0)


class Guard:
    """Watches one parameter of each optimizer during a window, and all of them at its start.

    One is enough for what people really do in a loss function: `zero_grad()`, `backward()` and `step()` reach all. It
    costs about a microsecond a micro-batch.

    Args:
        model: whose gradients are dropped, those that the optimizer does not use included.
        optimizer: with the parameters to watch.

    Raises:
        OptimizerError: the optimizer only wraps another one.
        UnsupportedError: a parameter has a hook that runs when its gradient is accumulated.
    """

    def __init__(self, model: Any, optimizer: Optimizer) -> None:
        self._model: Model = model
        self._optimizer = optimizer
        self._model_parameters = tuple(model.parameters())
        # Their forward pass changes them in place: no reason to complain.
        renormed = [m.weight for m in model.modules() if getattr(m, "max_norm", None) and hasattr(m, "weight")]
        self._unwatched = frozenset(renormed)
        self._watches: list[Watch] = []
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(
                    f"{name} has a post-accumulate-grad hook, which would see each micro-batch's part of the gradient, "
                    "scaled; remove it (an optimizer inside the backward pass cannot accumulate)"
                )
        for member in members(optimizer):
            self._refuse_steps_of(member)

    def start(self) -> None:
        """Refuses to begin a window on top of gradients from elsewhere.

        Raises:
            WindowError: a parameter already has a gradient, or another open window will give it one.
        """
        held = {parameter for parameter in self._parameters() if parameter.grad is not None}
        if held:
            names = [name for name, parameter in self._model.named_parameters() if parameter in held]
            example = f" ({names[0]!r} among them)" if names else ""
            raise WindowError(
                f"{len(held)} parameters{example} already have a gradient, from another backward pass, which would be "
                "added to this batch's; call optimizer.zero_grad() first, or return that loss as a term of this one"
            )
        for reference in watching.valuerefs():
            other = reference()
            if other is None or other is self:
                continue
            if not set(self.parameters()).isdisjoint(other.parameters()):
                raise WindowError("another open window shares parameters with this one; step or flush it first")
        self._watches = [Watch(parameter) for parameter in self._choose()]
        watching[id(self)] = self

    def check(self) -> None:
        """Before each backward pass.

        Raises:
            WindowError: gradients or parameters changed since the last one.
        """
        for watch in self._watches:  # in line: it runs in every micro-batch
            gradient = watch.parameter.grad
            if gradient is not watch.gradient or (gradient is not None and gradient._version != watch.versions[1]):
                raise WindowError(f"gradients were changed inside the window; {ADVICE}")
            if watch.parameter._version != watch.versions[0]:
                raise WindowError(f"parameters were changed inside the window; {ADVICE}")

    def note(self) -> None:
        """After each backward pass: what it left is what the next one must find."""
        sees = False
        for watch in self._watches:
            gradient = watch.parameter.grad
            if gradient is not None:
                watch.gradient = gradient
                watch.versions = (watch.parameter._version, gradient._version)
                sees = True
        if not sees:  # they take no part: watch one that does
            other = next((p for p in self._parameters() if p.grad is not None and p not in self._unwatched), None)
            if other is not None:
                self._watches.append(Watch(other))
                self.note()

    def stop(self) -> None:
        """At the window's end: from now on the optimizer may step."""
        watching.pop(id(self), None)

    def discard(self) -> None:
        """Drops all gradients, and forgets what was watched."""
        self._watches = []
        try:
            self._drop()
        except BaseException:  # an interrupt: a gradient that stayed would be in the way of the next step
            self._drop()
            raise

    def _drop(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def discard_own(self) -> None:
        """Drops all gradients if they are still those of the window: a later one's are not ours to drop."""
        if all(watch.parameter.grad is watch.gradient for watch in self._watches):
            self.discard()

    def parameters(self) -> list[Parameter]:
        """All parameters of model and optimizer, once each, in a fixed order: what may hold a gradient."""
        return list(dict.fromkeys(self._parameters()))

    def _parameters(self) -> Iterator[Parameter]:
        yield from self._model_parameters
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _choose(self) -> Iterator[Parameter]:
        """The first parameter of each optimizer that can be watched."""
        for member in members(self._optimizer):
            own = (p for group in member.param_groups for p in group["params"])
            first = next((p for p in own if p.requires_grad and p not in self._unwatched), None)
            if first is not None:
                yield first

    def _refuse_steps_of(self, optimizer: Any) -> None:
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        try:
            handle = optimizer.register_step_pre_hook(StepRefusal(self))
        except AttributeError:  # a wrapper that inherits the method and not what it needs
            kind = type(optimizer).__name__
            raise OptimizerError(f"a {kind} wraps an optimizer; pass the plain one it was made of") from None
        weakref.finalize(self, handle.remove)
