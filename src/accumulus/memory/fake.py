"""A window on fake tensors: the user's model, optimizer and loss function, copied without their data, and run.

Fake tensors have shapes, dtypes, strides and storages, and no memory, so what autograd keeps alive and frees is seen
without computing anything.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accumulus import pytree
from accumulus.errors import UnsupportedError
from accumulus.memory.kernels import with_workspace
from accumulus.memory.live import PARTS, LiveBytes, Timeline, parameters_of, state_of
from accumulus.memory.rehearsal import Pieces, Rehearsal, resized
from accumulus.precision import Precision
from accumulus.together import as_one, members

__all__ = ["FakeWindow", "count_update", "fake_update", "is_present"]

READ = torch.ops.aten._local_scalar_dense.default

HARMLESS = 0.5
"""What a read on the host gives: neither it, its logarithm nor 1 minus it is zero, as optimizers divide by those."""

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""In-place kernels that make no tensors; for some of them torch has no rule for fake tensors."""

FOREACH_DEVICES = frozenset({"cuda", "xpu"})


class FakeWindow:
    """Runs windows of any micro-batch size on fake tensors.

    Args:
        model: the user's; it is not touched.
        optimizer: the user's, or several; not touched.
        loss_fn: the user's; it is called with fake tensors. What it holds is copied as the model is.
        example: an example batch, collated.
        precision: to compute in.
        device: where the step will run.
        makes_batch: whether each micro-batch is made anew on the device, by `collate` or a copy; else it is a view of
            the batch, and not counted.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        *,
        example: pytree.Sliceable,
        precision: Precision,
        device: torch.device,
        makes_batch: bool,
    ) -> None:
        self._originals = (model, optimizer, loss_fn)
        self._example = example
        self._precision = precision
        self._real_device = device
        # Without the device, its kernels' shapes are unknown to autograd, and those of the CPU stand for them.
        self._device = device if is_present(device) else torch.device("cpu")
        self._makes_batch = makes_batch
        self.modes: list[Any] = []  # of the runs

    def run(self, size: int) -> Timeline:
        """Runs one window from which the optimizer's state comes, if it has none, and one with it.

        Args:
            size: samples in a micro-batch.

        Returns:
            Live bytes over both.

        Raises:
            Exception: whatever torch raises where something cannot be done without data.
        """
        from torch._subclasses import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.modes.append(mode)
        model, optimizer, loss_fn = fake_copy(self._originals, mode, self._device)
        _choose_foreach(optimizer, self._originals[1], self._real_device)
        live = FakeLiveBytes(self._device, block_bytes=512 if self._real_device.type == "cuda" else 1)
        with mode:
            step = Rehearsal(model, optimizer, loss_fn, precision=self._precision, device=self._device)
            fixed = None if self._makes_batch else self._make(mode, size)
            make = (lambda: self._make(mode, size)) if fixed is None else lambda: fixed
            with live.watching(step):
                if not state_of(as_one(optimizer)):
                    step(Pieces(make, size, 1))
                step(Pieces(make, size, 2))
        self._check_originals()
        return live.timeline()

    def _make(self, mode: Any, size: int) -> Any:
        def resize(value: Tensor, rows: int) -> Tensor:
            shape = value.shape if rows < 0 else (rows, *value.shape[1:])
            fake = torch.empty(shape, dtype=value.dtype, device=self._device, memory_format=_format_of(value))
            return fake.requires_grad_(value.requires_grad)

        made = resized(self._example, size, resize)
        return pytree.map_tensors(lambda tensor: fake_of(tensor, mode, self._device), made)

    def _check_originals(self) -> None:
        model = self._originals[0]
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise UnsupportedError("the loss function uses the model itself and not the one it is given")


class FakeLiveBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts on fake tensors, and helps them over what needs no data to go on.

    Where the library itself or an optimizer reads a number on the host, it gets a harmless one: neither needs the true
    one here. Reads in the user's model or loss function are left to the fake tensors, which refuse.
    """

    @functools.cached_property
    def _devices(self) -> frozenset[str]:
        current = torch.accelerator.current_accelerator(check_available=True)
        return frozenset({"cpu", "meta"} | ({current.type} if current is not None else set()))

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if func is READ and (self.is_updating or _is_read_by_us()):
            dtype = args[0].dtype
            return True if dtype is torch.bool else HARMLESS if dtype.is_floating_point else 1
        name = func.overloadpacket.__name__
        if name in FUSED and not func._schema.returns:
            return None
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            if made.device.type not in self._devices:  # autograd would end the process
                raise UnsupportedError(f"a tensor is made on {made.device}, which is not here")
            if made.layout != torch.strided and not self.is_updating:
                raise UnsupportedError(f"how many elements the {made.layout} tensors hold depends on the data")
        return with_workspace(name, args, made)


def fake_update(optimizer: Any, graded: list[Tensor], device: torch.device) -> tuple[Timeline, int]:
    """The update alone on fake tensors, where the model cannot be run on them.

    Args:
        optimizer: the user's, or several; not touched.
        graded: the parameters that get a gradient.
        device: where they are.

    Returns:
        As `count_update`.
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes, copied = fake_copy((graded, optimizer), mode, device)
    _choose_foreach(copied, optimizer, device)
    live = FakeLiveBytes(device)
    with mode:
        for parameter in fakes:
            parameter.grad = torch.empty_like(parameter)
        return count_update(copied, live)


def count_update(optimizer: Any, live: LiveBytes) -> tuple[Timeline, int]:
    """Runs the update of an optimizer whose parameters have their gradients.

    Args:
        optimizer: a copy of the user's, or several.
        live: to count with.

    Returns:
        Live bytes over the update, gradients included, and the bytes of state afterwards.
    """
    whole = as_one(optimizer)
    device = parameters_of(whole)[0].device
    model = torch.nn.ParameterList(parameters_of(whole))
    step = Rehearsal(model, optimizer, _no_loss, precision="fp32", device=device)
    with live.watching(step):
        step.update(1.0, True)
    return live.timeline(), int(live.timeline().part_bytes[-1, PARTS.index("optimizer state")])


def fake_copy(originals: Any, mode: Any, device: torch.device) -> Any:
    """A deep copy in which every tensor is fake, wherever it is held; what was one tensor is one tensor again.

    Args:
        originals: model, optimizer and loss function, say.
        mode: of the fake tensors.
        device: where the copies are said to lie; CPU scalars in the optimizer's state stay where they are.

    Returns:
        The copy. No data was copied.
    """
    with _Faking(mode, device):
        return copy.deepcopy(originals)


class _Faking(TorchFunctionMode):
    """Inside, copying a tensor makes a fake one."""

    def __init__(self, mode: Any, device: torch.device) -> None:
        super().__init__()
        self._mode = mode
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is Tensor.__deepcopy__:
            return fake_of(args[0], self._mode, self._device)
        # A parameter copies itself by cloning its data, whatever the mode.
        if func is Tensor.clone and not self._mode.is_our_fake(args[0]):
            return fake_of(args[0], self._mode, self._device)
        return func(*args, **(kwargs or {}))


def fake_of(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    """The fake tensor that stands for a real one; the same each time, sharing storage where the real ones do."""
    if mode.is_our_fake(tensor):
        return tensor
    fake: Tensor = mode.from_tensor(tensor)
    fake.grad = None
    if fake.device.type != device.type and fake.ndim:
        with mode:
            fake = fake.detach().to(device).requires_grad_(tensor.requires_grad)
    return fake


def _no_loss(*_: Any) -> Any:
    raise AssertionError("only the update is rehearsed")


def _choose_foreach(copied: Any, original: Any, device: torch.device) -> None:
    """Optimizers choose their foreach form for plain tensors only: makes the choice that they would make."""
    for fake, real in zip(members(as_one(copied)), members(as_one(original)), strict=True):
        for fake_group, group in zip(fake.param_groups, real.param_groups, strict=True):
            undecided = group.get("foreach", 0) is None and not group.get("fused") and not group.get("differentiable")
            if undecided and device.type in FOREACH_DEVICES and all(p.is_floating_point() for p in group["params"]):
                fake_group["foreach"] = True


def _is_read_by_us() -> bool:
    """Whether the innermost code outside torch that asks for a number is the library's own."""
    if torch._C._current_graph_task_id() >= 0:  # a backward function's read, of an operator or of the user's
        return False
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "torch" and not name.startswith("accumulus.memory"):
            return bool(name.startswith("accumulus.") and not name.startswith("accumulus.run"))
        frame = frame.f_back
    return False


def _format_of(value: Tensor) -> torch.memory_format:
    for ndim, candidate in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        is_last = value.ndim == ndim and value.is_contiguous(memory_format=candidate)
        if is_last and not value.is_contiguous():
            return candidate
    return torch.contiguous_format


def is_present(device: torch.device) -> bool:
    """Whether this machine has such a device."""
    if device.type == "cpu":
        return True
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and current.type == device.type
