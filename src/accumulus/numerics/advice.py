"""At most ten findings, worst first: module, figure, what to change, how sure. None is a good result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from accumulus.numerics.evidence import Evidence, Finding
from accumulus.numerics.formats import BF16, FP16
from accumulus.numerics.ranges import RangeRow
from accumulus.numerics.scales import layer_of, power
from accumulus.origin import Origin
from accumulus.together import members
from accumulus.types import HALF_DTYPES

__all__ = ["find"]

MOST = 10
SURE, LIKELY, POSSIBLE = "certain", "likely", "possible"

NEAR = 2.0
"""Activations within this factor of a format's end overflow soon."""

LOST = 0.1
"""Share of a layer's gradient, by magnitude, that may vanish without being a finding."""

STILL = 0.5
"""Share of a weight's elements that may stand still."""

BLURRED = 0.1
"""Rounding of a softmax's largest logits that changes a probability by 10 %."""


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """The findings.

    Args:
        evidence: what was measured.

    Returns:
        At most ten, worst first; one a module and kind.
    """
    found = [finding for rule in RULES for finding in rule(evidence)]
    found.sort(key=lambda finding: -finding.severity)
    return tuple(found[:MOST])


def of_origin(evidence: Evidence) -> Iterator[Finding]:
    """A non-finite value that reached the loss or a gradient."""
    origin = evidence.origin
    if origin is None or (evidence.only_above is not None and evidence.subject.adapts):
        return  # an adaptive scale finds its way down by itself
    when = "" if evidence.only_above is None else f"At loss scale {power(evidence.only_above)}: "
    yield Finding(
        kind="non-finite",
        module=origin.module,
        figure=f"{origin.value} in {origin.dtype}",
        text=f"{when}{sentence(str(origin))}",
        change=remedy_of(origin, evidence) if evidence.only_above is None else scale_remedy(evidence),
        sureness=SURE,
        severity=100,
    )


def remedy_of(origin: Origin, evidence: Evidence) -> str:
    """What to do about an operator that makes NaN or infinity."""
    if origin.source in ("given", "held"):
        return "Look at the data before the model, and at the state that was loaded."
    if origin.operator in ("to_copy", "add", "masked_fill") and "finfo" in origin.note:
        return "Write the mask with torch.finfo(scores.dtype).min, or as a bool mask."
    if "mask" in origin.note:
        return "Leave one position of every row open, or mask with torch.finfo(scores.dtype).min."
    if origin.is_backward:
        return (
            "Its derivative is infinite there: keep the input away from that point, as in log(x + eps), "
            "sqrt(x + eps) or x / (norm + eps), with an eps that the dtype can hold."
        )
    if origin.dtype == "float16":
        return "Run this operator in float32 (x.float()), or scale its inputs down; bf16 has float32's range."
    return "Keep its input inside of the operator's domain, with clamp or an eps."


def scale_remedy(evidence: Evidence) -> str:
    """What to do about a loss scale that is too large."""
    chosen = "" if evidence.scales is None else f"StaticScale({evidence.scales.chosen:g}) or "
    return f"Use {chosen}DynamicScale()."


def of_overflow(evidence: Evidence) -> Iterator[Finding]:
    """Activations beyond fp16, or nearly."""
    if evidence.form is not FP16:
        return
    rows = [row for row in evidence.rows if row.kind == "activation" and evidence.is_narrow(row)]
    beyond = [row for row in rows if row.histogram.largest * NEAR >= FP16.overflow_from]
    if not beyond or (evidence.origin is not None and not evidence.origin.is_backward):
        return  # what overflowed has been named
    worst = max(innermost(beyond), key=lambda row: row.histogram.largest)
    largest, is_over = worst.histogram.largest, worst.histogram.overflows(FP16)
    yield Finding(
        kind="overflow" if is_over else "near overflow",
        module=worst.name,
        figure=f"{largest:.3g}",
        text=f"{worst.name!r} puts out numbers up to {largest:.3g}, and fp16 ends at 65,504{others(beyond, worst)}.",
        change="Run it in float32, scale its weights or inputs down, or use bf16.",
        sureness=SURE if is_over else POSSIBLE,
        severity=95 if is_over else 40,
    )


def of_softmax(evidence: Evidence) -> Iterator[Finding]:
    """Softmaxes over 16-bit logits so large that their rounding changes probabilities."""
    for peak in evidence.trace.peaks:
        form = FP16 if peak.dtype == "float16" else BF16
        rounding = form.spacing_at(peak.largest) / 2
        if rounding < BLURRED:
            continue
        yield Finding(
            kind="softmax in 16 bits",
            module=peak.module,
            figure=f"largest logit {peak.largest:.3g}, spread {peak.spread:.3g}",
            text=(
                f"{place(peak.module)} takes a {peak.operator} of {form.name} logits up to {peak.largest:.3g} (spread "
                f"{peak.spread:.3g}), which are rounded by up to {rounding:.2g}: probabilities are off by "
                f"{math.expm1(min(rounding, 50)):.0%}."
            ),
            change="Compute the logits' softmax in float32: x.float().softmax(-1); and keep logits small.",
            sureness=LIKELY,
            severity=80,
        )


def of_vanishing(evidence: Evidence) -> Iterator[Finding]:
    """Gradients that 16 bits round to zero at the present scale, or at the best there is."""
    form, scales = evidence.form, evidence.scales
    if form is None or scales is None:
        return
    adapts = evidence.subject.adapts
    scale = scales.chosen if adapts else evidence.subject.scale
    rows = [row for row in evidence.rows if row.kind.endswith("gradient") and evidence.counts(row)]
    lost = {row: row.histogram.lost_ratio(form, scale) for row in rows if row.histogram.num_nonzero}
    worst = max(lost, key=lambda row: lost[row], default=None)
    if worst is None or lost[worst] < LOST:
        return
    gone = [row for row in lost if lost[row] >= LOST]
    layer, share = layer_of(worst), f"{lost[worst]:.0%}"
    where = "no loss scale" if scale == 1.0 and not adapts else f"loss scale {power(scale)}"
    if scales.one_serves_all:
        change = f"Use a loss scale of {power(scales.chosen)}; DynamicScale() finds one by itself."
    else:
        change = (
            f"No scale serves all layers: this one needs {power(scales.needs_most.low)}, and "
            f"{scales.bears_least.layer!r} overflows above {power(scales.high)}. Use bf16, or run this layer in "
            "float32."
        )
    yield Finding(
        kind="vanishing gradient",
        module=layer,
        figure=share,
        text=(
            f"{share} of the {worst.kind} of {worst.name!r} vanishes in {form.name} with {where} (the largest is "
            f"{worst.histogram.largest:.2g}){others(gone, worst)}."
        ),
        change=change,
        sureness=SURE if lost[worst] > 0.5 else LIKELY,
        severity=75 if lost[worst] > 0.5 else 60,
    )


def of_activations(evidence: Evidence) -> Iterator[Finding]:
    """Activations that 16 bits round to zero."""
    form = evidence.form
    if form is None:
        return
    rows = [row for row in evidence.rows if row.kind == "activation" and evidence.is_narrow(row)]
    lost = {row: row.histogram.lost_ratio(form) for row in rows if row.histogram.num_nonzero}
    gone = [row for row in lost if lost[row] > 0.5]
    if gone:
        worst = gone[0]
        yield Finding(
            kind="vanishing activation",
            module=worst.name,
            figure=f"{lost[worst]:.0%}",
            text=(
                f"{lost[worst]:.0%} of what {worst.name!r} puts out becomes zero in {form.name} (the largest is "
                f"{worst.histogram.largest:.2g}){others(gone, worst)}."
            ),
            change="Scale it up, run it in float32, or use bf16.",
            sureness=SURE,
            severity=70,
        )


def of_epsilon(evidence: Evidence) -> Iterator[Finding]:
    """An optimizer's epsilon that its parameters' dtype rounds to zero."""
    if evidence.subject.optimizer is None:
        return
    names = {parameter: name for name, parameter in evidence.subject.model.named_parameters()}
    for member in members(evidence.subject.optimizer):
        for group in member.param_groups:
            eps = group.get("eps")
            held = [p for p in group["params"] if p.dtype == torch.float16 and p.requires_grad]
            if isinstance(eps, float) and 0 < eps < FP16.zero_below and held:
                name = names.get(held[0], "a parameter")
                yield Finding(
                    kind="optimizer epsilon",
                    module=name,
                    figure=f"eps {eps:g}",
                    text=(
                        f"{type(member).__name__} adds eps {eps:g} in fp16 for {name!r}"
                        f"{f' and {len(held) - 1} more' if len(held) > 1 else ''}, and fp16 rounds it to zero: a "
                        "gradient of zero becomes 0/0."
                    ),
                    change=("Keep parameters in float32 (model.float(), precision='fp16'); fp16 holds 6e-8 at least."),
                    sureness=SURE,
                    severity=90,
                )
                return


def of_standing_still(evidence: Evidence) -> Iterator[Finding]:
    """16-bit weights whose updates round to nothing."""
    dtypes = evidence.subject.original_dtypes
    still = {
        row: row.still_ratio(dtypes[row.name])
        for row in evidence.rows
        if row.kind == "update" and dtypes.get(row.name) in HALF_DTYPES and row.histogram.num_nonzero
    }
    stuck = [row for row in still if still[row] > STILL]
    if not stuck:
        return
    worst = max(stuck, key=lambda row: still[row] * row.histogram.num_counted)
    name = "bf16" if dtypes[worst.name] == torch.bfloat16 else "fp16"
    yield Finding(
        kind="weights stand still",
        module=worst.name,
        figure=f"{still[worst]:.0%}",
        text=(
            f"{still[worst]:.0%} of the updates of {worst.name!r} round to nothing in {name} (half of them are below "
            f"{worst.histogram.quantile(0.5):.1g}){others(stuck, worst)}."
        ),
        change=(
            "Keep the weights in float32 (model.float(), precision='bf16'), round stochastically, or raise the "
            "learning rate."
        ),
        sureness=SURE,
        severity=85,
    )


def of_hidden(evidence: Evidence) -> Iterator[Finding]:
    """Infinities that 16 bits make and what follows hides: masks with a minimum that is none, and overflows."""
    narrow = [origin for origin in evidence.infinities if origin.dtype in ("float16", "bfloat16")]
    if evidence.origin is not None and not evidence.origin.is_backward:
        return  # it has been named
    for origin in narrow:
        if "finfo" in origin.note:
            yield Finding(
                kind="mask minimum",
                module=origin.module,
                figure=origin.inputs[0],
                text=(
                    f"The mask in {place(origin.module)} has a minimum that {origin.dtype} cannot hold: "
                    f"{origin.operator} makes -inf of it. A row in which everything is masked becomes NaN."
                ),
                change="Write the mask with torch.finfo(scores.dtype).min, or as a bool mask.",
                sureness=LIKELY,
                severity=50,
            )
        elif not origin.operator.startswith("log"):  # the log of a mask is a mask
            yield Finding(
                kind="hidden overflow",
                module=origin.module,
                figure=f"{origin.value} in {origin.dtype}",
                text=f"{sentence(str(origin))} The loss stays finite: what comes after takes it for a number.",
                change="Run this operator in float32 (x.float()), or scale its inputs down; bf16 has float32's range.",
                sureness=SURE,
                severity=92,
            )


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    of_origin,
    of_overflow,
    of_epsilon,
    of_standing_still,
    of_softmax,
    of_vanishing,
    of_activations,
    of_hidden,
)


def innermost(rows: Sequence[RangeRow]) -> list[RangeRow]:
    """Rows that have no row of a module inside of theirs."""
    names = [row.name for row in rows]
    return [row for row in rows if not any(name.startswith(f"{row.name}.") for name in names)]


def others(rows: Sequence[RangeRow], named: RangeRow) -> str:
    """How many more modules it is the matter with, as a clause."""
    more = len({layer_of(row) for row in rows} - {layer_of(named)})
    return f"; so it is in {more} more modules" if more else ""


def place(module: str) -> str:
    """A module in words."""
    return repr(module) if module else "the loss function"


def sentence(text: str) -> str:
    """A clause with a full stop."""
    return text.rstrip(".") + "."
