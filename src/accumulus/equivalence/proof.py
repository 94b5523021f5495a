"""`check`: runs a batch whole and split, on copies in float64, compares, and asks why where they differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from accumulus import pytree
from accumulus.dist.sync import choose_sync
from accumulus.engine import device_of
from accumulus.equivalence import remedies
from accumulus.equivalence.causes import find_causes
from accumulus.equivalence.compare import LARGEST_ALLOWED, Floor, combined_error, differences, measure_floor
from accumulus.equivalence.lab import Lab, undisturbed
from accumulus.equivalence.lowered import measure_precision
from accumulus.equivalence.replica import cast, replicate_original
from accumulus.equivalence.report import Cause, Difference, EquivalenceReport, Kind, PrecisionGap, SplitOutcome
from accumulus.equivalence.runs import Outcome, accumulated, whole
from accumulus.equivalence.splits import SPLITS, make_splits
from accumulus.equivalence.suspects import find_draws
from accumulus.equivalence.trace import no_trace
from accumulus.errors import AccumulusError, BatchError, LossError, OptimizerError, UnsupportedError
from accumulus.memory.failure import is_out_of_memory, let_go
from accumulus.microbatch import Split
from accumulus.precision import Precision
from accumulus.together import as_one
from accumulus.types import Batch, LossFn, Optimizer, describe
from accumulus.update import check_optimizer

__all__ = ["check"]

BELIEVED = LARGEST_ALLOWED[torch.float64]
"""A floor that reaches it is not rounding but order: what a permutation changes, a split may, too."""


def check(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer: Optimizer | None = None,
    precision: str | Precision = "fp32",
    splits: Sequence[str | int | Split] = SPLITS,
    collate: Callable[[Any], Any] | None = None,
) -> EquivalenceReport:
    """Does accumulation give the whole batch's update on this model and data? If not, what is in the way?

    The batch runs whole and split several ways, on copies in float64 (float32 where an operator has no float64).
    Loss, every parameter's gradient and every saved buffer are compared, beside the rounding that a mere permutation
    of the samples makes. Where they differ, one suspect after the other is switched off to see what is the cause.

    Args:
        model: the module, as you train it, on its device and in training mode if it is trained in that.
        loss_fn: as for `TrainStep`.
        batch: a batch as you train on it; 8 to 32 samples, of different lengths if there are lengths, are enough. With
            `collate`, a list of samples. One that does not fit in memory is halved until it does.
        optimizer: says which parameters are trained; by default all of the model's that require a gradient.
        precision: also tells how far gradients in this precision lie from float64's, whole and split; not for "fp32".
        splits: some of "by_count", "uneven", "singles", "reordered", "by_tokens", sizes, rules as `by_count(4)`.
        collate: makes a micro-batch of a list of samples.

    Returns:
        The report: true where all is equal. `print(report)` shows it, `report.to_dict()` is plain values for JSON.

    Raises:
        BatchError: the batch cannot be cut, or holds a single sample.
        LossError: what the loss function returns is no loss, or it is not finite.
        OptimizerError: the model has nothing to train, or the optimizer holds none of its parameters.
        PrecisionError: the precision is unknown, or cannot train parameters like these.
        SplitError: a split is unknown or cannot be used.
        UnsupportedError: the model is wrapped for several ranks, or cannot be copied.

    Cost:
        About ten times a forward and backward pass in float64, and three copies of the model; where something differs,
        some dozens of passes over a few samples more. The model, the optimizer, gradients, random states and training
        modes are afterwards as before, bit for bit, also after an error.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        >>> report = check(model, lambda model, batch: model(batch).square().mean(), torch.randn(8, 4))
        >>> report.verdict, [(str(cause.kind), cause.where) for cause in report.causes]
        ('not equal', [('module mixes samples', ('1 (BatchNorm1d)',))])
    """
    started = time.perf_counter()
    _check_arguments(model, loss_fn, optimizer)
    asked = Precision.parse(precision)
    device = device_of(model, None)
    trial = _Trial(model, loss_fn, batch, optimizer=optimizer, collate=collate, device=device)
    with undisturbed(device) as states:
        report = trial.run(states, splits, asked)
    return replace(report, seconds=time.perf_counter() - started)


def _check_arguments(model: Any, loss_fn: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptimizerError(f"model must be a torch.nn.Module, not {describe(model)}")
    if not callable(loss_fn):
        raise LossError(f"loss_fn must be a function of model and micro-batch, not {describe(loss_fn)}")
    choose_sync(model)
    if optimizer is not None:
        check_optimizer(model, as_one(optimizer))
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptimizerError(f"the model ({type(model).__name__}) has no parameters to train")


@dataclass
class _Trial:
    """One check: what the user gave, and what turned up on the way."""

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    optimizer: Any = field(kw_only=True)
    collate: Any = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    notes: list[str] = field(default_factory=list)

    def run(self, states: Any, splits: Sequence[Any], precision: Precision) -> EquivalenceReport:
        lab, right, dtype = self._reference(states)
        rules, notes = make_splits(splits, lab.batch, has_collate=self.collate is not None)
        self.notes += notes
        floor = measure_floor(lab, right, dtype)
        draws = no_trace(lambda: find_draws(lab)) or ()
        lab, right, floor, outcomes, problems = self._compare(lab, right, floor, rules, dtype, draws=draws)
        rows = differences(outcomes, right, floor)
        is_equal = bool(outcomes) and all(row.is_equal for row in rows)
        causes = _random_cause(draws, is_equal) if draws and lab.draws != "own" else []
        if not is_equal:
            causes += self._ask_why(lab, list(rules.values()), floor, rows)
        if not outcomes and not any(cause.is_wrong and cause.kind is not Kind.UNKNOWN for cause in causes):
            raise UnsupportedError(f"no split could be run: {next(iter(problems.values()))}")
        measured: tuple[Any, Sequence[PrecisionGap]] = (None, ())
        if precision.name != "fp32" and outcomes:
            tried = [name for name in ("by_count", "singles") if name in outcomes] or list(outcomes)[:1]
            measured = measure_precision(self._own(lab), right, precision, [rules[name] for name in tried])
        return EquivalenceReport(
            is_equal=is_equal,
            dtype=str(dtype).removeprefix("torch."),
            num_samples=lab.num_samples,
            differences=tuple(rows),
            splits=tuple(_outcome_of(name, outcomes, problems, right, floor) for name in rules),
            causes=tuple(causes),
            precision=precision.name,
            precision_total=measured[0],
            precision_errors=tuple(measured[1]),
            notes=tuple(self.notes),
        )

    def _reference(self, states: Any) -> tuple[Lab, Outcome, torch.dtype]:
        """The whole batch, as much of it as fits, in the widest dtype that its operators have."""
        dtypes = [torch.float64, torch.float32] if self.device.type != "mps" else [torch.float32]
        failure: Exception | None = None
        for dtype in dtypes:
            lab = self._lab(states, dtype)
            try:
                fitting = (*self._fitting(lab), dtype)
                if failure is not None:
                    says = next(iter(str(failure).splitlines()), type(failure).__name__).rstrip(".")
                    self.notes.append(f"Compared in float32, as it does not run in float64: {says}.")
                return fitting
            except AccumulusError:
                raise
            except (RuntimeError, TypeError, NotImplementedError) as error:
                failure = error if failure is None else failure
                last = error
        raise last from failure

    def _fitting(self, lab: Lab) -> tuple[Lab, Outcome]:
        while True:
            try:
                right = whole(lab)
            except Exception as error:
                if not is_out_of_memory(error) or lab.num_samples < 4:
                    raise
                let_go(error, self.device)
                half = lab.num_samples // 2
                self.notes.append(f"{lab.num_samples} samples whole did not fit in memory; compared at {half}.")
                lab = lab.but(batch=_first(lab.batch, half, self.collate))
                continue
            if not _is_finite(right):
                raise LossError(f"the whole batch gives a loss of {right.loss:g} or a gradient that is not finite")
            return lab, right

    def _lab(self, states: Any, dtype: torch.dtype | None) -> Lab:
        prototype = replicate_original(self.model, self.loss_fn, self.optimizer)
        lab = Lab(
            prototype=prototype if dtype is None else cast(prototype, dtype),
            batch=self.batch,
            collate=self.collate,
            device=self.device,
            dtype=dtype,
            states=states,
        )
        if self.collate is not None and (not isinstance(self.batch, Sequence) or isinstance(self.batch, (str, tuple))):
            raise BatchError(f"with collate=, a batch is a list of samples, not {describe(self.batch)}")
        if lab.num_samples < 2:
            raise BatchError(f"a batch of {lab.num_samples} sample cannot be split; give at least 2, better 8 or more")
        return lab

    def _own(self, lab: Lab) -> Lab:
        """The same experiment in the model's own dtype."""
        return self._lab(lab.states, None).but(batch=lab.batch, draws=lab.draws, dtype=torch.float32)

    def _compare(
        self, lab: Lab, right: Outcome, floor: Floor, rules: Mapping[str, Split], dtype: torch.dtype, *, draws: Any
    ) -> tuple[Lab, Outcome, Floor, dict[str, Outcome], dict[str, str]]:
        """Every split; where there is randomness, with draws that can be compared."""
        outcomes, problems = _run_splits(lab, right, rules)
        for kind in ("shared", "mean") if draws else ():
            if outcomes and all(row.is_equal for row in differences(outcomes, right, floor)):
                break
            other = lab.but(draws=kind)
            try:
                right = whole(other)
            except LossError:  # with every draw at its mean nothing may be left to learn from
                break
            lab, floor = other, measure_floor(other, right, dtype)
            outcomes, problems = _run_splits(lab, right, rules)
        if lab.draws == "mean" and all(row.is_equal for row in differences(outcomes, right, floor)):
            hidden = _behind_the_mean(lab, rules, dtype)
            lab, right, floor, outcomes, problems = hidden or (lab, right, floor, outcomes, problems)
        self.notes += [f"{name} could not be run: {problem}." for name, problem in problems.items()]
        return lab, right, floor, outcomes, problems

    def _ask_why(self, lab: Lab, rules: list[Split], floor: Floor, rows: Sequence[Difference]) -> list[Cause]:
        unequal = [row.name for row in rows if row.what == "buffer" and not row.is_equal]
        # Experiments in this dtype: what they see must stand out of rounding, and nothing is near it.
        tolerance = 1e-9 if lab.dtype is torch.float64 else 1e-4
        if floor.tolerance < BELIEVED:
            tolerance = max(tolerance, floor.tolerance)
        inquiry = find_causes(lab, rules, tolerance=tolerance, unequal_buffers=unequal)
        self.notes += inquiry.notes
        return inquiry.causes


def _behind_the_mean(
    lab: Lab, rules: Mapping[str, Split], dtype: torch.dtype
) -> tuple[Lab, Outcome, Floor, dict[str, Outcome], dict[str, str]] | None:
    """What only draws at their mean had hidden: noise times a batch's statistic is nothing where the noise is zero.

    Returns:
        The runs with draws off their mean, where these differ; None where all is equal, or where they leave nothing.
    """
    other = lab.but(draws="tilted")
    try:
        right = whole(other)
    except LossError:
        return None
    if not _is_finite(right):
        return None
    floor = measure_floor(other, right, dtype)
    outcomes, problems = _run_splits(other, right, rules)
    if all(row.is_equal for row in differences(outcomes, right, floor)):
        return None
    return other, right, floor, outcomes, problems


def _is_finite(found: Outcome) -> bool:
    finite = [bool(torch.isfinite(gradient).all()) for gradient in found.gradients.values()]
    return math.isfinite(found.loss) and all(finite)


def _run_splits(lab: Lab, right: Outcome, rules: Mapping[str, Split]) -> tuple[dict[str, Outcome], dict[str, str]]:
    outcomes: dict[str, Outcome] = {}
    problems: dict[str, str] = {}
    for name, rule in rules.items():
        try:
            outcomes[name] = accumulated(lab, rule, weights=right.weights)
        except Exception as error:  # a layer that refuses single samples, terms whose shares differ: it is reported
            if is_out_of_memory(error):
                raise
            text = next(iter(str(error).splitlines()), "").rstrip(".")
            problems[name] = f"{type(error).__name__}: {text}"
    return outcomes, problems


def _outcome_of(
    name: str, outcomes: Mapping[str, Outcome], problems: Mapping[str, str], right: Outcome, floor: Floor
) -> SplitOutcome:
    found = outcomes.get(name)
    if found is None:
        return SplitOutcome(name=name, sizes=(), error=float("nan"), is_equal=False, problem=problems[name])
    is_equal = all(row.is_equal for row in differences({name: found}, right, floor))
    return SplitOutcome(name=name, sizes=found.sizes, error=combined_error(found, right), is_equal=is_equal)


def _random_cause(draws: Sequence[str], is_equal: bool) -> list[Cause]:
    says = "With draws that do not depend on the split" if is_equal else "With comparable draws, and causes below aside"
    return [
        Cause(
            kind=Kind.RANDOM,
            where=tuple(draws),
            evidence=f"{says} the results agree." if is_equal else "It draws random numbers in the forward pass.",
            remedy=remedies.RANDOM,
            is_confirmed=is_equal,
        )
    ]


def _first(batch: Any, count: int, collate: Any) -> Any:
    if collate is not None:
        return list(batch)[:count]
    tree = pytree.sliceable(batch)
    return next(tree.cut([count, tree.length - count]))
