"""`Precision`: in which dtype parameters, computation, gradient sums and their reduction over ranks are held."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from accumulus.errors import PrecisionError, UnsupportedError
from accumulus.types import HALF_DTYPES, Model

__all__ = ["Precision"]

NAMES = ("fp32", "tf32", "bf16", "fp16", "auto")
PLANNED = ("bf16-pure", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A mixed-precision recipe. `Precision.parse(name)` makes one; `str()` gives the name back.

    Args:
        name: "fp32", "tf32", "bf16" or "fp16".
        param: dtype that trainable parameters must have; None: float32 or wider, as they are ("fp32" means *no
            casting*: a float64 model stays float64).
        compute: dtype that autocast runs matrix products in; None: no casting.
        accumulate: dtype of the gradient sum over micro-batches; None: that of the parameters.
        reduce: dtype of the gradient sum over ranks; None: that of the parameters.
        needs_loss_scale: small gradients would underflow in `compute` without a loss scale.
        reason: why "auto" chose it; empty where the user did.
    """

    name: str
    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    reduce: torch.dtype | None = None
    needs_loss_scale: bool = False
    reason: str = field(default="", compare=False)

    @classmethod
    def parse(cls, name: str | Precision, device: torch.device | str | None = None) -> Precision:
        """The precision that a name stands for.

        Args:
            name: "fp32", "tf32", "bf16", "fp16", or "auto": what the device really does fast.
            device: what "auto" looks at; by default the accelerator if there is one, else the CPU.

        Returns:
            The precision; for "auto" one of the others, with its `reason`.

        Raises:
            PrecisionError: the name is unknown.
            UnsupportedError: the name is planned and not built.

        Example:
            >>> str(Precision.parse("bf16"))
            'bf16'
        """
        if isinstance(name, Precision):
            return name
        if name == "auto":
            chosen, reason = fastest(torch.device(device) if device is not None else _default_device())
            return cls._named(chosen, reason)
        if name in PLANNED:
            raise UnsupportedError(f"precision {name!r} is not available yet; use one of {', '.join(NAMES)}")
        if name not in NAMES:
            raise PrecisionError(f"unknown precision {name!r}; use one of {', '.join(NAMES)}")
        return cls._named(name)

    @classmethod
    def _named(cls, name: str, reason: str = "") -> Precision:
        if name in ("fp32", "tf32"):
            return cls(name=name, reason=reason)
        single, compute = torch.float32, torch.bfloat16 if name == "bf16" else torch.float16
        return cls(
            name=name,
            param=single,
            compute=compute,
            accumulate=single,
            reduce=single,
            needs_loss_scale=name == "fp16",
            reason=reason,
        )

    def __str__(self) -> str:
        return self.name

    def region(self, device: torch.device) -> AbstractContextManager[object]:
        """The context that a whole window runs in, so that each weight is cast once.

        Args:
            device: where the model computes.

        Returns:
            A context manager that can be entered again and again. For "fp32" it switches an outer autocast off.

        Raises:
            PrecisionError: the device cannot compute in this precision.
        """
        if self.name == "tf32":
            return _TF32Region(device)
        if not torch.amp.is_autocast_available(device.type):
            if self.compute is not None:
                raise PrecisionError(f"torch has no autocast on {device.type!r}; use precision='fp32'")
            return nullcontext()
        return _autocast(device, self.compute) if self.compute else _NoCasting(device)

    def check(self, model: Model) -> None:
        """Refuses a model whose trainable parameters would lose gradient in this precision.

        Args:
            model: with the parameters to train.

        Raises:
            PrecisionError: a trainable parameter is 16-bit, or not of the dtype that the precision needs.
            UnsupportedError: a trainable parameter is complex.
        """
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.is_complex():
                raise UnsupportedError(
                    f"{name} is {parameter.dtype}: complex parameters are not supported; use pairs of reals"
                )
            if parameter.dtype in HALF_DTYPES or self.param not in (None, parameter.dtype):
                raise PrecisionError(
                    f"{name} is {parameter.dtype}; precision {self.name!r} trains {self.param or 'torch.float32'} "
                    "parameters (16-bit sums lose gradient, and autocast casts the weights itself); use model.float()"
                )


def fastest(device: torch.device) -> tuple[str, str]:
    """The precision that a device really does fast, and why, by torch's own queries.

    Args:
        device: the device that will compute.

    Returns:
        "bf16", "fp16" or "fp32", and one clause that says why.
    """
    decide = {
        "cpu": _fastest_on_cpu,
        "cuda": _fastest_on_cuda,
        "mps": _fastest_on_mps,
        "xpu": _fastest_on_xpu,
    }
    if device.type not in decide:
        return "fp32", f"nothing is known about the speed of 16-bit arithmetic on {device.type!r}"
    return decide[device.type](device)


def _fastest_on_cpu(_: torch.device) -> tuple[str, str]:
    for query, unit in (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512-BF16")):
        if getattr(torch.cpu, query, lambda: False)():
            return "bf16", f"this CPU has bf16 matrix instructions ({unit})"
    return (
        "fp32",
        "this CPU has no bf16 matrix instructions (AMX or AVX512-BF16), so 16-bit arithmetic is emulated",
    )


def _fastest_on_cuda(device: torch.device) -> tuple[str, str]:
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    version = ".".join(map(str, capability))
    if torch.version.hip is not None or capability >= (8, 0):
        return "bf16", f"{name} (compute capability {version}) has bf16 matrix units"
    if capability >= (7, 0):
        return "fp16", f"{name} (compute capability {version}) has fp16 matrix units and none for bf16"
    return "fp32", f"{name} (compute capability {version}) has no 16-bit matrix units"


def _fastest_on_mps(_: torch.device) -> tuple[str, str]:
    if torch.backends.mps.is_macos_or_newer(14, 0):
        return "bf16", "this version of macOS offers bf16"
    return "fp16", "this version of macOS offers fp16 and not bf16"


def _fastest_on_xpu(_: torch.device) -> tuple[str, str]:
    return "bf16", "Intel GPUs have bf16 matrix units"


def _default_device() -> torch.device:
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    # A dtype must be named even where it is off; the device's own default is always a valid one.
    chosen = dtype or torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype=chosen, enabled=dtype is not None, cache_enabled=True)


class _NoCasting(AbstractContextManager[None]):
    """An outer autocast is off inside. Where there is none, as nearly always, it costs next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._autocast = _autocast(device, None)
        self._was_on = False

    def __enter__(self) -> None:
        self._was_on = torch.is_autocast_enabled(self._device)
        if self._was_on:
            self._autocast.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._was_on:
            self._autocast.__exit__(*error)  # type: ignore[arg-type]


class _TF32Region(AbstractContextManager[None]):
    """Matrix products may use TF32 inside, and an outer autocast is off; the process's own settings come back."""

    def __init__(self, device: torch.device) -> None:
        self._autocast = Precision._named("fp32").region(device)
        self._before = ""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        self._autocast.__enter__()

    def __exit__(self, *error: object) -> None:
        self._autocast.__exit__(*error)  # type: ignore[arg-type]
        torch.set_float32_matmul_precision(self._before)
