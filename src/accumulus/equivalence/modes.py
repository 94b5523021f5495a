"""What a run of `check` is run under: everything in float64, and draws that can be compared between splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Draws", "Widened", "is_random"]

NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
NARROWING = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})

MEANS = {"bernoulli_": 0.5, "uniform_": 0.5, "normal_": 0.0, "exponential_": 1.0, "rand": 0.5, "randn": 0.0}


class Widened(TorchFunctionMode):
    """Inside, a cast to a narrower floating dtype gives float64: so `logits.float()` rounds nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        words = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func in NARROWING:
            return Tensor.double(*args, **words)
        if any(isinstance(value, torch.dtype) for value in args):
            args = tuple(_wide(value) for value in args)
        return func(*args, **words)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def is_random(func: Any) -> bool:
    """Whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, random draws do not depend on how many samples go through together.

    Args:
        by_mean: every draw is the mean of its distribution, so that dropout passes all on; else the first row of each
            draw serves for all rows, which keeps it a draw.
    """

    def __init__(self, *, by_mean: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_mean = by_mean

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        words = dict(kwargs or {})
        if not is_random(func):
            return func(*args, **words)
        words.pop("generator", None)  # a private one goes on from draw to draw
        args = tuple(None if isinstance(value, torch.Generator) else value for value in args)
        name = func.overloadpacket.__name__
        handler = HANDLERS.get(name)
        if handler is not None:
            return handler(self, func, args, words)
        if "dropout_p" in {argument.name for argument in func._schema.arguments}:
            return func(*_without_dropout(func, args), **{k: v for k, v in words.items() if k != "dropout_p"})
        made = func(*args, **words)
        return self._share(made) if isinstance(made, Tensor) and made.ndim and made.is_floating_point() else made

    def _share(self, made: Tensor) -> Tensor:
        return made.copy_(made[:1].expand_as(made)) if made.numel() else made

    def fill_(self, func: Any, args: Any, words: Any) -> Tensor:
        """`uniform_`, `normal_`, `exponential_` and the like."""
        target = args[0]
        if not target.ndim or not target.numel():
            return func(*args, **words)  # type: ignore[no-any-return]
        if self._by_mean:
            return target.fill_(_mean_of(func, args, words))  # type: ignore[no-any-return]
        row = target.new_empty((1, *target.shape[1:]))
        return target.copy_(func(row, *args[1:], **words).expand_as(target))  # type: ignore[no-any-return]

    def bernoulli(self, func: Any, args: Any, words: Any) -> Tensor:
        """`bernoulli` and `bernoulli_`, with one probability or one for each element."""
        target = args[0]
        in_place = func.overloadpacket.__name__ == "bernoulli_"
        chance = args[1] if len(args) > 1 else words.get("p", 0.5 if in_place else target)
        if self._by_mean:
            value = target.new_empty(target.shape).copy_(chance) if isinstance(chance, Tensor) else chance
        else:
            row = torch.rand((1, *target.shape[1:]), dtype=torch.float64, device=target.device)
            value = (row < chance).to(target.dtype).expand_as(target)
        made = target if in_place else torch.empty_like(target)
        return made.copy_(value) if isinstance(value, Tensor) else made.fill_(value)

    def create(self, func: Any, args: Any, words: Any) -> Tensor:
        """`rand`, `randn`, `randint` and their `_like` forms."""
        made: Tensor = func(*args, **words)
        if not made.ndim or not made.numel():
            return made
        base = func.overloadpacket.__name__.removesuffix("_like")
        if self._by_mean and base in MEANS:
            return made.fill_(MEANS[base])
        if self._by_mean:
            return made.copy_(made.new_full((1,), int(made.min())).expand_as(made))
        row = made.new_empty((1, *made.shape[1:]))
        if base == "randint":
            return made.copy_(row.random_(0, max(1, int(made.max()) + 1)).expand_as(made))
        return made.copy_((row.uniform_() if base == "rand" else row.normal_()).expand_as(made))

    def permute(self, func: Any, args: Any, words: Any) -> Tensor:
        """`randperm`: backwards, which still exchanges samples."""
        made: Tensor = func(*args, **words)
        return made.copy_(torch.arange(len(made) - 1, -1, -1, device=made.device))

    def dropout(self, func: Any, args: Any, words: Any) -> Any:
        """The fused dropout of accelerators."""
        value, chance = args[0], args[1]
        mask = torch.ones_like(value, dtype=torch.bool)
        if not self._by_mean:
            row = torch.rand((1, *value.shape[1:]), dtype=torch.float32, device=value.device)
            mask = (row >= chance).expand_as(value).contiguous()
            return value * mask / (1 - chance), mask
        return value * (1 - chance) / (1 - chance), mask


def _mean_of(func: Any, args: Any, words: Any) -> float:
    name = func.overloadpacket.__name__
    if name == "uniform_":
        low, high = args[1] if len(args) > 1 else words.get("from", 0.0), args[2] if len(args) > 2 else 1.0
        return float(low + words.get("to", high)) / 2
    if name == "normal_":
        return float(args[1] if len(args) > 1 else words.get("mean", 0.0))
    return MEANS.get(name, 0.0)


def _without_dropout(func: Any, args: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    return tuple(0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=False))


HANDLERS: dict[str, Callable[[Draws, Any, Any, Any], Any]] = {
    **dict.fromkeys(("uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_"), Draws.fill_),
    **dict.fromkeys(("bernoulli", "bernoulli_"), Draws.bernoulli),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"), Draws.create),
    "randperm": Draws.permute,
    "native_dropout": Draws.dropout,
}
