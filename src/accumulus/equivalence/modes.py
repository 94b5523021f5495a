"""What a run of `check` is run under: everything in float64, and draws that can be compared between splits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Draws", "Widened", "is_random"]

NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
NARROWING = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


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


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def is_random(func: Any) -> bool:
    """Whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, random draws do not depend on how many samples go through together, nor on how far they are padded.

    Args:
        by_mean: every draw is the mean of its distribution, so that dropout passes all on; else an element's draw goes
            by its place in all dimensions but the first, and by a number drawn once, which keeps it a draw.
        at: every draw is this quantile of its distribution instead, which leaves noise and dropout something to do.
    """

    def __init__(self, *, by_mean: bool = False, at: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_mean = by_mean
        self._at = 0.5 if by_mean else at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        words = dict(kwargs or {})
        names = _argument_names(func)
        if "dropout_p" in names:  # attention's own kernels; their backward passes take it, too
            words = {name: 0.0 if name == "dropout_p" else value for name, value in words.items()}
            args = tuple(0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=False))
        if not is_random(func):
            return func(*args, **words)
        given = dict(zip(names, args, strict=False)) | words
        handler = HANDLERS.get(func.overloadpacket.__name__)
        if handler is not None:
            return handler(self, func, args, words, given)
        return func(*args, **words)

    def chances(self, like: Tensor) -> Tensor:
        """Numbers between 0 and 1, of the tensor's shape, alike for every index of its first dimension."""
        if self._at is not None:
            return torch.full(like.shape, self._at, dtype=torch.float64, device=like.device)
        total = torch.randint(0, 2**31, (1,) * max(1, like.ndim)).to(like.device)
        for dimension in range(1, like.ndim):
            shape = [1] * like.ndim
            shape[dimension] = like.shape[dimension]
            index = torch.arange(like.shape[dimension], device=like.device).reshape(shape)
            total = _mixed(total + (index + 1) * (2 * dimension + 1) * 1_000_003)
        share: Tensor = (_mixed(total) & (2**52 - 1)).double() / 2**52
        return share.clamp(min=2.0**-52).expand(like.shape if like.ndim else (1,)).reshape(like.shape)

    def fill_(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
        """`uniform_`, `normal_`, `exponential_`."""
        target: Tensor = args[0]
        return target.copy_(SHAPES[func.overloadpacket.__name__](self.chances(target), given))

    def create(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
        """`rand`, `randn`, `randint` and their `_like` forms."""
        made = _made(func, args, words)
        name = func.overloadpacket.__name__.removesuffix("_like")
        return made.copy_(SHAPES[name](self.chances(made), given))

    def bernoulli(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
        """`bernoulli` and `bernoulli_`, with one probability or one for each element."""
        target: Tensor = args[0]
        is_in_place = func.overloadpacket.__name__ == "bernoulli_"
        chance = given.get("p", 0.5 if is_in_place else target)
        made = target if is_in_place else torch.empty_like(target)
        if self._by_mean:
            return made.copy_(chance) if isinstance(chance, Tensor) else made.fill_(chance)
        return made.copy_(self.chances(target) < chance)

    def permute(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
        """`randperm`: backwards, which still exchanges samples."""
        made = _made(func, args, words)
        return made.copy_(torch.arange(len(made) - 1, -1, -1, device=made.device))

    def choose(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
        """`multinomial`, with replacement."""
        made = _made(func, args, words)
        below = given["self"].double().cumsum(-1)
        found: Tensor = made.copy_(torch.searchsorted(below / below[..., -1:], self.chances(made).contiguous()))
        return found

    def dropout(self, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Any:
        """The fused dropout of accelerators."""
        value, chance = args[0], args[1]
        if self._by_mean:
            return value.clone(), torch.ones_like(value, dtype=torch.bool)
        mask = self.chances(value) >= chance
        return (value * mask / (1 - chance)).to(value.dtype), mask


def _count(draws: Draws, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
    """`poisson` and `binomial`."""
    mean = args[0] * args[1] if func.overloadpacket.__name__ == "binomial" else args[0]
    found: Tensor = (2 * mean * draws.chances(args[0])).round().to(args[0].dtype)
    return found


def _positive(draws: Draws, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
    """Gamma and Dirichlet distributions, of which Beta and others are made."""
    value = args[0] * (0.5 + draws.chances(args[0])).to(args[0].dtype)
    made: Tensor = value / value.sum(-1, keepdim=True) if "dirichlet" in func.overloadpacket.__name__ else value
    return made


def _leak(draws: Draws, func: Any, args: Any, words: Any, given: Mapping[str, Any]) -> Tensor:
    """`rrelu`, whose slope below zero is drawn; its backward pass reads the slopes from the second argument."""
    value, noise = args[0], args[1]
    if not given.get("training", False):
        return func(*args, **words)  # type: ignore[no-any-return]
    low, high = given.get("lower", 0.125), given.get("upper", 1 / 3)
    slope = (low + (high - low) * draws.chances(value)).to(value.dtype)
    noise.copy_(torch.where(value <= 0, slope, torch.ones_like(slope)))
    made: Tensor = value * noise
    return value.copy_(made) if func.overloadpacket.__name__.endswith("_") else made


def _made(func: Any, args: Any, words: Any) -> Tensor:
    """A tensor as an operator makes it, of whose numbers none are used up: how many it draws depends on its size."""
    state = torch.get_rng_state()
    made: Tensor = func(*args, **words)
    torch.set_rng_state(state)
    return made


def _mixed(number: Any) -> Any:
    """Integers of which one bit's change changes half of the others. Source: the finaliser of MurmurHash3."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        number = (number ^ ((number >> 33) & (2**31 - 1))) * factor
    return number ^ ((number >> 33) & (2**31 - 1))


def _uniform(chances: Tensor, given: Mapping[str, Any]) -> Tensor:
    low: float = given.get("from", 0.0)
    high: float = given.get("to", 1.0)
    return low + (high - low) * chances


def _normal(chances: Tensor, given: Mapping[str, Any]) -> Tensor:
    return given.get("mean", 0.0) + given.get("std", 1.0) * torch.erfinv(2 * chances - 1) * 2**0.5  # type: ignore[no-any-return]


def _exponential(chances: Tensor, given: Mapping[str, Any]) -> Tensor:
    return -torch.log1p(-chances) / given.get("lambd", 1.0)  # type: ignore[no-any-return]


def _integers(chances: Tensor, given: Mapping[str, Any]) -> Tensor:
    low = given.get("low", 0)
    return (low + (given["high"] - low) * chances).floor()  # type: ignore[no-any-return]


SHAPES: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "rand": _uniform,
    "randn": _normal,
    "randint": _integers,
}

HANDLERS: dict[str, Callable[[Draws, Any, Any, Any, Mapping[str, Any]], Any]] = {
    **dict.fromkeys(("uniform_", "normal_", "exponential_"), Draws.fill_),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"), Draws.create),
    **dict.fromkeys(("bernoulli", "bernoulli_"), Draws.bernoulli),
    "randperm": Draws.permute,
    "multinomial": Draws.choose,
    "native_dropout": Draws.dropout,
    **dict.fromkeys(("poisson", "binomial"), _count),
    **dict.fromkeys(("_standard_gamma", "_sample_dirichlet"), _positive),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_"), _leak),
}
