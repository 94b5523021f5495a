"""Loss terms, each over its own count: tallies, shares, whether they make a mean, and in words why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import LossError, WeightError
from accumulus.host import Flag, Scalar
from accumulus.tally import Tally, is_zero
from accumulus.types import HALF_DTYPES, Loss, Metric, Returned, Weight, at_least_float32, describe, read_weight

__all__ = ["Terms", "as_terms", "known_weights"]

EXACT = 1e-12
ROUNDED = 1e-6
"""For totals that the user's `weigh` may have summed in float32."""


class Terms:
    """The loss terms of one window.

    The first one with a weight is the base: the seeds of the others are multiplied by their share, `W_base / W_term`,
    so that one division by `W_base` at the end serves all.

    Args:
        known: total weight by term, from `weigh`; None where it is not known.
        on_empty: "raise" or "skip": what a term without any element does.
    """

    def __init__(self, known: Mapping[str, float] | None, on_empty: str) -> None:
        self.known = known
        self.base = next((name for name, weight in known.items() if weight > 0), "") if known else ""
        self.tallies: dict[str, Tally] = {}
        self.metrics: dict[str, Tally] = {}
        self.per_sample: dict[str, list[Tensor]] = {}  # metrics by sample, of each micro-batch
        self._on_empty = on_empty

    def add(self, name: str, loss: Loss, root: Tensor, num_samples: int | None = None) -> Tally | None:
        """Adds a micro-batch's loss.

        Args:
            name: of the term.
            loss: its sum and weight.
            root: the sum in float32 or better, with its graph.
            num_samples: samples in the micro-batch; None where it is not known.

        Returns:
            The term's tally; None where the weight is zero and nothing may run backward.

        Raises:
            LossError: the loss has no graph, or a metric is malformed.
            WeightError: `weigh` counted nothing for this term.
        """
        if loss.metrics:
            for metric, pair in loss.metrics.items():
                if isinstance(pair, Metric) and pair.per_sample:
                    self._add_per_sample(metric, pair.value, num_samples)
                else:
                    self._add_metric(metric, pair)
        tally = self.tallies.get(name)
        if tally is None:
            tally = self.tallies[name] = Tally()
        weight = loss.weight
        if not isinstance(weight, Tensor) and weight == 0:  # a sum over nothing, perhaps NaN: it must reach no gradient
            return None
        if not root.requires_grad:
            raise LossError(
                f"the loss {name!r} has no graph, so no gradient can flow: was it computed under no_grad, detached, or "
                "are all parameters frozen? Numbers that are only to be logged go into Loss(metrics=...)"
            )
        if not tally.sums:
            self._begin(name, tally, weight)
        tally.sums.append(host.value_of(root))
        tally.weights.append(weight)
        return tally

    def weights(self) -> dict[str, Weight]:
        """Total weight by term."""
        return {name: tally.total_weight() for name, tally in self.tallies.items()}

    def are_valid(self, weights: Mapping[str, Weight]) -> Flag:
        """Whether the weights make a mean; a tensor where the host does not know.

        Args:
            weights: total weight by term.
        """
        base = weights.get(self.base, 0)
        valid: Flag = base > 0
        for name, tally in self.tallies.items():
            valid = valid & self._term_is_valid(name, tally, weights[name], base)
        return valid

    def explain(self) -> str:
        """Why the weights give no mean. Reads them, wherever they lie.

        Returns:
            One sentence; empty where they do, or where the window may be skipped in peace (`on_empty="skip"`).
        """
        weights = self.weights()
        totals = {name: float(weight) for name, weight in weights.items()}
        if any(not host.wait_for(tally.is_valid()) for tally in self.tallies.values()):
            return "a micro-batch had a negative, NaN or infinite weight; count the elements of the loss"
        empty = [name for name, total in totals.items() if total == 0]
        if len(empty) == len(totals):
            skip = self._on_empty == "skip"
            return "" if skip else "the batch has total weight 0: no loss element; pass on_empty='skip' to skip it"
        if empty and self._on_empty == "raise":
            return f"the loss term {empty[0]!r} has total weight 0 in this batch; pass on_empty='skip' to leave it out"
        if host.wait_for(self.are_valid(weights)):
            return ""
        if self.known is not None:
            return (
                f"weigh= counted {dict(self.known)} but the losses brought {totals}, so the terms would have had the "
                "wrong shares; let weigh= count what the loss function divides by"
            )
        return (
            f"the loss terms' shares differ between micro-batches (totals {totals}), so their weights in the whole "
            "batch must be known before the first backward pass; pass weigh=, which counts them on the batch"
        )

    def state_dict(self) -> dict[str, Any]:
        """All tallies."""
        return {
            "known": None if self.known is None else dict(self.known),
            "base": self.base,
            "terms": {name: tally.state_dict() for name, tally in self.tallies.items()},
            "metrics": {name: tally.state_dict() for name, tally in self.metrics.items()},
            "per_sample": {name: [host.to_cpu(part) for part in parts] for name, parts in self.per_sample.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Goes on from a saved state."""
        self.known, self.base = state["known"], state["base"]
        self.tallies = {name: Tally.from_state(saved, device) for name, saved in state["terms"].items()}
        self.metrics = {name: Tally.from_state(saved, device) for name, saved in state["metrics"].items()}
        per_sample = state.get("per_sample", {})  # a state from before there was any
        self.per_sample = {name: [part.to(device) for part in parts] for name, parts in per_sample.items()}

    def mean_loss(self, weights: Mapping[str, Weight]) -> Scalar:
        """The sum over terms of their means; a term without elements counts for nothing, NaN where all are such."""
        means = [self._mean(tally, weights[name]) for name, tally in self.tallies.items() if tally.sums]
        return sum(means[1:], start=means[0]) if means else math.nan

    def results(self, num_microbatches: int, order: Sequence[int] | None) -> dict[str, Scalar]:
        """The window's metrics: weighted means, and what came by sample.

        Args:
            num_microbatches: how many there were.
            order: for each position in run order, the sample's place in the batch; None where they are the same.

        Raises:
            LossError: a metric per sample was not brought by every micro-batch once, or its shapes differ.
        """
        results = {name: tally.mean() for name, tally in self.metrics.items()}
        for name, parts in self.per_sample.items():
            if len(parts) != num_microbatches:
                raise LossError(
                    f"the metric {name!r} has a value for each sample, but came {len(parts)} times in "
                    f"{num_microbatches} micro-batches; bring it once in each"
                )
            results[name] = _in_order(name, parts, order)
        return results

    def _mean(self, tally: Tally, weight: Weight) -> Scalar:
        mean = tally.total() / weight
        if isinstance(mean, Tensor) and len(self.tallies) > 1:
            mean = torch.where(torch.as_tensor(weight == 0), 0.0, mean)
        return mean

    def _add_per_sample(self, name: str, value: Tensor, num_samples: int | None) -> None:
        if num_samples is not None and len(value) != num_samples:
            raise LossError(
                f"the metric {name!r} has {len(value)} values for the {num_samples} samples of a micro-batch; give one "
                "for each sample, or (sum, weight)"
            )
        if name in self.metrics:
            raise LossError(f"the metric {name!r} is a sum here and a value for each sample there; name them apart")
        # A copy: a slice of the logits, say, would keep all of them until the window ends.
        kept = value.detach().to(dtype=torch.float32 if value.dtype in HALF_DTYPES else value.dtype, copy=True)
        self.per_sample.setdefault(name, []).append(kept)

    def _add_metric(self, name: str, pair: Any) -> None:
        if isinstance(pair, Metric):
            pair = (pair.value, pair.weight)
        if name in self.per_sample:
            raise LossError(f"the metric {name!r} is a sum here and a value for each sample there; name them apart")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise LossError(f"metric {name!r} must be (sum, weight), as the loss is, or Metric, not {describe(pair)}")
        value, weight = pair[0], read_weight(pair[1])
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise LossError(
                f"the sum of metric {name!r} must be one number, not {describe(value)}; use .sum(), or "
                "Metric(value, per_sample=True) for a value for each sample"
            )
        tally = self.metrics.setdefault(name, Tally())
        if not is_zero(weight):
            tally.add(host.value_of(at_least_float32(value)) if isinstance(value, Tensor) else value, weight)

    def _begin(self, name: str, tally: Tally, weight: Weight) -> None:
        """Fixes the term's share, before its first backward pass."""
        if self.known is None:
            if not self.base:
                self.base = name
            base = self.tallies[self.base]
            tally.share = 1.0 if name == self.base or not base.weights else _ratio(base.weights[-1], weight)
            return
        if name not in self.known:
            raise WeightError(f"weigh= counted {sorted(self.known)} but the loss has a term {name!r}; count it too")
        if self.known[name] > 0:
            tally.share = self.known[self.base] / self.known[name]
        elif isinstance(weight, Tensor):  # it may well be zero too: `are_valid` will tell
            tally.share = 0.0
        else:
            raise WeightError(f"weigh= counted 0 for the loss term {name!r}, which has elements; count them too")

    def _term_is_valid(self, name: str, tally: Tally, weight: Weight, base: Weight) -> Flag:
        may_be_empty = self._on_empty == "skip"
        if is_zero(weight):
            return may_be_empty
        error: Any = tally.share * weight - base
        holds: Flag = abs(error) <= base * (EXACT if self.known is None else ROUNDED)
        if may_be_empty:
            holds = holds | (weight == 0)
        return (weight >= 0) & holds & tally.is_valid() & (True if may_be_empty else weight > 0)


def _in_order(name: str, parts: list[Tensor], order: Sequence[int] | None) -> Tensor:
    """The values of all micro-batches as one tensor, in the batch's own order."""
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:]:
            raise LossError(
                f"metric {name!r} has values of shape {tuple(first.shape[1:])} for each sample of one micro-batch and "
                f"{tuple(part.shape[1:])} in another; give values whose shape does not depend on padding"
            )
    whole = torch.cat([part.to(first.device) for part in parts])
    if order is None:
        return whole
    places = torch.empty(len(order), dtype=torch.int64)
    places[torch.tensor(order)] = torch.arange(len(order))
    return whole.index_select(0, places.to(whole.device, non_blocking=True))


def _ratio(base: Weight, weight: Weight) -> Scalar:
    """`base / weight` in float64 where the device has it; 1 where a device's weight turns out to be zero."""
    if not isinstance(base, Tensor) and not isinstance(weight, Tensor):
        return base / weight
    like = base if isinstance(base, Tensor) else weight
    assert isinstance(like, Tensor)
    ratio = host.as_wide(base, like) / host.as_wide(weight, like)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)


def as_terms(returned: Returned, num_samples: int | None) -> list[tuple[str, Loss]]:
    """What a loss function returned, as named terms.

    Args:
        returned: see the table in the README.
        num_samples: the weight that a bare scalar stands for; None where it is not known.

    Returns:
        Name and `Loss` of each term; the name is "loss" where there is only one without a name.

    Raises:
        LossError: it is none of what may be returned.
        WeightError: a bare scalar, and the number of samples is not known.
    """
    if type(returned) is Loss:
        return [("loss", returned)]
    if isinstance(returned, Tensor):
        return [("loss", _as_loss(returned, num_samples))]
    if not isinstance(returned, Mapping):
        raise LossError(
            f"the loss function returned {describe(returned)}; return a Loss(sum, weight), a scalar that is the mean "
            "over the micro-batch's samples, or a dict of them"
        )
    if not returned:
        raise LossError("the loss function returned an empty dict; return at least one term")
    for name in returned:
        if not isinstance(name, str):
            raise LossError(f"loss terms are named by strings, not {describe(name)}")
    return [(name, _as_loss(term, num_samples)) for name, term in returned.items()]


def known_weights(counted: Any) -> dict[str, float]:
    """What `weigh` returned, as total weight by term.

    Args:
        counted: a weight, or a mapping from term to weight; tensors are read.

    Raises:
        WeightError: a weight cannot be.
    """
    items = counted if isinstance(counted, Mapping) else {"loss": counted}
    return {str(name): float(read_weight(weight, wait=True)) for name, weight in items.items()}


def _as_loss(term: object, num_samples: int | None) -> Loss:
    if isinstance(term, Loss):
        return term
    if isinstance(term, Tensor) and term.numel() == 1:
        if num_samples is None:
            raise WeightError(
                "a bare scalar weighs as many samples as its micro-batch holds, which is not known here; return "
                "Loss.mean(value, weight), take is_last from acc.windows, or pass microbatch(is_last, num_samples=...)"
            )
        return Loss.mean(term, num_samples)
    raise LossError(
        f"a loss must be a Loss or a tensor of one element, not {describe(term)}; use .mean() or Loss(sum, weight)"
    )
