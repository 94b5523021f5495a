"""One window: the micro-batches of one update. Weights, reference, backward seeds, tallies.

Each micro-batch runs backward from the seed `S / R` on its loss *sum*: S is the loss scale, R (the reference) a power
of two near the window's total weight, so that neither changes a mantissa bit. Only the end of the window, where the
true total W is known, divides: `Totals.divisor = S * W / (n * R)` is what the gradient buffers must be divided by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import LossError, WeightError, WindowError
from accumulus.host import Flag, Scalar
from accumulus.tally import Tally, is_zero, power_of_two
from accumulus.types import Loss, Returned, Weight, at_least_float32, describe, read_weight

__all__ = ["Totals", "Window", "WindowRules"]

SHARE_TOLERANCE = 1e-12
FLOAT_SHARE_TOLERANCE = 1e-6
"""For weights that are not whole numbers: their own sums are rounded, in float32 most likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a whole window added up to.

    Args:
        loss: mean loss; NaN where all weights are zero.
        like: some tensor on the loss's device and of its dtype, float32 at least.
        weight: total weight; by term where there are several.
        divisor: what the gradient buffers must be divided by.
        is_valid: whether the weights add up to a defined mean; a tensor where the host does not know yet.
        metrics: name to weighted mean.
        num_microbatches: how many micro-batches there were.
    """

    loss: Scalar
    like: Tensor
    weight: Weight | Mapping[str, Weight]
    divisor: Scalar
    is_valid: Flag
    metrics: Mapping[str, Scalar]
    num_microbatches: int


class WindowRules:
    """What stays the same from window to window, and the reference, which each window hands to the next.

    Args:
        region: context that every window runs in (autocast).
        autocast_device: device type whose autocast must be off in the backward pass; None where none is on.
        scale: gives the loss scale. Called as late as possible: just before the first backward pass.
        discard: drops all gradients; called when a window ends by an exception.
        weigh: counts the total weights of a batch before any forward pass.
        on_empty: "raise" or "skip": what a window of total weight zero does.
    """

    def __init__(
        self,
        region: AbstractContextManager[object],
        *,
        autocast_device: str | None,
        scale: Callable[[], float],
        discard: Callable[[], None],
        weigh: Callable[[Any], Any] | None = None,
        on_empty: str = "raise",
    ) -> None:
        if on_empty not in ("raise", "skip"):
            raise WeightError(f"on_empty must be 'raise' or 'skip', not {on_empty!r}")
        self.region = region
        self.autocast_device = autocast_device
        self.scale = scale
        self.discard = discard
        self.weigh = weigh
        self.on_empty = on_empty
        self.reference: Scalar | None = None
        self.is_open = False

    def open(self, sizes: Sequence[int], batch: Any, *, num_ranks: int = 1) -> Window:
        """Starts the window of one batch.

        Args:
            sizes: samples in each micro-batch.
            batch: the whole batch, for `weigh`.
            num_ranks: over how many ranks the wrapper averages gradients.

        Returns:
            The window, a context manager.

        Raises:
            WeightError: `weigh` gave weights that cannot be.
            WindowError: another window of the same step is open.
        """
        if self.is_open:
            raise WindowError("a step was called inside the loss function of the same step; use a step of its own")
        known = None if self.weigh is None else _known_weights(self.weigh(batch))
        return Window(self, sizes, known, num_ranks)


class Window:
    """An open window: takes the loss of each micro-batch and runs it backward. Made by `WindowRules.open`."""

    def __init__(
        self, rules: WindowRules, sizes: Sequence[int], known: Mapping[str, float] | None, num_ranks: int
    ) -> None:
        self._rules = rules
        self._sizes = sizes
        self._known = known
        self._num_ranks = num_ranks
        self._num_done = 0
        self._base = ""  # the term whose weight the reference stands for; set at the first backward pass
        self._unit: Scalar = 1.0  # S / R
        self.scale = 1.0  # S; read at the first backward pass
        self._terms: dict[str, Tally] = {}
        self._metrics: dict[str, Tally] = {}
        self._like: Tensor | None = None  # a loss, for the device and dtype of results

    def __enter__(self) -> Window:
        # An autocast region around the user's whole loop would keep copies of the weights from before the update.
        torch.clear_autocast_cache()
        self._rules.is_open = True
        self._rules.region.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._rules.region.__exit__(kind, error, trace)
        torch.clear_autocast_cache()
        self._rules.is_open = False
        if kind is not None:
            self._rules.discard()

    def backward(self, returned: Returned) -> None:
        """Runs one micro-batch backward and adds it to the tallies.

        Args:
            returned: what the loss function returned.

        Raises:
            LossError: it is not a loss, or has no graph.
            WeightError: `weigh` gave no total for a term.
        """
        num_samples = self._sizes[self._num_done]
        self._num_done += 1
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for name, loss in as_terms(returned, num_samples):
            root = at_least_float32(loss.sum)
            tally = self._count(name, loss, root)
            if tally is not None:
                roots.append(root)
                seeds.append(self._seed(tally, root))
        if roots:
            self._run_backward(roots, seeds)

    def totals(self) -> Totals:
        """Closes the tallies.

        Returns:
            The window's totals.

        Raises:
            WeightError: the weights are all zero, or the terms' shares differ between micro-batches. Weights that
                lie on a device are not read: `Totals.is_valid` tells, and `explain` says why.
        """
        weights = {name: tally.total_weight() for name, tally in self._terms.items()}
        is_valid = self._validity(weights)
        if is_valid is False and (problem := self.explain(weights)):
            raise WeightError(problem)
        single = next(iter(weights.values())) if len(weights) == 1 else weights
        return Totals(
            loss=self._mean_loss(weights),
            like=self._like if self._like is not None else torch.zeros(()),
            weight=single if weights else 0,
            divisor=self._divisor(weights.get(self._base, 0)),
            is_valid=is_valid,
            metrics={name: tally.mean() for name, tally in self._metrics.items()},
            num_microbatches=self._num_done,
        )

    def explain(self, weights: Mapping[str, Weight] | None = None) -> str:
        """Why the window's weights give no mean. Reads them, wherever they lie.

        Args:
            weights: total weight by term; taken from the tallies if not given.

        Returns:
            One sentence; empty where the window may be skipped in peace (`on_empty="skip"`).
        """
        weights = weights if weights is not None else {n: t.total_weight() for n, t in self._terms.items()}
        totals = {name: float(weight) for name, weight in weights.items()}
        if any(not host.wait_for(tally.is_valid()) for tally in self._terms.values()):
            return "a micro-batch had a negative, NaN or infinite weight; count the elements of the loss"
        empty = [name for name, total in totals.items() if total == 0]
        if empty and len(empty) < len(totals) and self._rules.on_empty == "raise":
            return f"the loss term {empty[0]!r} has total weight 0 in this batch; pass on_empty='skip' to leave it out"
        if len(empty) == len(totals):
            skip = self._rules.on_empty == "skip"
            return "" if skip else "the batch has total weight 0: no loss element; pass on_empty='skip' to skip it"
        if all(
            host.wait_for(self._share_holds(self._terms[n], w, weights[self._base])) for n, w in weights.items() if w
        ):
            return ""
        return (
            f"the loss terms' shares differ between micro-batches (totals {totals}), so their weights in the whole "
            "batch must be known before the first backward pass; pass weigh=, which counts them on the batch"
        )

    def _count(self, name: str, loss: Loss, root: Tensor) -> Tally | None:
        """Adds a loss to its tally, and returns that where there is something to run backward."""
        if self._like is None:
            self._like = root.detach()
        for metric, (value, weight) in loss.metrics.items():
            self._count_metric(metric, value, read_weight(weight))
        tally = self._terms.get(name)
        if tally is None:
            tally = self._terms[name] = Tally()
        weight = loss.weight
        if is_zero(weight):  # a sum over nothing, perhaps NaN: it must not reach any gradient
            return None
        if not root.requires_grad:
            raise LossError(
                f"the loss {name!r} has no graph, so no gradient can flow: was it computed under no_grad, detached, or "
                "are all parameters frozen? Numbers that are only to be logged go into Loss(metrics=...)"
            )
        if not tally.sums:
            self._begin_term(name, tally, weight)
        tally.add(host.value_of(root), weight)
        return tally

    def _count_metric(self, name: str, value: Any, weight: Weight) -> None:
        tally = self._metrics.setdefault(name, Tally())
        if not is_zero(weight):
            tally.add(host.value_of(at_least_float32(value)) if isinstance(value, Tensor) else value, weight)

    def _begin_term(self, name: str, tally: Tally, weight: Weight) -> None:
        if self._known is not None and name not in self._known:
            raise WeightError(
                f"weigh= gave totals for {sorted(self._known)} but the loss has a term {name!r}; count it too"
            )
        if not self._base:
            self._base = name
            self.scale = self._rules.scale()
            self._unit = self.scale / self._choose_reference(weight)
            return
        if self._known is not None:
            tally.share = self._known[self._base] / self._known[name] if self._known[name] else math.inf
        else:
            tally.share = self._terms[self._base].weights[-1] / weight

    def _choose_reference(self, weight: Weight) -> Scalar:
        if self._known is not None and self._known[self._base] > 0:
            self._rules.reference = power_of_two(self._known[self._base])
        elif self._rules.reference is None:
            self._rules.reference = power_of_two(weight * len(self._sizes))
        return self._rules.reference

    def _seed(self, tally: Tally, root: Tensor) -> Tensor:
        seed = tally.seed
        if seed is None or seed.dtype != root.dtype or seed.device != root.device or seed.shape != root.shape:
            value = self._unit * tally.share
            if isinstance(value, Tensor):
                seed = value.to(root.device, root.dtype).expand(root.shape)
            else:
                seed = torch.full(root.shape, value, dtype=root.dtype, device=root.device)
            tally.seed = seed
        return seed

    def _run_backward(self, roots: list[Tensor], seeds: list[Tensor]) -> None:
        device = self._rules.autocast_device
        if device is None:
            torch.autograd.backward(roots, seeds)
            return
        # The bare switch, not a nested region: three microseconds less, and the cast weights stay cached.
        torch.set_autocast_enabled(device, False)
        try:
            torch.autograd.backward(roots, seeds)
        finally:
            torch.set_autocast_enabled(device, True)

    def _validity(self, weights: Mapping[str, Weight]) -> Flag:
        is_valid: Flag = bool(self._base)
        for name, tally in self._terms.items():
            if not tally.sums:  # empty on the host: the others may still make a batch
                is_valid = is_valid and (self._rules.on_empty == "skip")
                continue
            is_valid = is_valid & tally.is_valid() & (weights[name] > 0)
            if name != self._base:
                is_valid = is_valid & self._share_holds(tally, weights[name], weights[self._base])
        return is_valid

    def _share_holds(self, tally: Tally, weight: Weight, base: Weight) -> Flag:
        whole = isinstance(weight, int) and isinstance(base, int)
        error: Scalar = (tally.share * weight - base).__abs__()
        allowed: Scalar = base * (SHARE_TOLERANCE if whole else FLOAT_SHARE_TOLERANCE)
        return error <= allowed

    def _mean_loss(self, weights: Mapping[str, Weight]) -> Scalar:
        # Starting from the first keeps one term's mean as it is, on its device.
        means = [tally.total() / weights[name] for name, tally in self._terms.items() if tally.sums]
        return sum(means[1:], start=means[0]) if means else math.nan

    def _divisor(self, base_weight: Weight) -> Scalar:
        if is_zero(base_weight):
            return 1.0
        # The next window's reference: this one's total. On a device it stays there.
        self._rules.reference = power_of_two(base_weight)
        divisor = self._unit * base_weight / self._num_ranks
        if isinstance(divisor, Tensor):  # an impossible weight must not look like a non-finite gradient
            divisor = torch.where((divisor > 0) & divisor.isfinite(), divisor, 1.0)
        return divisor


def as_terms(returned: Returned, num_samples: int) -> list[tuple[str, Loss]]:
    """What a loss function returned, as named terms.

    Args:
        returned: see the table in the README.
        num_samples: the weight that a bare scalar stands for.

    Returns:
        Name and `Loss` of each term; the name is "loss" where there is only one.

    Raises:
        LossError: it is none of what may be returned.
    """
    if type(returned) is Loss:
        return [("loss", returned)]
    if isinstance(returned, Tensor):
        return [("loss", _as_loss(returned, num_samples))]
    if isinstance(returned, Mapping) and returned:
        return [(str(name), _as_loss(term, num_samples)) for name, term in returned.items()]
    raise LossError(
        f"the loss function returned {describe(returned)}; return a Loss(sum, weight), a scalar that is the mean "
        "over the micro-batch's samples, or a dict of them"
    )


def _as_loss(term: object, num_samples: int) -> Loss:
    if isinstance(term, Loss):
        return term
    if isinstance(term, Tensor) and term.numel() == 1:
        return Loss.mean(term, num_samples)
    raise LossError(
        f"a loss must be a Loss or a tensor of one element, not {describe(term)}; use .mean() or Loss(sum, weight)"
    )


def _known_weights(counted: Any) -> dict[str, float]:
    items = counted if isinstance(counted, Mapping) else {"loss": counted}
    return {str(name): float(read_weight(weight, wait=True)) for name, weight in items.items()}
