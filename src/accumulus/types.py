"""What goes into a step and what comes out: `Loss`, `StepResult`, and the protocols of the parts a user brings."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import LossError, WeightError
from accumulus.host import Scalar

Batch: TypeAlias = Any
"""Any pytree whose tensors share their first dimension; with `collate`, a list of samples."""

Weight: TypeAlias = "int | float | Tensor"
"""A number of loss elements: a number, or a one-element tensor that has not left its accelerator."""

# torch's own names for what has 16 bits.
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
LARGEST_WEIGHT = 1e30


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one micro-batch: a sum and its weight, as the loss is; or a value for each sample.

    Args:
        value: the sum, a number or a one-element tensor. With `per_sample`, a tensor whose first dimension is the
            micro-batch's samples; it needs no graph.
        weight: how many elements `value` is a sum over.
        per_sample: give back one tensor over all samples, in the batch's own order, however the batch was cut. Every
            micro-batch must then bring it, with the same further dimensions. float16 and bfloat16 become float32.

    Raises:
        LossError: `per_sample`, and `value` is no tensor with a first dimension, or a weight was given.

    Example:
        >>> Metric(torch.tensor([0.5, 2.0]), per_sample=True).value.shape
        torch.Size([2])
    """

    value: Any
    weight: Any = 1
    per_sample: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.per_sample:
            return
        if not isinstance(self.value, Tensor) or not self.value.ndim:
            raise LossError(f"a metric per sample is a tensor with an entry for each, not {describe(self.value)}")
        if type(self.weight) is not int or self.weight != 1:
            raise LossError("a metric per sample is not averaged, so it takes no weight; divide its values, if need be")


Metrics: TypeAlias = "Mapping[str, Metric | tuple[Any, Any]]"
"""Name to `Metric`, or to `(sum, weight)` for short."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum over loss elements and how many elements it is a sum of.

    Sums travel, and the one division happens at the end of the window, so the result does not depend on how
    the batch was cut.

    Args:
        sum: one-element tensor with a graph: the loss summed over the elements, in any floating dtype.
        weight: how many elements (tokens, samples, pairs) `sum` runs over: a number, or a one-element tensor on
            any device. Zero is allowed and then contributes nothing. A tensor on the CPU is read at once; one
            on an accelerator stays there, so that the host does not wait for it: with weight zero the sum must then
            be a finite zero, as `reduction="sum"` gives it (for a mean over nothing there is `Loss.mean`).
        metrics: name to `(sum, weight)`, combined over micro-batches as the loss is; or to a `Metric`, which may hold
            a value for each sample. None of them needs a graph.

    Raises:
        LossError: `sum` is not a one-element tensor.
        WeightError: `weight` is negative, NaN, infinite, not a scalar, or a 16-bit tensor (float16 cannot count
            beyond 2,048).

    Example:
        >>> logits, labels = torch.randn(6, 10, requires_grad=True), torch.tensor([1, 2, 3, -100, 4, -100])
        >>> loss_sum = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> Loss(loss_sum, (labels != -100).sum()).weight
        4
    """

    sum: Tensor
    weight: Weight
    metrics: Metrics | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sum, Tensor) or self.sum.numel() != 1 or not self.sum.is_floating_point():
            raise LossError(f"a loss sum must be one real floating number, not {describe(self.sum)}; use .sum()")
        if type(self.weight) is not int or self.weight < 0:
            object.__setattr__(self, "weight", read_weight(self.weight))

    @classmethod
    def mean(cls, value: Tensor, weight: Weight, metrics: Metrics | None = None) -> Loss:
        """A mean that the model already took over `weight` elements.

        Args:
            value: one-element tensor with a graph: the mean. It may be NaN where `weight` is zero (a mean over
                nothing), and then contributes nothing.
            weight: the number of elements the model divided by.
            metrics: as for `Loss`.

        Returns:
            The `Loss` whose sum is `value * weight`, taken in float32 at least.

        Raises:
            LossError: `value` is not a one-element tensor.
            WeightError: as for `Loss`.

        Cost:
            A weight on an accelerator is read by the host, which waits for it: whether it is zero decides
            whether a backward pass may run at all. `Loss(sum, weight)` never waits.
        """
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise LossError(f"a mean loss must be one real floating number, not {describe(value)}; use .mean()")
        weight = read_weight(weight, wait=True)
        return cls(at_least_float32(value) * weight, weight, metrics)

    @classmethod
    def masked(cls, values: Tensor, mask: Tensor) -> Loss:
        """The loss of the elements that a mask keeps, summed and counted in float32 or better.

        Args:
            values: losses of single elements, any shape and floating dtype.
            mask: same shape: bool, integer or floating weights of the elements. What has weight zero is not
                looked at, NaN included.

        Returns:
            The `Loss` of `sum(values * mask)` over `sum(mask)`.

        Raises:
            LossError: the shapes differ.
        """
        if values.shape != mask.shape:
            raise LossError(f"values have shape {tuple(values.shape)} but the mask {tuple(mask.shape)}")
        values = at_least_float32(values)
        kept = torch.where(mask != 0, values, 0) * mask
        wide = mask.dtype if mask.dtype == torch.float64 else torch.float32
        return cls(kept.sum(), mask.sum(dtype=wide if mask.is_floating_point() else torch.int64))


Returned: TypeAlias = "Loss | Tensor | Mapping[str, Loss | Tensor]"
"""What a loss function may return: see the table in the README."""

LossFn: TypeAlias = Callable[[Any, Any], Returned]
"""`loss_fn(model, microbatch)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The micro-batch size that was chosen for a step, where the library chooses it.

    Args:
        size: samples or tokens of a micro-batch.
        unit: "samples" or "tokens": what `size` counts.
        reason: why this size, in words.
        is_final: no more sizes are tried, unless shapes grow.
        samples_per_second: the best speed measured with it while sizes were tried; None before that.
    """

    size: int
    unit: str
    reason: str
    is_final: bool
    samples_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Everything is the whole batch's, whichever way it was cut.

    Tensors lie on the device and have no dimension, but for metrics per sample. Reading one as a number is the only
    wait for the device.

    Args:
        loss: mean loss: the sum over terms of `sum_k / weight_k`.
        grad_norm: 2-norm of the true gradient: unscaled, normalised, before clipping. None where nothing needed
            it (`skip_nonfinite=False`, no clipping, no loss scale).
        clipped: bool: the gradient was clipped.
        all_finite: bool: the gradient held no NaN or infinity (True where it was not tested).
        applied: bool: parameters were updated. False after a non-finite gradient or an empty batch.
        loss_scale: the loss scale this step ran with; 1.0 where there is none.
        weight: total number of loss elements; by term where there are several.
        num_microbatches: how many micro-batches the batch was cut into.
        num_samples: how many samples the batch held.
        metrics: name to weighted mean; of a metric per sample, to a tensor with an entry for each sample, in the order
            of the batch.
        lr: learning rate of the first parameter group in this step; NaN where the optimizer chooses it itself.
        seconds: wall time of the call on the host.
        choice: the micro-batch size and why; None where you gave it.
    """

    loss: Tensor
    grad_norm: Tensor | None
    clipped: Tensor
    all_finite: Tensor
    applied: Tensor
    loss_scale: float
    weight: Weight | Mapping[str, Weight]
    num_microbatches: int
    num_samples: int
    metrics: Mapping[str, Tensor]
    lr: Scalar
    seconds: float
    choice: Choice | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python numbers.

        Returns:
            Field name to number (dict of numbers for `metrics`, and for `weight` where there are several terms; a
            metric per sample is a list).

        Cost:
            Waits for the device.
        """
        return {f.name: to_python(getattr(self, f.name)) for f in fields(self)}


class Optimizer(Protocol):
    """What a step needs of an optimizer; `torch.optim.Optimizer` and those of other libraries have it."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self) -> Any:
        """Updates the parameters from their `.grad`."""


class Scheduler(Protocol):
    """What a step needs of a learning rate scheduler."""

    def step(self) -> Any:
        """Advances by one applied step."""


class Model(Protocol):
    """What a step needs of a model; `torch.nn.Module` has it."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters."""

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """All parameters with their names."""

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """All buffers with their names."""


def read_weight(weight: Any, wait: bool = False) -> Weight:
    """Checks a weight and reads it where that does not make the host wait.

    Args:
        weight: a number or a one-element tensor.
        wait: read it from an accelerator too.

    Returns:
        A number; or the tensor, without dimensions, where it lies on an accelerator and `wait` is False.

    Raises:
        WeightError: it is negative, NaN, infinite, not a scalar, not a number, or 16-bit.
    """
    if isinstance(weight, Tensor):
        stays = not (wait or host.reads_freely(weight.device))
        count: Any = None if stays else weight.tolist()
        if type(count) is int and count >= 0:  # the usual count of a mask, checked at once
            return count
        if weight.numel() != 1 or weight.is_complex():
            raise WeightError(f"a weight must be one real number, not {describe(weight)}; use mask.sum()")
        if weight.dtype in HALF_DTYPES:
            raise WeightError(
                f"a weight in {weight.dtype} cannot count beyond {2048 if weight.dtype == torch.float16 else 256} "
                "exactly; use mask.sum(dtype=torch.float32) or Loss.masked(values, mask)"
            )
        if stays:
            return weight.detach().reshape(())
        weight = next(iter(weight.reshape(-1).tolist()))
    try:
        number = int(weight) if isinstance(weight, numbers.Integral) else float(weight)
    except (TypeError, ValueError):
        raise WeightError(f"a weight must be a number of loss elements, not {describe(weight)}") from None
    if not (number == 0 or 1 / LARGEST_WEIGHT <= number <= LARGEST_WEIGHT):
        raise WeightError(
            f"a weight must be 0 or between {1 / LARGEST_WEIGHT:g} and {LARGEST_WEIGHT:g}, not {number:g}; count the "
            "elements of the loss"
        )
    return number


def at_least_float32(value: Tensor) -> Tensor:
    """The tensor, raised to float32 where it is a 16-bit one."""
    return value.float() if value.dtype in HALF_DTYPES else value


def describe(value: object) -> str:
    """A short name of a value for an error message: its type, and for tensors their shape and dtype."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (int, float, str)) or value is None:
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def to_python(value: Any) -> Any:
    """Tensors as numbers or nested lists of them, also inside a mapping; everything else as it is."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: to_python(item) for name, item in value.items()}
    return asdict(value) if isinstance(value, Choice) else value
