"""Where torch's rules for fake tensors differ from its kernels: workspaces that only these know, and a wrong dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from accumulus.errors import UnsupportedError

__all__ = ["with_workspace"]

ONEDNN_RNN = "mkldnn_rnn_layer"

UNKNOWN = frozenset({"_cudnn_rnn", "miopen_rnn"})
"""Recurrent layers whose reserve is known to the library behind them only."""

GROUP_NORM_BACKWARD = "native_group_norm_backward"
"""Its rule gives the input's gradient the dtype of the weights, float32 under autocast; the kernel the input's own."""

FEW_ELEMENTS = 2**18
"""Workspaces of up to as many gate values are asked for; those of more samples lie on a line through two such."""


def with_workspace(name: str, args: Any, made: Any) -> Any:
    """What an operator made on fake tensors, with the workspace that its kernel would keep for the backward pass.

    Args:
        name: of the operator.
        args: its fake arguments.
        made: its fake results.

    Returns:
        The results; of oneDNN's recurrent layers with a workspace of the right size.

    Raises:
        UnsupportedError: the size cannot be known without the device.

    Cost:
        For recurrent layers on the CPU, one forward pass of a few samples through each distinct layer.
    """
    if name == GROUP_NORM_BACKWARD and made[0] is not None and made[0].dtype != args[1].dtype:
        return (torch.empty_like(made[0], dtype=args[1].dtype), *made[1:])
    if name in UNKNOWN:
        raise UnsupportedError(f"only the kernel of {name} knows how much it keeps for the backward pass")
    if name != ONEDNN_RNN or made[3].numel():
        return made
    sequence, hidden, options = args[0], args[5], args[7:]
    if not options[-1]:  # not training
        return made
    layer = tuple(tuple(weight.shape) for weight in args[1:5]), *(_plain(option) for option in options)
    length, num_samples, width = sequence.shape

    def ask(count: int) -> int:
        return _onednn_bytes((length, count, width), hidden.shape[1], sequence.dtype, layer)

    count = max(1, FEW_ELEMENTS // (length * args[1].shape[0]))
    if num_samples <= 2 * count:
        num_bytes = ask(num_samples)
    else:
        few, twice = ask(count), ask(2 * count)
        num_bytes = few + (twice - few) * (num_samples - count) // count
    return (*made[:3], made[3].new_empty(num_bytes))


@functools.lru_cache(maxsize=256)
def _onednn_bytes(shape: tuple[int, int, int], hidden_width: int, dtype: torch.dtype, layer: Any) -> int:
    """Runs the real kernel on zeros, and looks at the workspace that it returns."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    weights, options = layer[0], layer[1:]
    with unset_fake_temporarily():
        state = torch.zeros(shape[1], hidden_width, dtype=dtype)
        matrices = [torch.zeros(size, dtype=dtype) for size in weights]
        inputs: tuple[Tensor, ...] = (torch.zeros(shape, dtype=dtype), *matrices, state, state)
        made = torch.ops.aten.mkldnn_rnn_layer(*inputs, *(list(o) if isinstance(o, tuple) else o for o in options))
        return 0 if made[3] is None else int(made[3].untyped_storage().nbytes())


def _plain(option: Any) -> Any:
    return tuple(option) if isinstance(option, (list, tuple)) else option
