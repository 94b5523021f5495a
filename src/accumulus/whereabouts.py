"""Where an operator runs: in which module, forward or backward. For looking at one pass closely, never for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorWatch", "Place", "Whereabouts", "is_floating", "operator_name", "tensors_in"]


@dataclass(frozen=True, slots=True)
class Place:
    """A module's path, and the pass that runs.

    Args:
        module: as in `named_modules`; empty outside of the model, in the loss function.
        is_backward: in the backward pass of what this module did.
    """

    module: str
    is_backward: bool

    def __str__(self) -> str:
        return self.module or "the loss function"


class Whereabouts:
    """Follows a model's forward and backward passes, between `install` and `remove`.

    Every node of the autograd graph gets a note of the module that made it: a child's nodes are noted when it returns,
    before its parent's. `note` does that for what was computed outside of the model.

    Args:
        model: whose modules are told apart.

    Cost:
        Two hooks a module, and one on every node of the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._forward: list[str] = []
        self._backward: str | None = None
        self.on_leave: Callable[[str, Any], None] | None = None  # hears of each module's output
        self._key = f"accumulus whereabouts {id(self)}"

    @property
    def here(self) -> Place:
        """Where an operator that runs now belongs to."""
        if self._forward:  # also in a backward pass that runs a checkpointed block again
            return Place(self._forward[-1], False)
        return Place("", False) if self._backward is None else Place(self._backward, True)

    def install(self) -> None:
        """Puts the hooks on the modules."""
        for name, module in self._model.named_modules():
            # The model's own path is empty, as in named_modules; its class says more.
            path = name or type(module).__name__
            before = module.register_forward_pre_hook(lambda *_, path=path: self._forward.append(path))
            after = module.register_forward_hook(
                lambda _module, _inputs, output, path=path: self._leave(path, output), always_call=True
            )
            self._handles += [before, after]

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forward.clear()

    def note(self, tree: Any, path: str = "") -> None:
        """Notes what made the tensors of a tree, as far back as nobody has.

        Args:
            tree: what was computed.
            path: the module that did; empty for the loss function.
        """
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(tree) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if self._key in node.metadata or type(node).__name__ == "AccumulateGrad":
                continue
            node.metadata[self._key] = path
            node.register_prehook(lambda _, path=path: self._enter_backward(path))
            nodes += [parent for parent, _ in node.next_functions if parent is not None]

    def _leave(self, path: str, output: Any) -> None:
        if path in self._forward:  # an error on the way may have left deeper ones behind
            last = len(self._forward) - 1 - self._forward[::-1].index(path)
            del self._forward[last:]
        self.note(output, path)
        if self.on_leave is not None:
            self.on_leave(path, output)

    def _enter_backward(self, path: str) -> None:
        # What runs between two nodes, sums of gradients that meet, counts to the one before.
        self._backward = path


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a forward and backward pass, with where it runs. Subclasses say what to look for.

    Args:
        model: whose modules are told apart.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whereabouts = Whereabouts(model)

    def __enter__(self) -> Any:
        self.whereabouts.install()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self.whereabouts.remove()


def operator_name(func: Any) -> str:
    """An operator's short name: "mm" for aten::mm, "softmax" for aten::_softmax."""
    name: str = func._schema.name
    return name.rpartition("::")[2].strip("_")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, sequences and dataclasses; other objects hold none.

    Args:
        tree: arguments or results.

    Yields:
        Tensors.
    """
    if isinstance(tree, Tensor):
        yield tree
        return
    children: Iterable[Any] = ()
    if isinstance(tree, Mapping):
        children = tree.values()
    elif isinstance(tree, (list, tuple)):
        children = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    for child in children:
        yield from tensors_in(child)


def is_floating(value: Any) -> bool:
    """Whether a value is a dense tensor of real floating-point numbers that has data."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
    )
