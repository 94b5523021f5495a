"""`RangeWatch`: counts the magnitudes of everything that flows through a model, on the device, until it is removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accumulus.errors import UnsupportedError
from accumulus.numerics.formats import FORMATS
from accumulus.numerics.histogram import NUM_BUCKETS, Histogram, buckets_of
from accumulus.together import members
from accumulus.whereabouts import is_floating, tensors_in

__all__ = ["KINDS", "RangeRow", "RangeWatch"]

KINDS = ("activation", "activation gradient", "weight", "weight gradient", "update")

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Their output is their last child's."""

FLUSH_AT = 2**24
"""Sampled numbers that may wait to be counted."""

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeRow:
    """The magnitudes of one kind of number in one module.

    Args:
        kind: one of `KINDS`.
        name: path of the module, or of the parameter.
        dtype: in which they were met first.
        histogram: how many there are of each magnitude.
        num_still: of an update: changed weights that bf16, and fp16, would round back to where they were.
    """

    kind: str
    name: str
    dtype: torch.dtype
    histogram: Histogram
    num_still: tuple[int, int] = (0, 0)

    def still_ratio(self, dtype: torch.dtype) -> float:
        """Share of the changed weights that would not move if weights were held in a 16-bit dtype."""
        return self.num_still[NARROW.index(dtype)] / max(self.histogram.num_nonzero, 1)

    def shares(self, loss_scale: float) -> dict[str, dict[str, float]]:
        """What each format does to the numbers: shares of the nonzero ones.

        Args:
            loss_scale: applied to gradients.

        Returns:
            Format to "zeroed", "subnormal", "overflow"; of gradients "fp16 scaled" is with the scale.
        """
        forms = [(form.name, form, 1.0) for form in FORMATS]
        if self.kind.endswith("gradient"):
            forms += [(f"{form.name} scaled", form, loss_scale) for form in FORMATS]
        return {
            name: {
                "zeroed": self.histogram.zeroed_ratio(form, scale),
                "subnormal": self.histogram.subnormal_ratio(form, scale),
                "overflow": self.histogram.overflow_ratio(form, scale),
            }
            for name, form, scale in forms
        }

    def to_dict(self, loss_scale: float) -> dict[str, Any]:
        """Plain values, as JSON takes them.

        Args:
            loss_scale: for the shares of gradients.
        """
        histogram = self.histogram
        result: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "largest": histogram.largest if math.isfinite(histogram.largest) else str(histogram.largest),
            "median": histogram.quantile(0.5),
            "num_counted": histogram.num_counted,
            "num_zero": histogram.num_zero,
            "num_nonfinite": histogram.num_nonfinite,
            "exponents": {str(power): count for power, count in histogram.exponents().items()},
            "shares": self.shares(loss_scale),
        }
        if self.kind == "update":
            result["still_in_bf16"], result["still_in_fp16"] = (self.still_ratio(dtype) for dtype in NARROW)
        return result


class RangeWatch:
    """Counts activations, weights, their gradients and updates by magnitude, per module. A handle: `remove` ends it.

    Numbers are counted as they are met: gradients under a loss scale with that scale, and rounded where they flow in
    16 bits. `diagnose` therefore watches a copy in float32.

    Args:
        model: what to watch.
        optimizer: whose steps to watch, for updates; None for none. A fused optimizer with hooks on its step is driven
            as any other while the watch is on: unscaling and clipping take a pass of their own.
        sample: how many numbers of a tensor are counted at most, evenly spread over it. Its largest is of all.
        every: watch each so many forward passes (with their backward) and optimizer steps.

    Raises:
        UnsupportedError: the optimizer has no hooks on its step.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> with RangeWatch(model) as watch:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> [(row.kind, row.name) for row in watch.rows()][:2]
        [('activation', 'Linear'), ('activation gradient', 'Linear')]

    Cost:
        While on, one pass over every tensor for its largest, a copy of the sample, and one count for all; measured in
        benchmarks/doctor.py. 16 KiB on the device for each row. The host waits for the
        device in `rows`, and once in 16 million counted numbers. After
        `remove` nothing is left behind.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *, sample: int = 2**13, every: int = 1) -> None:
        self._limit, self._every = sample, every
        self._rows: dict[tuple[str, str], int] = {}
        self._dtypes: list[torch.dtype] = []
        self._waiting: list[tuple[int, Tensor]] = []
        self._num_waiting = 0
        self._extremes: list[tuple[int, Tensor, Tensor]] = []
        self._counts: Tensor | None = None
        self._largest: Any = np.zeros(0)
        self._still: dict[int, Tensor] = {}
        self._num_forwards = self._num_steps = 0
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._before: list[tuple[Any, Tensor]] = []
        self._handles: list[Any] = []
        self._install(model)
        for member in () if optimizer is None else members(optimizer):
            if not hasattr(member, "register_step_post_hook"):
                self.remove()
                raise UnsupportedError(f"{type(member).__name__} has no hooks on its step; leave the optimizer out")
            self._handles.append(member.register_step_pre_hook(self._before_step))
            self._handles.append(member.register_step_post_hook(self._after_step))

    def __enter__(self) -> RangeWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Takes every hook off. What was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()

    def rows(self) -> list[RangeRow]:
        """What has been counted until now.

        Returns:
            Rows in the order in which they were met.

        Cost:
            Waits for the device.
        """
        self._flush()
        if self._counts is None:
            return []
        counts = self._counts.cpu().numpy().astype(np.int64)
        still = {row: tuple(int(number) for number in numbers.tolist()) for row, numbers in self._still.items()}
        return [
            RangeRow(
                kind=kind,
                name=name,
                dtype=self._dtypes[row],
                histogram=Histogram(counts=counts[row], largest=float(self._largest[row])),
                num_still=still.get(row, (0, 0)),  # type: ignore[arg-type]
            )
            for (kind, name), row in self._rows.items()
        ]

    def _install(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(self._start_forward))
        for name, module in model.named_modules():
            if isinstance(module, CONTAINERS):
                continue
            path = name or type(module).__name__
            self._handles.append(
                module.register_forward_hook(lambda _module, _inputs, out, path=path: self._see_output(path, out))
            )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(
                    hook(parameter, lambda gradient, name=name: self._see("weight gradient", name, gradient))
                )

    @property
    def _is_on(self) -> bool:
        return (self._num_forwards - 1) % self._every == 0

    def _start_forward(self, *_: Any) -> None:
        self._num_forwards += 1

    def _see_output(self, path: str, output: Any) -> None:
        if not self._is_on:
            return
        for tensor in tensors_in(output):
            if is_floating(tensor):
                self._see("activation", path, tensor)
                if tensor.requires_grad:
                    hook(tensor, lambda gradient: self._see("activation gradient", path, gradient))

    @torch.no_grad()
    def _see(self, kind: str, name: str, tensor: Tensor) -> None:
        if not self._handles or not self._is_on or not is_floating(tensor):
            return  # hooks on a graph outlive the watch that put them there
        row = self._row(kind, name, tensor.dtype)
        tensor = tensor.detach()
        low, high = tensor.aminmax()
        self._extremes.append((row, low, high))
        self._wait(row, sampled(tensor, self._limit))

    def _row(self, kind: str, name: str, dtype: torch.dtype) -> int:
        if (kind, name) not in self._rows:
            self._rows[kind, name] = len(self._rows)
            self._dtypes.append(dtype)
        return self._rows[kind, name]

    def _wait(self, row: int, values: Tensor) -> None:
        # A copy: what the tensor holds may be overwritten before it is counted.
        self._waiting.append((row, values.to(torch.float32, copy=True)))
        self._num_waiting += values.numel()
        if self._num_waiting >= FLUSH_AT:
            self._flush()

    @torch.no_grad()
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._num_steps += 1
        if (self._num_steps - 1) % self._every:
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._before += [(p, sampled(p.detach(), self._limit).to(torch.float32, copy=True)) for p in held]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for parameter, before in self._before:
            name = self._names.get(parameter, "a parameter of the optimizer")
            change = sampled(parameter.detach(), self._limit).to(torch.float32) - before
            self._extremes.append((self._row("weight", name, parameter.dtype), *parameter.detach().aminmax()))
            self._wait(self._row("weight", name, parameter.dtype), before)
            row = self._row("update", name, parameter.dtype)
            self._extremes.append((row, *change.aminmax()))
            self._wait(row, change)
            still = torch.stack([stands_still(before, change, dtype) for dtype in NARROW])
            self._still[row] = still + self._still[row] if row in self._still else still
        self._before.clear()

    @torch.no_grad()
    def _flush(self) -> None:
        """Counts what waits: one shift, one count for all rows."""
        if not self._waiting:
            return
        device, num_rows = self._waiting[0][1].device, len(self._rows)
        rows = torch.tensor([row for row, _ in self._waiting]).to(device, non_blocking=True)
        lengths = torch.tensor([values.numel() for _, values in self._waiting]).to(device, non_blocking=True)
        buckets = buckets_of(torch.cat([values.to(device) for _, values in self._waiting]))
        where = torch.repeat_interleave(rows * NUM_BUCKETS, lengths, output_size=self._num_waiting) + buckets
        counts = torch.bincount(where, minlength=num_rows * NUM_BUCKETS).view(num_rows, NUM_BUCKETS).int()
        if self._counts is not None:
            counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._take_largest(num_rows)
        self._waiting, self._extremes, self._num_waiting = [], [], 0

    def _take_largest(self, num_rows: int) -> None:
        """The one wait for the device: the largest of every tensor, in one copy."""
        ends = [torch.stack((low, high)).to(torch.float64) for _, low, high in self._extremes]
        magnitudes = np.abs(torch.stack([pair.to(ends[0].device) for pair in ends]).cpu().numpy()).max(axis=1)
        self._largest = np.append(self._largest, np.zeros(num_rows - len(self._largest)))
        with np.errstate(invalid="ignore"):  # NaN is an answer here
            np.maximum.at(self._largest, [row for row, _, _ in self._extremes], magnitudes)


def hook(tensor: Tensor, function: Any) -> Any:
    """Calls a function with the tensor's gradient."""
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


def sampled(tensor: Tensor, limit: int) -> Tensor:
    """At most so many numbers of a tensor, evenly spread. The stride shares no factor with any dimension.

    Args:
        tensor: any shape.
        limit: how many.

    Returns:
        A flat view, or a copy where the tensor is not contiguous.
    """
    flat, size = tensor.reshape(-1), tensor.numel()
    if size <= limit:
        return flat
    stride = -(-size // limit)
    while math.gcd(stride, size) != 1:
        stride += 1
    return flat[::stride]


def stands_still(weights: Tensor, changes: Tensor, dtype: torch.dtype) -> Tensor:
    """How many changes would round to nothing if the weights were held in a narrow dtype.

    Args:
        weights: before the change, float32.
        changes: of the same shape.
        dtype: the narrow one.

    Returns:
        A number, as a tensor without dimensions.
    """
    held = weights.to(dtype)
    return ((held.float() + changes).to(dtype) == held).logical_and(changes != 0).sum()


def rows_of(rows: Sequence[RangeRow], kind: str) -> list[RangeRow]:
    """The rows of one kind."""
    return [row for row in rows if row.kind == kind]
