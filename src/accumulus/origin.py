"""Who made the first non-finite value? One pass, operator by operator, and every NaN and infinity traced to its source.

A value that was made travels through other operators; only what reaches the loss or a gradient is a finding, and then
the operator that made it is named, not those that passed it on. An infinity that someone wrote down, as in an attention
mask, is no finding as long as what it meets takes it in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accumulus.whereabouts import OperatorWatch, Place, is_floating, operator_name, tensors_in

__all__ = ["Origin", "OriginWatch", "trace_origin"]

MADE, HELD, GIVEN, WRITTEN = "made", "held", "given", "written"
"""By an operator from finite numbers; by a parameter; with the batch or a buffer; as a constant. The last two may be
masks."""

WITHOUT_DATA = ("empty", "new_empty")
LARGEST_HALF = 65504.0
"""The largest number of float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a non-finite value comes from.

    Args:
        value: "NaN", "inf" or "-inf".
        source: "made" by an operator from finite numbers, "held" by a parameter, "given" with the batch or a buffer, or
            "written" down as a constant.
        module: path of the module that ran; empty in the loss function.
        operator: its name in torch.
        is_backward: in the backward pass.
        dtype: of the result.
        inputs: each input's dtype, shape and range, in words.
        order: counts the operators of the pass.
        note: what else there is to say.
    """

    value: str
    source: str
    module: str
    operator: str
    is_backward: bool
    dtype: str
    inputs: tuple[str, ...] = ()
    order: int = 0
    note: str = ""

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        if self.source in (HELD, GIVEN):
            return f"{self.value} {self.note}, first met by {self.operator} in {self.where}"
        inputs = f" from {', '.join(self.inputs)}" if self.inputs else ""
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.value} made by {self.where}, {self.operator} in the {direction} pass ({self.dtype}{inputs}){note}"
        )

    @property
    def where(self) -> str:
        """The module in words."""
        return repr(self.module) if self.module else "the loss function"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and the sentence as "text".

        Returns:
            What JSON takes.
        """
        return {**asdict(self), "inputs": list(self.inputs), "text": str(self)}


@dataclass(frozen=True, slots=True)
class State:
    """What is non-finite about a tensor."""

    has_nan: bool
    has_inf: bool

    @property
    def is_finite(self) -> bool:
        """Nothing is."""
        return not (self.has_nan or self.has_inf)


class OriginWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Follows non-finite values through one forward and backward pass, while it is entered.

    Args:
        model: whose modules are told apart.

    Cost:
        One test for finiteness an operator, for which the host waits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._origins: dict[int, Origin] = {}  # by where the data lies
        self._earliest_made: Origin | None = None
        self._num_operators = 0
        self.infinities: list[Origin] = []
        """Infinities that were made from finite numbers in the forward pass, one a module and operator. What
        comes after may hide them: a softmax takes -inf for a mask, 1 / inf is 0."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_floating(tensor) and not (state := state_of(tensor)).is_finite:
                owner, _, own = name.rpartition(".")
                found = self._given(state, f"was in the model's {name!r}", Place(owner, False), own, tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                self._mark(tensor, replace(found, source=HELD) if is_parameter else found)

    def origin_of(self, tree: Any) -> Origin | None:
        """The earliest origin of what is non-finite in a tree; None where all is finite.

        Args:
            tree: tensors that the pass has computed.
        """
        found = []
        for tensor in tensors_in(tree):
            tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
            if is_floating(tensor) and not (state := state_of(tensor)).is_finite:
                known = self._origins.get(address(tensor)) or self._earliest_made
                found.append(known or self._given(state, "came with the batch", Place("", False), "nothing", tensor))
        return min(found, key=lambda origin: origin.order, default=None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if is_floating(tensor)]
        writes = func._schema.is_mutable
        before = [state_of(tensor) for tensor in inputs] if writes else None
        shown = tuple(map(describe_range, inputs)) if writes else None  # its inputs are about to be overwritten
        result = func(*args, **kwargs)
        self._num_operators += 1
        name = operator_name(func)
        if name.startswith(WITHOUT_DATA):
            return result
        known = {address(tensor) for tensor in inputs}
        for output in tensors_in(result):
            if not is_floating(output) or (address(output) in known and not writes):
                continue  # a view of what is known
            state = state_of(output)
            if state.is_finite:
                # What writes to a part of a tensor leaves the blame for the rest. A new tensor at an old one's address
                # gets an entry of its own, or none.
                if not writes or covers_its_data(output):
                    self._origins.pop(address(output), None)
                continue
            states = before if before is not None else [state_of(tensor) for tensor in inputs]
            call = Call(name, inputs, states, shown, numbers_in((args, kwargs)))
            self._mark(output, self._trace(call, state, output))
        return result

    def _trace(self, call: Call, state: State, output: Tensor) -> Origin:
        """Where a non-finite output comes from: an input's origin, or this very operator."""
        sources = [
            self._origin_of_input(call, tensor, was)
            for tensor, was in zip(call.inputs, call.states, strict=True)
            if not was.is_finite
        ]
        made = [origin for origin in sources if origin.source in (MADE, HELD)]
        if made:
            return min(made, key=lambda origin: origin.order)
        nan_came_in = any(was.has_nan for was in call.states)
        if sources and (nan_came_in or not state.has_nan):
            return sources[0]
        is_written = not state.has_nan and (not call.inputs or any(map(math.isinf, call.numbers)))
        note = ""
        if state.has_nan and sources:
            note = f"an input was {sources[0].value}, as a mask writes it"
            if call.name in ("softmax", "log_softmax"):
                note += ": a row in which everything is masked; leave one position open, or mask with a finite number"
        elif any(map(math.isnan, call.numbers)):
            note = "a constant of it is NaN"
        elif not self.whereabouts.here.is_backward and (low := lowest(call)) is not None:
            note = f"{low:.3g} is no number of {short(output.dtype)}: use torch.finfo(x.dtype).min in a mask"
        here = self.whereabouts.here
        found = Origin(
            value=value_of(output, state),
            source=WRITTEN if is_written else MADE,
            module=here.module,
            operator=call.name,
            is_backward=here.is_backward,
            dtype=short(output.dtype),
            inputs=(
                *(call.shown if call.shown is not None else map(describe_range, call.inputs)),
                *(f"{number:.4g}" for number in call.numbers),
            ),
            order=self._num_operators,
            note=note,
        )
        if not is_written:
            self._note_made(found)
        return found

    def _note_made(self, found: Origin) -> None:
        self._earliest_made = self._earliest_made or found
        known = {(origin.module, origin.operator) for origin in self.infinities}
        if found.value != "NaN" and not found.is_backward and (found.module, found.operator) not in known:
            self.infinities.append(found)

    def _origin_of_input(self, call: Call, tensor: Tensor, state: State) -> Origin:
        known = self._origins.get(address(tensor))
        if known is None:
            known = self._given(state, "came with the batch", self.whereabouts.here, call.name, tensor)
            self._mark(tensor, known)
        return known

    def _given(self, state: State, note: str, place: Place, operator: str, tensor: Tensor) -> Origin:
        return Origin(
            value=value_of(tensor, state),
            source=GIVEN,
            module=place.module,
            operator=operator,
            is_backward=place.is_backward,
            dtype=short(tensor.dtype),
            order=self._num_operators,
            note=note,
        )

    def _mark(self, tensor: Tensor, origin: Origin) -> None:
        self._origins[address(tensor)] = origin


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's call: its name, its floating-point inputs and what was non-finite about them, its plain numbers."""

    name: str
    inputs: Sequence[Tensor]
    states: Sequence[State]
    shown: tuple[str, ...] | None
    numbers: Sequence[float]


def trace_origin(
    model: nn.Module,
    run: Callable[[Callable[[Any], None]], object],
    gradients: Callable[[], Iterable[Tensor]],
) -> Origin | None:
    """Runs a window under an `OriginWatch`.

    Args:
        model: whose modules are told apart.
        run: `run(look)` runs forward and backward passes, and calls `look` with what each loss function returned
            before its backward pass.
        gradients: those that the window left, read before they are dropped.

    Returns:
        The origin of the first non-finite loss, or else of the earliest non-finite gradient; None where all are finite.

    Cost:
        A window that is slower by the watch.
    """
    found: list[Origin | None] = []

    def look(returned: Any) -> None:
        watch.whereabouts.note(returned)
        found.append(watch.origin_of(returned))

    with OriginWatch(model) as watch:
        run(look)
    of_loss = [origin for origin in found if origin is not None]
    return of_loss[0] if of_loss else watch.origin_of(list(gradients()))


@torch.no_grad()
def state_of(tensor: Tensor) -> State:
    """What is non-finite about a tensor. Waits for the device."""
    tensor = tensor.detach()
    if bool(torch.isfinite(tensor).all()):
        return State(False, False)
    return State(bool(torch.isnan(tensor).any()), bool(torch.isinf(tensor).any()))


def value_of(tensor: Tensor, state: State) -> str:
    """A non-finite tensor's worst value."""
    if state.has_nan:
        return "NaN"
    return "inf" if bool((tensor.detach() == math.inf).any()) else "-inf"


def covers_its_data(tensor: Tensor) -> bool:
    """Whether a tensor is no view of a part of another."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def address(tensor: Tensor) -> int:
    """Where a tensor's data lies."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


@torch.no_grad()
def describe_range(tensor: Tensor) -> str:
    """A tensor's dtype, shape and range in words."""
    finite = tensor.detach()[torch.isfinite(tensor)]
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    if finite.numel() == 0:
        return f"{short(tensor.dtype)} {shape} without a finite number"
    low, high = float(finite.min()), float(finite.max())
    return f"{short(tensor.dtype)} {shape} in [{low:.3g}, {high:.3g}]"


def lowest(call: Call) -> float | None:
    """The number near the end of float32 that went into a cast or a sum, which a narrower dtype cannot hold."""
    if call.name not in ("to_copy", "add", "sub", "mul", "copy", "where", "masked_fill"):
        return None
    ends = [tensor.detach().float().aminmax() for tensor in call.inputs if is_floating(tensor) and tensor.numel()]
    lows = [float(low) for low, high in ends if float(high) <= LARGEST_HALF]  # large both ways it is no mask
    lows = [low for low in lows if math.isfinite(low) and low < -LARGEST_HALF]
    return min(lows, default=None)


def numbers_in(tree: Any) -> list[float]:
    """Plain numbers among an operator's arguments."""
    if isinstance(tree, float):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [number for child in children for number in numbers_in(child)]


def short(dtype: torch.dtype) -> str:
    """A dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
