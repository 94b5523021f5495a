"""`diagnose`: runs copies of a model, in float32 for what its numbers are, in its precision for what comes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accumulus.errors import AccumulusError, BatchError
from accumulus.numerics.advice import find
from accumulus.numerics.evidence import Evidence
from accumulus.numerics.formats import FP16, format_of
from accumulus.numerics.payoff import measure_payoff
from accumulus.numerics.ranges import RangeRow, RangeWatch
from accumulus.numerics.report import NumericsReport
from accumulus.numerics.scales import find_scales
from accumulus.numerics.subject import Subject, all_as_before, make_subject
from accumulus.numerics.trace import DtypeTrace, TraceTable, short
from accumulus.origin import Origin, OriginWatch, trace_origin
from accumulus.precision import Precision
from accumulus.types import LossFn, describe

__all__ = ["diagnose"]


def diagnose(
    step_or_model: Any,
    batches: Iterable[Any],
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    precision: str | Precision | None = None,
    microbatch: Any = None,
    collate: Callable[[Any], Any] | None = None,
    max_steps: int = 4,
    sample: int = 2**13,
    underflow_ratio: float = 0.01,
    rounds: int = 3,
) -> NumericsReport:
    """What low precision does to a model's numbers: ranges, loss scale, the first non-finite value, dtypes, advice.

    Deep copies are run, never the model itself: one in float32, which learns from the batches while its activations,
    gradients, weights and updates are counted, and one in the precision, operator by operator. Model, optimizer,
    scheduler, loss scale and all random states stay as they are, bit for bit, also after an error.

    Args:
        step_or_model: a `TrainStep`; or a model, with `loss_fn`. Models with 16-bit parameters are taken too.
        batches: an iterable of batches, as for a step; the first `max_steps` are used.
        loss_fn: of model and micro-batch; a model needs it.
        optimizer: of the model; without one, updates are not looked at.
        precision: what to ask about; by default the step's own, for a model "fp16" or what its parameters are.
        microbatch: samples a micro-batch, as for a step; by default the step's own, for a model whole batches.
        collate: makes a micro-batch of a list of samples.
        max_steps: batches to look at.
        sample: numbers counted of a tensor at most; its largest is taken of all.
        underflow_ratio: share of a layer's gradient, by magnitude, that may underflow inside the window of loss scales.
        rounds: passes to time in each precision; 0 does not time.

    Returns:
        The report. `print(report)`, `report.findings`, `report.to_dict()`, `report.to_page()`.

    Raises:
        BatchError: there is no batch, or a single one was given in place of several.
        LossError, OptimizerError, PrecisionError: arguments that cannot work.
        UnsupportedError: the model cannot be copied.

    Cost:
        For each batch two steps, in float32 and in the precision, and four passes of the first one more, some of them
        operator by operator; a copy of model and optimizer at a time.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> report = diagnose(model, [torch.randn(8, 4)], loss_fn=lambda model, rows: model(rows).square().mean())
        >>> report.findings
        ()
    """
    subject = make_subject(
        step_or_model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        precision=precision,
        microbatch=microbatch,
        collate=collate,
    )
    check_number("max_steps", max_steps, 1)
    check_number("sample", sample, 1)
    if (
        isinstance(underflow_ratio, bool)
        or not isinstance(underflow_ratio, (int, float))
        or not 0 < underflow_ratio < 1
    ):
        raise BatchError(f"underflow_ratio must be a number between 0 and 1, not {describe(underflow_ratio)}")
    with all_as_before(subject.model, subject.device):
        taken = take(batches, max_steps)
        return examine(subject, taken, sample=sample, underflow_ratio=underflow_ratio, rounds=rounds)


def examine(
    subject: Subject, batches: list[Any], *, sample: int, underflow_ratio: float, rounds: int
) -> NumericsReport:
    """All passes, one after the other.

    Args:
        subject: what is diagnosed; only copies of it are run.
        batches: at least one.
        sample: numbers counted of a tensor.
        underflow_ratio: share that may underflow.
        rounds: passes to time.

    Returns:
        The report.
    """
    rows, notes = count_ranges(subject, batches, sample)
    seen = look_at_operators(subject, batches[0])
    form = format_of(subject.narrow_dtype) if subject.narrow_dtype is not None else None
    gathered = Evidence(
        subject=subject,
        rows=rows,
        trace=seen.trace,
        scales=None,
        origin=None,
        only_above=None,
        infinities=seen.infinities,
    )
    scales = find_scales(
        rows,
        form or FP16,
        underflow_ratio=underflow_ratio,
        counts=gathered.counts,
    )
    chosen = subject.scale if scales is None else scales.chosen
    origin, only_above = (None, None) if seen.problem else find_first(subject, batches, chosen)
    evidence = replace(gathered, scales=scales, origin=origin, only_above=only_above)
    runs_well = (origin is None or only_above is not None) and not seen.problem
    is_timed = rounds > 0 and subject.precision.compute is not None and runs_well
    return NumericsReport(
        precision=str(subject.precision) if form is None or subject.precision.compute else f"{form.name} parameters",
        device=str(subject.device),
        num_steps=len(batches),
        loss_scale=subject.scale,
        rows=tuple(rows),
        scales=scales,
        origin=origin,
        only_above=only_above,
        trace=seen.trace,
        payoff=measure_payoff(subject.copied(), batches[0], seen.trace, rounds=rounds) if is_timed else None,
        findings=find(evidence),
        notes=(*notes, seen.problem) if seen.problem else notes,
    )


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What one batch showed, run operator by operator in its precision.

    Args:
        trace: which ran in which dtype.
        infinities: made from finite numbers in the forward pass.
        problem: why the batch does not run in the precision, in a sentence; empty where it does.
    """

    trace: TraceTable
    infinities: list[Origin]
    problem: str = ""


def look_at_operators(subject: Subject, batch: Any) -> Operators:
    """Runs a batch in its precision, or says why that cannot be: a device need not have every operator in 16 bits."""
    try:
        trace, infinities = trace_operators(subject, batch)
    except RuntimeError as error:
        if subject.narrow_dtype is None or isinstance(error, AccumulusError):
            raise
        line = next(iter(str(error).splitlines()), "")
        problem = (
            f"The model does not run in {short(subject.narrow_dtype)} on {subject.device} ({line}): its operators were "
            "not looked at, and the rest follows from the ranges."
        )
        return Operators(
            trace=TraceTable(uses=(), casts=(), products=(), peaks=(), outputs={}), infinities=[], problem=problem
        )
    return Operators(trace=trace, infinities=infinities)


def count_ranges(subject: Subject, batches: list[Any], sample: int) -> tuple[list[RangeRow], tuple[str, ...]]:
    """Ranges of a copy that learns from the batches in float32.

    Returns:
        Rows, and sentences on how they came about.
    """
    steps = f"{len(batches)} step{'s' if len(batches) > 1 else ''}"
    note = (
        f"Ranges are of {steps} of a copy in float32, at loss scale 1, sampled: at most {sample:,} numbers of a tensor."
    )
    wide = subject.widened()
    try:
        return watch(wide, batches, sample), (note,)
    except RuntimeError as error:  # code that is written for 16-bit tensors
        if subject.narrow_dtype is None:
            raise
        rows = watch(replace(subject.copied(), scale=1.0), batches, sample)
        line = next(iter(str(error).splitlines()), "")
        return rows, (note, f"They are after rounding to 16 bits, as the model does not run in float32 ({line}).")


def watch(copied: Subject, batches: list[Any], sample: int) -> list[RangeRow]:
    """Lets a copy learn while it is watched."""
    learns = copied.optimizer is not None and all(
        p.dtype not in (torch.float16, torch.bfloat16) for p in copied.model.parameters()
    )
    copied = copied if learns else replace(copied, optimizer=None)
    with RangeWatch(copied.model, copied.optimizer, sample=sample) as counted:
        for batch in batches:
            copied.learn(batch)
        return counted.rows()


def trace_operators(subject: Subject, batch: Any) -> tuple[TraceTable, list[Origin]]:
    """A batch in its precision, twice: which operator ran in which dtype, and which made infinities.

    Returns:
        The table, and the infinities that were made from finite numbers.
    """
    copied = subject.copied()
    with DtypeTrace(copied.model) as trace:
        copied.run(batch, scale=subject.scale, look=trace.whereabouts.note)
    copied.drop_gradients()
    if subject.narrow_dtype is None:
        return trace.table(), []
    with OriginWatch(copied.model) as origins:
        copied.run(batch, scale=subject.scale, look=origins.whereabouts.note)
    return trace.table(), origins.infinities


def find_first(subject: Subject, batches: list[Any], chosen: float) -> tuple[Origin | None, float | None]:
    """The origin of the first non-finite value of the first batch that has one.

    Args:
        subject: what is diagnosed.
        batches: to look at, in order.
        chosen: a loss scale that should do.

    Returns:
        The origin; and the present scale, where the batch is finite at the chosen one.
    """
    copied = subject.copied()
    for batch in batches:
        if copied.is_finite(batch, subject.scale):
            continue
        only_above = subject.scale if subject.scale != 1.0 and copied.is_finite(batch, chosen) else None
        scale = subject.scale if only_above is not None else min(chosen, subject.scale)
        if only_above is None and not copied.is_finite(batch, 1.0):
            scale = 1.0  # what no scale cures must not be put down to the scale
        origin = trace_origin(
            copied.model,
            lambda look, batch=batch, scale=scale: copied.run(batch, scale=scale, look=look),  # type: ignore[misc]
            copied.gradients,
        )
        return origin, only_above
    return None, None


def take(batches: Iterable[Any], max_steps: int) -> list[Any]:
    """The first batches.

    Raises:
        BatchError: there is none, or it is a batch itself.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise BatchError(f"batches must be an iterable of batches, such as [batch], not {describe(batches)}")
    taken = list(itertools.islice(batches, max_steps))
    if not taken:
        raise BatchError("there is no batch to look at; give at least one")
    return taken


def check_number(name: str, value: object, least: int) -> None:
    """Refuses what is no number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BatchError(f"{name} must be an integer of at least {least}, not {describe(value)}")
