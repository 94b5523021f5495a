"""Notices when gradients or parameters change behind a window's back, in the loss function most likely."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from accumulus.errors import OptimizerError, UnsupportedError, WindowError
from accumulus.types import Model, Optimizer

__all__ = ["Guard", "StepRefusal"]

ADVICE = (
    "leave backward(), optimizer.step() and zero_grad() to accumulus, and take gradients that you need in the loss "
    "function with torch.autograd.grad()"
)


class StepRefusal:
    """A hook on the optimizer's step that refuses to run while a window is open. Holds its guard weakly."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.ref(guard)

    def __call__(self, *_: Any) -> None:
        """What the optimizer calls before it steps."""
        guard = self._guard()
        if guard is not None and guard.is_watching:
            raise WindowError(f"optimizer.step() was called inside a window, whose gradient is not whole yet; {ADVICE}")


class Guard:
    """Watches one parameter during a window, and all of them at its start.

    One is enough for what people really do in a loss function: `zero_grad()`, `backward()` and `step()` reach all. It
    costs half a microsecond a micro-batch.

    Args:
        model: whose gradients are dropped, those that the optimizer does not use included.
        optimizer: with the parameters to watch.

    Raises:
        UnsupportedError: a parameter has a hook that runs when its gradient is accumulated.
    """

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._model_parameters = tuple(model.parameters())
        self._watched: Parameter | None = None
        self._versions = (0, 0)
        self._gradient: Tensor | None = None
        self.is_watching = False
        if hasattr(optimizer, "register_step_pre_hook"):
            try:
                optimizer.register_step_pre_hook(StepRefusal(self))
            except AttributeError:  # a wrapper that inherits the method and not what it needs
                kind = type(optimizer).__name__
                raise OptimizerError(f"a {kind} wraps an optimizer; pass the plain one it was made of") from None
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(
                    f"{name} has a post-accumulate-grad hook, which would see each micro-batch's part of the gradient, "
                    "scaled; remove it (an optimizer inside the backward pass cannot accumulate)"
                )

    def start(self) -> None:
        """Refuses to begin a window on top of gradients from elsewhere.

        Raises:
            WindowError: a parameter already has a gradient.
        """
        held = {parameter for parameter in self._parameters() if parameter.grad is not None}
        if held:
            names = [name for name, parameter in self._model.named_parameters() if parameter in held]
            example = f" ({names[0]!r} among them)" if names else ""
            raise WindowError(
                f"{len(held)} parameters{example} already have a gradient, from another backward pass, which would be "
                "added to this batch's; call optimizer.zero_grad() first, or return that loss as a term of this one"
            )
        self.is_watching = True
        self._gradient = None
        self._watched = next((p for g in self._optimizer.param_groups for p in g["params"] if p.requires_grad), None)
        if self._watched is not None:
            self._versions = (self._watched._version, 0)

    def check(self) -> None:
        """Before each backward pass.

        Raises:
            WindowError: gradients or parameters changed since the last one.
        """
        watched = self._watched
        if watched is None:
            return
        gradient = watched.grad
        if gradient is not self._gradient or (gradient is not None and gradient._version != self._versions[1]):
            raise WindowError(f"gradients were changed inside the window; {ADVICE}")
        if watched._version != self._versions[0]:
            raise WindowError(f"parameters were changed inside the window; {ADVICE}")

    def note(self) -> None:
        """After each backward pass: what it left is what the next one must find."""
        if self._gradient is None and (self._watched is None or self._watched.grad is None):
            self._watched = next((p for p in self._parameters() if p.grad is not None), self._watched)
        watched = self._watched
        if watched is not None and watched.grad is not None:
            self._gradient = watched.grad
            self._versions = (watched._version, watched.grad._version)

    def stop(self) -> None:
        """At the window's end: from now on the optimizer may step."""
        self.is_watching = False

    def discard(self) -> None:
        """Drops all gradients, and forgets what was watched."""
        self._gradient = None
        for parameter in self._parameters():
            parameter.grad = None

    def parameters(self) -> list[Parameter]:
        """All parameters of model and optimizer, once each, in a fixed order: what may hold a gradient."""
        return list(dict.fromkeys(self._parameters()))

    def _parameters(self) -> Iterator[Parameter]:
        yield from self._model_parameters
        for group in self._optimizer.param_groups:
            yield from group["params"]
