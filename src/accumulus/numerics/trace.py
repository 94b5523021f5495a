"""Which operator ran in which dtype, module by module, in one real pass; what was cast, and what was multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accumulus.types import HALF_DTYPES
from accumulus.whereabouts import OperatorWatch, is_floating, operator_name, tensors_in

__all__ = ["Cast", "DtypeTrace", "OperatorUse", "Peak", "Product", "TraceTable"]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


SENSITIVE = words(
    "softmax log_softmax logsumexp exp expm1 log log1p log2 log10 pow rsqrt reciprocal norm linalg_vector_norm "
    "native_layer_norm native_group_norm native_batch_norm fused_rms_norm rms_norm var std prod cumsum cumprod "
    "nll_loss_forward nll_loss2d_forward mse_loss binary_cross_entropy smooth_l1_loss huber_loss "
    "soft_margin_loss kl_div cosh sinh tan acos asin"
)
"""What torch's own autocast runs in float32 on CUDA, as far as it can matter: exponentials, norms, losses."""

REDUCTIONS = frozenset({"sum", "mean"})
LARGE_REDUCTION = 2**14
"""Numbers in one sum from which 16 bits of the result are too few to see the last ones."""

MASKED = -1e4
"""A row of a softmax whose largest logit is below this is all mask."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})

COULD_BE_NARROW = words(
    "add sub mul div relu gelu silu sigmoid tanh leaky_relu hardswish dropout native_dropout cat copy clone neg where "
    "mm addmm bmm baddbmm convolution gelu_backward silu_backward threshold_backward native_dropout_backward"
)
"""Element by element, or summed in float32 inside: 16 bits would do under autocast."""


@dataclass(kw_only=True)
class OperatorUse:
    """An operator as one module used it.

    Args:
        module: its path; empty in the loss function.
        is_backward: in the backward pass.
        operator: its name.
        inputs: dtypes that went in.
        output: the dtype that came out.
        count: calls.
        num_bytes: of the outputs, over all calls.
    """

    module: str
    is_backward: bool
    operator: str
    inputs: tuple[str, ...]
    output: str
    count: int = 0
    num_bytes: int = 0


@dataclass(kw_only=True)
class Cast:
    """Casts from one dtype to another in one module; `num_bytes` are read and written."""

    module: str
    is_backward: bool
    source: str
    target: str
    count: int = 0
    num_bytes: int = 0


@dataclass(kw_only=True)
class Product:
    """Matrix products of one shape: `rows` x `inner` times `inner` x `columns`, `count` of them."""

    rows: int
    inner: int
    columns: int
    dtype: str
    count: int = 0

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest logit that a softmax saw in 16 bits.

    Args:
        module: where.
        operator: softmax or log_softmax.
        dtype: of the logits.
        largest: magnitude of the largest one in a row, in the worst row.
        spread: of the finite logits.
    """

    module: str
    operator: str
    dtype: str
    largest: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class TraceTable:
    """What a `DtypeTrace` saw, as plain values.

    Args:
        uses: operators by module and dtypes, in the order in which they were met.
        casts: the costly ones first.
        products: the costly ones first.
        peaks: of softmaxes in 16 bits.
        outputs: module to the dtype of its output.
    """

    uses: tuple[OperatorUse, ...]
    casts: tuple[Cast, ...]
    products: tuple[Product, ...]
    peaks: tuple[Peak, ...]
    outputs: dict[str, str]

    @property
    def sensitive(self) -> list[OperatorUse]:
        """Operators that ran in 16 bits and should be watched: softmax, norms, exponentials, losses, large sums."""
        narrow = {str(dtype).removeprefix("torch.") for dtype in HALF_DTYPES}
        return [use for use in self.uses if use.output in narrow and use.operator in SENSITIVE | {"large sum"}]

    @property
    def needless(self) -> list[OperatorUse]:
        """Operators that ran in float32 where 16 bits would do, the largest first.

        What stands beside an exponential or a root in one module, as in a norm, belongs in float32 with it.
        """
        careful = {use.module for use in self.uses if use.operator in SENSITIVE} | {""}
        wide = [use for use in self.uses if use.output == "float32" and use.operator in COULD_BE_NARROW]
        return sorted((use for use in wide if use.module not in careful), key=lambda use: -use.num_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "operators": [asdict(use) for use in self.uses],
            "casts": [asdict(cast) for cast in self.casts],
            "products": [asdict(product) | {"num_operations": product.num_operations} for product in self.products],
            "softmax_peaks": [asdict(peak) for peak in self.peaks],
            "output_dtypes": self.outputs,
        }


@dataclass
class Seen:
    """What has been counted, by what makes it one."""

    uses: dict[Any, OperatorUse] = field(default_factory=dict)
    casts: dict[Any, Cast] = field(default_factory=dict)
    products: dict[Any, Product] = field(default_factory=dict)
    peaks: dict[Any, Peak] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


class DtypeTrace(OperatorWatch):  # type: ignore[no-untyped-call]
    """Writes down every operator of a forward and backward pass with its dtypes, while it is entered.

    Args:
        model: whose modules are told apart.

    Cost:
        Some microseconds an operator; the host waits for the device only at a softmax in 16 bits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._seen = Seen()
        self.whereabouts.on_leave = self._note_output

    def table(self) -> TraceTable:
        """What has been seen."""
        seen = self._seen
        return TraceTable(
            uses=tuple(seen.uses.values()),
            casts=tuple(sorted(seen.casts.values(), key=lambda cast: -cast.num_bytes)),
            products=tuple(sorted(seen.products.values(), key=lambda product: -product.num_operations)),
            peaks=tuple(seen.peaks.values()),
            outputs=seen.outputs,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [tensor for tensor in tensors_in((args, kwargs or {})) if is_floating(tensor)]
        outputs = [tensor for tensor in tensors_in(result) if is_floating(tensor)]
        if not inputs or not outputs or is_view(inputs, outputs[0], func):
            return result
        name = operator_name(func)
        if name in REDUCTIONS and inputs[0].numel() >= LARGE_REDUCTION * outputs[0].numel():
            name = "large sum"
        self._note_use(name, inputs, outputs[0])
        if name == "to_copy" and inputs[0].dtype != outputs[0].dtype:
            self._note_cast(inputs[0], outputs[0])
        if name in PRODUCTS:
            self._note_product(name, inputs, outputs[0])
        if name in ("softmax", "log_softmax") and inputs[0].dtype in HALF_DTYPES:
            self._note_peak(name, inputs[0], args[1])
        return result

    def _note_output(self, path: str, output: Any) -> None:
        dtype = next((tensor.dtype for tensor in tensors_in(output) if is_floating(tensor)), None)
        if dtype is not None:
            self._seen.outputs.setdefault(path, short(dtype))

    def _note_use(self, name: str, inputs: Sequence[Tensor], output: Tensor) -> None:
        here = self.whereabouts.here
        dtypes = tuple(dict.fromkeys(short(tensor.dtype) for tensor in inputs))
        key = (here, name, dtypes, output.dtype)
        use = self._seen.uses.get(key)
        if use is None:
            use = self._seen.uses[key] = OperatorUse(
                module=here.module,
                is_backward=here.is_backward,
                operator=name,
                inputs=dtypes,
                output=short(output.dtype),
            )
        use.count += 1
        use.num_bytes += output.numel() * output.element_size()

    def _note_cast(self, source: Tensor, target: Tensor) -> None:
        here = self.whereabouts.here
        key = (here, source.dtype, target.dtype)
        cast = self._seen.casts.get(key)
        if cast is None:
            cast = self._seen.casts[key] = Cast(
                module=here.module,
                is_backward=here.is_backward,
                source=short(source.dtype),
                target=short(target.dtype),
            )
        cast.count += 1
        cast.num_bytes += source.numel() * source.element_size() + target.numel() * target.element_size()

    def _note_product(self, name: str, inputs: Sequence[Tensor], output: Tensor) -> None:
        left, right = inputs[-2:] if name in ("addmm", "baddbmm") else inputs[:2]
        if name == "convolution":  # as a product of the unfolded input with the filters
            sizes = (output.numel() // output.shape[1], right[0].numel(), output.shape[1])
        else:
            sizes = (left.shape[-2], left.shape[-1], right.shape[-1])
        key = (*sizes, output.dtype)
        if key not in self._seen.products:
            rows, inner, columns = sizes
            self._seen.products[key] = Product(rows=rows, inner=inner, columns=columns, dtype=short(output.dtype))
        self._seen.products[key].count += left.shape[0] if name in ("bmm", "baddbmm") else 1

    @torch.no_grad()
    def _note_peak(self, name: str, logits: Tensor, dim: int) -> None:
        dtype, logits = short(logits.dtype), logits.detach().float()
        finite = torch.isfinite(logits)
        if not bool(finite.any()):
            return
        tops = torch.where(finite, logits, -torch.inf).amax(dim)
        tops = tops[torch.isfinite(tops) & (tops > MASKED)]
        if not len(tops):
            return
        largest = float(tops.abs().max())
        spread = float(logits[finite].max() - logits[finite].min())
        module = self.whereabouts.here.module
        before = self._seen.peaks.get((module, name))
        if before is None or largest > before.largest:
            self._seen.peaks[module, name] = Peak(
                module=module, operator=name, dtype=dtype, largest=largest, spread=spread
            )


def is_view(inputs: Sequence[Tensor], output: Tensor, func: Any) -> bool:
    """Whether an operator only looked at a tensor in another way."""
    return not func._schema.is_mutable and any(
        output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in inputs
    )


def short(dtype: torch.dtype) -> str:
    """A dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
