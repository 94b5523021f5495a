"""One window: the micro-batches of one update. The region they run in, the reference weight, the backward seeds.

Each micro-batch runs backward from the seed `S / R` on its loss *sum*: S is the loss scale, R (the reference) a power
of two near the window's total weight, so that neither changes a mantissa bit. Only the end of the window, where the
true total W is known, divides: `Totals.divisor = S * W / (n * R)` is what the gradient buffers must be divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumulus import host
from accumulus.errors import WeightError, WindowError
from accumulus.guard import Guard
from accumulus.host import Flag, Scalar
from accumulus.tally import Tally, is_zero, power_of_two
from accumulus.terms import Terms, as_terms, known_weights
from accumulus.types import Returned, Weight, at_least_float32, describe

__all__ = ["Totals", "Window", "WindowRules"]

TRUST = 2.0**8
"""How far the reference may lie from what the first micro-batch's weight suggests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a whole window added up to.

    Args:
        loss: mean loss; NaN where all weights are zero.
        like: some tensor on the loss's device and of its dtype, float32 at least.
        weight: total weight; by term where there are several.
        divisor: what the gradient buffers must be divided by.
        is_valid: whether the weights add up to a defined mean; a tensor where the host does not know yet.
        metrics: name to weighted mean; of a metric per sample, to the values of all samples.
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
        guard: notices gradients and parameters that change behind the window's back.
        before_open: called before anything else of a window.
        weigh: counts the total weights of a batch before any forward pass.
        on_empty: "raise" or "skip": what a window of total weight zero does.

    Raises:
        WeightError: `weigh` is no function, or `on_empty` neither word.
    """

    def __init__(
        self,
        region: AbstractContextManager[object],
        *,
        autocast_device: str | None,
        scale: Callable[[], float],
        guard: Guard,
        before_open: Callable[[], None],
        weigh: Callable[[Any], Any] | None = None,
        on_empty: str = "raise",
    ) -> None:
        if on_empty not in ("raise", "skip"):
            raise WeightError(f"on_empty must be 'raise' or 'skip', not {on_empty!r}")
        if weigh is not None and not callable(weigh):
            raise WeightError(f"weigh must be a function of the whole batch, not {describe(weigh)}")
        self.region = region
        self.autocast_device = autocast_device
        self.scale = scale
        self.guard = guard
        self.before_open = before_open
        self.weigh = weigh
        self.on_empty = on_empty
        self.reference: Scalar | None = None  # the last window's weight per sample
        self.is_open = False

    def open(
        self,
        sizes: Sequence[int] | None,
        batch: Any = None,
        *,
        num_ranks: int = 1,
        order: Sequence[int] | None = None,
    ) -> Window:
        """Starts the window of one batch.

        Args:
            sizes: samples in each micro-batch; None where they are not known beforehand.
            batch: the whole batch, for `weigh`; or what `weigh` would have counted, where `sizes` is None.
            num_ranks: over how many ranks the wrapper averages gradients.
            order: for each position in run order, the sample's place in the batch; None where they are the same.

        Returns:
            The window, a context manager.

        Raises:
            WeightError: `weigh` gave weights that cannot be.
            WindowError: another window of the same step is open, or gradients are already there.
        """
        if self.is_open:
            raise WindowError("a step was called inside the loss function of the same step; use a step of its own")
        self.before_open()
        counted = batch if sizes is None else None if self.weigh is None else self.weigh(batch)
        known = None if counted is None else known_weights(counted)
        try:
            self.guard.start()  # last: from here on the optimizer refuses to step, until the window ends
            return Window(self, sizes, Terms(known, self.on_empty), num_ranks, order)
        except BaseException:
            self.guard.stop()
            raise


class Window:
    """An open window: takes the loss of each micro-batch and runs it backward. Made by `WindowRules.open`."""

    def __init__(
        self,
        rules: WindowRules,
        sizes: Sequence[int] | None,
        terms: Terms,
        num_ranks: int,
        order: Sequence[int] | None = None,
    ) -> None:
        self._rules = rules
        self._sizes = sizes
        self._order = order
        self._num_ranks = num_ranks
        # Where the sizes are not known, the reference goes by windows instead of samples.
        self._num_samples = 1 if sizes is None else sum(sizes)
        self.num_done = 0  # micro-batches
        self._unit: Scalar | None = None  # S / R
        self._like: Tensor | None = None  # a loss, for the device and dtype of results
        self.terms = terms
        self.scale = 1.0  # S; read at the first backward pass

    def __enter__(self) -> Window:
        try:
            self.begin()
            self._rules.region.__enter__()
        except BaseException:
            self.abandon()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._rules.region.__exit__(kind, error, trace)
            self.end()
            if kind is not None:
                self._rules.guard.discard()
        except BaseException:  # Ctrl-C may strike here too
            self.abandon()
            raise

    def begin(self) -> None:
        """Starts from freshly cast weights."""
        # An autocast region around the user's whole loop would keep copies of the weights from before the update.
        torch.clear_autocast_cache()
        self._rules.is_open = True

    def end(self) -> None:
        """Drops the cast weights: the update is about to change them."""
        self._rules.is_open = False
        self._rules.guard.stop()
        torch.clear_autocast_cache()

    def abandon(self) -> None:
        """Ends a window that failed, wherever that was; may be called again. No gradient stays."""
        self.end()
        self._rules.guard.discard()

    def backward(self, returned: Returned, size: int | None = None) -> None:
        """Runs one micro-batch backward and adds it to the tallies.

        Args:
            returned: what the loss function returned.
            size: samples in the micro-batch, where the window was opened without sizes.

        Raises:
            LossError: it is not a loss, or has no graph.
            WeightError: `weigh` gave no total for a term.
            WindowError: the loss function changed gradients or parameters itself.
        """
        if self._sizes is not None:
            size = self._sizes[self.num_done]
            self.num_done += 1
        self._rules.guard.check()
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for name, loss in as_terms(returned, size):
            root = at_least_float32(loss.sum)
            if self._like is None:
                self._like = root.detach()
            tally = self.terms.add(name, loss, root, size)
            if tally is not None:
                if self._unit is None:
                    self._start(loss.weight, 1 if self._sizes is None or size is None else size)
                roots.append(root)
                seeds.append(self._seed(tally, root))
        if roots:
            self._run_backward(roots, seeds)
            self._rules.guard.note()

    def totals(self) -> Totals:
        """Closes the tallies.

        Returns:
            The window's totals.

        Raises:
            LossError: a metric per sample does not cover the samples.
            WeightError: the weights are all zero, or the terms' shares differ between micro-batches. Weights that
                lie on a device are not read: `Totals.is_valid` tells, and `terms.explain` says why.
        """
        self._rules.guard.check()
        weights = self.terms.weights()
        is_valid = self.terms.are_valid(weights)
        if is_valid is False and (problem := self.terms.explain()):
            raise WeightError(problem)
        single = next(iter(weights.values())) if len(weights) == 1 else weights
        return Totals(
            loss=self.terms.mean_loss(weights),
            like=self._like if self._like is not None else torch.zeros(()),
            weight=single if weights else 0,
            divisor=self._divisor(weights.get(self.terms.base, 0)),
            is_valid=is_valid,
            metrics=self.terms.results(self.num_done, self._order),
            num_microbatches=self.num_done,
        )

    def _start(self, weight: Weight, size: int) -> None:
        """Fixes scale and reference, at the latest moment: the scale waits for the last step's outcome."""
        self.scale = self._rules.scale()
        known = self.terms.known
        planned = known[self.terms.base] if known else weight / size * self._num_samples
        reference = power_of_two(planned)
        if not known and self._rules.reference is not None:
            # The last window knew all of its weights, the first micro-batch only its own, but of this window.
            likely = power_of_two(self._rules.reference * self._num_samples)
            if isinstance(reference, Tensor) or isinstance(likely, Tensor):
                reference = likely
            else:
                reference = min(max(likely, reference / TRUST), reference * TRUST)
        self._unit = self.scale / reference

    def _seed(self, tally: Tally, root: Tensor) -> Tensor:
        seed = tally.seed
        if seed is None or seed.dtype != root.dtype or seed.device != root.device or seed.shape != root.shape:
            assert self._unit is not None  # set by _start
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
        was_on = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        try:
            torch.autograd.backward(roots, seeds)
        finally:
            torch.set_autocast_enabled(device, was_on)

    def _divisor(self, base_weight: Weight) -> Scalar:
        if is_zero(base_weight) or self._unit is None:
            return 1.0
        divisor = self._unit * base_weight / self._num_ranks
        per_sample = base_weight / self._num_samples
        if isinstance(divisor, Tensor):  # an impossible weight must not look like a non-finite gradient
            possible = (divisor > 0) & divisor.isfinite()
            divisor = torch.where(possible, divisor, 1.0)
            per_sample = torch.where(possible, per_sample, 1.0)
        self._rules.reference = per_sample
        return divisor

    def state_dict(self) -> dict[str, Any]:
        """Everything but the gradients, as numbers, and as CPU tensors what lay on a device."""
        like = self._like
        return {
            "num_done": self.num_done,
            "scale": self.scale,
            "unit": None if self._unit is None else host.to_cpu(self._unit),
            "like": None if like is None else (str(like.dtype).removeprefix("torch."), str(like.device)),
            **self.terms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, in a window that has just been opened."""
        self.num_done, self.scale = int(state["num_done"]), float(state["scale"])
        device = torch.device("cpu")
        if state["like"] is not None:
            dtype, device = getattr(torch, state["like"][0]), torch.device(state["like"][1])
            self._like = torch.zeros((), dtype=dtype, device=device)
        self._unit = None if state["unit"] is None else host.to_device(state["unit"], device)
        self.terms.load_state_dict(state, device)
        self._rules.guard.note()
