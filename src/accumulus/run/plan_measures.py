"""What would make one sample fit: each measure with the bytes it saves, by an estimate of the changed training job."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accumulus.memory import MemoryEstimate
from accumulus.run.plan_result import Measure, Shortfall
from accumulus.run.plan_rows import Limit
from accumulus.units import format_bytes

CHECKPOINTING = "activation checkpointing"
MOMENTUM = "SGD with momentum"
NO_STATE = "SGD without momentum"
PURE = "bf16-pure"
MEASURES = (CHECKPOINTING, MOMENTUM, NO_STATE, PURE)
"""From what changes the result least to what changes it most."""

CONTAINERS = (nn.ModuleList, nn.Sequential)

Estimator = Callable[[nn.Module, Any, str], MemoryEstimate]
"""From a model, its optimizer and a precision's name to what one sample needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What does not fit.

    Args:
        model: the module to train.
        optimizer: over its parameters.
        precision: the one that needs least.
        estimate: what one sample needs.
    """

    model: nn.Module
    optimizer: Any
    precision: str
    estimate: Estimator


def explain_shortfall(job: Job, limit: Limit) -> Shortfall:
    """Why not even one sample fits, and what would help.

    Args:
        job: what does not fit.
        limit: the memory to fit into.

    Returns:
        Each measure alone; then, where none alone is enough, the smallest sets of them that are, or all together.

    Cost:
        One estimate for each measure and for each set that is tried. Parameters and data are shared, not copied.
    """
    now = job.estimate(job.model, job.optimizer, job.precision)
    possible, notes = possible_changes(job, state_of(now))
    alone: list[Measure] = []
    for change in possible:
        try:
            alone.append(measure(job, (change,), now, limit))
        except Exception as error:  # the user's model, changed in a way that it may not bear
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            notes.append(f"{change}: not counted, because this model cannot be run with it ({reason}).")
    together: list[Measure] = []
    if not any(each.is_enough for each in alone):
        together = enough_together(job, [each.name for each in alone], now, limit)
    if not any(each.is_enough for each in (*alone, *together)):
        notes.append("None of this is enough: it needs a smaller model, shorter samples or more memory.")
    return Shortfall(
        precision=job.precision,
        peak_bytes=now.peak_bytes,
        parts=dict(now.parts),
        phase=now.phase,
        measures=(*alone, *together),
        notes=tuple(notes),
    )


def possible_changes(job: Job, state_bytes: int) -> tuple[list[str], list[str]]:
    """The measures that can be taken here, and a sentence for each that cannot.

    Args:
        job: what does not fit.
        state_bytes: what its optimizer keeps.

    Returns:
        Names out of `MEASURES`, and sentences.
    """
    possible, notes = [], []
    if not repeated_blocks(job.model):
        notes.append(
            f"{CHECKPOINTING}: not counted, because this model has no ModuleList or Sequential of equal blocks."
        )
    else:
        possible.append(CHECKPOINTING)
    needs = {MOMENTUM: trained_bytes(job.optimizer), NO_STATE: 0}
    possible += [name for name, needed_bytes in needs.items() if needed_bytes < state_bytes]
    if any(parameter.dtype == torch.float32 for parameter in job.model.parameters()):
        possible.append(PURE)
    return possible, notes


def enough_together(job: Job, possible: list[str], now: MemoryEstimate, limit: Limit) -> list[Measure]:
    """The smallest sets of measures that are enough; all of them where none is.

    Args:
        job: what does not fit.
        possible: the measures; none of them is enough alone.
        now: what one sample needs as it is.
        limit: the memory to fit into.

    Returns:
        Sets of one size, or a single one that is not enough.
    """
    tried: list[Measure] = []
    for size in range(2, len(possible) + 1):
        sets = [names for names in combinations(possible, size) if not {MOMENTUM, NO_STATE} <= set(names)]
        tried = [measure(job, names, now, limit) for names in sets] or tried
        enough = [each for each in tried if each.is_enough]
        if enough:
            return enough
    return sorted(tried, key=lambda each: -each.peak_bytes)[-1:]


def measure(job: Job, changes: tuple[str, ...], now: MemoryEstimate, limit: Limit) -> Measure:
    """What one sample needs with some changes.

    Args:
        job: what does not fit.
        changes: names out of `MEASURES`.
        now: what one sample needs as it is.
        limit: the memory to fit into.

    Returns:
        The measure.
    """
    model, optimizer, hows = job.model, job.optimizer, []
    if CHECKPOINTING in changes:
        model, num_blocks, name = checkpointed(model)
        hows.append(
            f"estimated with torch.utils.checkpoint around each of {num_blocks} blocks ({name}): only their inputs are "
            "kept, and one more forward pass of them is run in backward."
        )
    for change, momentum in ((MOMENTUM, 0.9), (NO_STATE, 0.0)):
        if change in changes:
            optimizer = smaller_optimizer(job.optimizer, momentum=momentum)
            hows.append(
                f"estimated with torch.optim.SGD in place of {type(job.optimizer).__name__}, whose state is "
                f"{format_bytes(state_of(now))}; it needs another learning rate."
            )
    if PURE in changes:
        before = job.estimate(model, optimizer, "bf16")
        peak_bytes, how = pure_peak(before, model, trained_bytes(optimizer))
        hows.append(how)
    else:
        peak_bytes = job.estimate(model, optimizer, job.precision).peak_bytes
    return Measure(
        changes=changes,
        peak_bytes=peak_bytes,
        saved_bytes=now.peak_bytes - peak_bytes,
        is_enough=peak_bytes <= limit.limit_bytes,
        how=" ".join(hows),
    )


def pure_peak(bf16: MemoryEstimate, model: nn.Module, gradient_bytes: int) -> tuple[int, str]:
    """What precision bf16-pure would need: a sum over the parts of bf16, because it cannot be run yet.

    Args:
        bf16: the same job in precision bf16.
        model: with the parameters that would be bf16.
        gradient_bytes: all gradients.

    Returns:
        The peak in bytes, and what was counted.
    """
    halved = sum(parameter.nbytes // 2 for parameter in model.parameters() if parameter.dtype == torch.float32)
    cast = bf16.parts.get("cast weights", 0)
    # The copies are gone in the update, which may be the new peak: then all gradients and all state are there.
    in_update = sum(parameter.nbytes for parameter in model.parameters()) + gradient_bytes + state_of(bf16)
    peak_bytes = max(bf16.peak_bytes - cast, in_update) - halved
    return peak_bytes, (
        f"counted from the parts of bf16 ({format_bytes(bf16.peak_bytes)}): parameters halved "
        f"({format_bytes(halved)} less), no cast weights ({format_bytes(cast)}); gradients stay in fp32 and the "
        "optimizer's state as it is. This precision arrives with a later version."
    )


def checkpointed(model: nn.Module) -> tuple[nn.Module, int, str]:
    """The same model, with the same parameters, whose repeated blocks run under activation checkpointing.

    Args:
        model: with repeated blocks; it stays as it is.

    Returns:
        A copy that shares parameters and buffers, the number of wrapped blocks, and the name of their type.
    """
    shared = {id(tensor): tensor for tensor in tensors_of(model)}
    twin = copy.deepcopy(model, shared)
    blocks = repeated_blocks(twin)
    for block in blocks:
        # The random state need not be kept for an estimate: it has the same size for every model.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return twin, len(blocks), type(blocks[0]).__name__


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a deep model repeats.

    Args:
        model: any module.

    Returns:
        All modules of the type that fills the model's largest `ModuleList` or `Sequential` of equal children, as far
        as they lie in such containers and not in one another; empty where there is no such container.
    """
    stacks = [list(module.children()) for module in model.modules() if isinstance(module, CONTAINERS)]
    stacks = [stack for stack in stacks if len(stack) > 1 and len(set(map(type, stack))) == 1 and size_of(stack) > 0]
    if not stacks:
        return []
    kind = type(max(stacks, key=size_of)[0])
    found = {id(block): block for stack in stacks if type(stack[0]) is kind for block in stack}
    inner = {id(below) for block in found.values() for below in block.modules() if below is not block}
    return [block for key, block in found.items() if key not in inner]


def state_of(estimate: MemoryEstimate) -> int:
    """What the optimizer keeps."""
    return estimate.parts.get("optimizer state", 0)


def size_of(modules: Iterable[nn.Module]) -> int:
    """The number of parameters of some modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def smaller_optimizer(optimizer: Any, *, momentum: float) -> torch.optim.SGD:
    """SGD over the same parameters, as fused as the optimizer it stands for.

    Args:
        optimizer: any torch optimizer.
        momentum: 0 keeps no state.

    Returns:
        An optimizer that holds the same parameters and has made no step.
    """
    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    is_fused = bool(optimizer.param_groups[0].get("fused"))
    return torch.optim.SGD(groups, lr=1e-3, momentum=momentum, fused=is_fused or None)


def trained_bytes(optimizer: Any) -> int:
    """The bytes of the parameters that an optimizer holds; of their gradients as well, and of one moment."""
    return sum(
        parameter.nbytes for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    )
