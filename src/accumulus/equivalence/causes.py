"""Why a split is not the whole batch: one suspect after the other is switched off, and what remains is looked at.

What a model does (draw, mix samples, remember, look at padding) is found first and switched off; what still differs
then lies in the loss, term by term.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accumulus import pytree
from accumulus.equivalence import remedies
from accumulus.equivalence.compare import relative
from accumulus.equivalence.lab import Lab
from accumulus.equivalence.loss import Meeting, find_meeting
from accumulus.equivalence.mixing import Mixing, find_mixing, probe_rows, spaced
from accumulus.equivalence.report import Cause, Kind
from accumulus.equivalence.runs import Piece, run_piece
from accumulus.equivalence.suspects import changed_buffers, find_noise, find_padding, find_state, strides, thirds
from accumulus.equivalence.trace import LOSS_FUNCTION, no_trace
from accumulus.equivalence.weights import Weighting, candidates, find_weighting
from accumulus.errors import AccumulusError, BatchError
from accumulus.microbatch import Split

__all__ = ["Inquiry", "find_causes"]

MAX_PROBES = 12
MAX_ROUNDS = 8
TABLE = "It returns a table of samples against samples, whose size is the micro-batch's squared."


@dataclass
class Inquiry:
    """What is known so far.

    Args:
        lab: where everything found so far is switched off.
        rules: the splits.
        tolerance: relative error up to which it is rounding.
        unequal_buffers: saved buffers that a split leaves otherwise than the whole batch.
        causes: found so far.
        notes: experiments that could not be made.
    """

    lab: Lab
    rules: Sequence[Split]
    tolerance: float
    unequal_buffers: Sequence[str]
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: Kind, where: Sequence[str], evidence: str, remedy: str) -> None:
        """Notes a cause."""
        self.causes.append(Cause(kind=kind, where=tuple(where), evidence=evidence, remedy=remedy))


def find_causes(lab: Lab, rules: Sequence[Split], *, tolerance: float, unequal_buffers: Sequence[str]) -> Inquiry:
    """Names everything that makes the splits differ.

    Args:
        lab: with draws that can be compared.
        rules: the splits.
        tolerance: relative error up to which it is rounding.
        unequal_buffers: as for `Inquiry`.

    Returns:
        The causes, and what could not be tried.
    """
    inquiry = Inquiry(lab, rules, tolerance, unequal_buffers)
    if _look_for_noise(inquiry):
        return inquiry
    _look_for_mixing(inquiry, probe_rows(lab))
    _look_for_state(inquiry)
    _look_for_padding(inquiry)
    is_explained = _look_at_terms(inquiry)
    if not is_explained and not any(cause.kind is Kind.MIXING for cause in inquiry.causes):
        is_explained = _look_wider(inquiry)
    if not inquiry.causes:
        says = "Each micro-batch by itself adds up to the whole batch; one after the other they do not."
        inquiry.add(Kind.UNKNOWN, (LOSS_FUNCTION,), says, remedies.UNKNOWN)
    elif is_explained:
        inquiry.causes[:] = [replace(cause, is_confirmed=True) for cause in inquiry.causes]
    return inquiry


def _look_wider(inquiry: Inquiry) -> bool:
    """Looks for mixing among more samples: some meet only where many compete, as for an expert's capacity."""
    before = list(inquiry.causes)
    _look_for_mixing(inquiry, spaced(inquiry.lab.num_samples, min(inquiry.lab.num_samples, MAX_PROBES)))
    if len(inquiry.causes) == len(before):
        return False
    inquiry.causes[:] = [cause for cause in inquiry.causes if cause.kind is not Kind.UNKNOWN]
    return _look_at_terms(inquiry)


def _look_for_noise(inquiry: Inquiry) -> bool:
    lab = inquiry.lab
    found = no_trace(lambda: find_noise(lab, probe_rows(lab), inquiry.tolerance))
    if found is None:
        return False
    inquiry.add(
        Kind.NONDETERMINISTIC,
        found.where,
        f"The same samples run twice whole, with equal random states, differ by {found.error:.1e}.",
        remedies.NONDETERMINISTIC,
    )
    return True


def _look_for_mixing(inquiry: Inquiry, rows: Sequence[int]) -> None:
    """Names the modules that mix, freezes them, and looks again: what came before may have hidden others."""
    shares: dict[str, float] = {}
    for _ in range(MAX_ROUNDS):
        lab = inquiry.lab
        found: Mixing | None = no_trace(functools.partial(find_mixing, lab, rows))
        if found is None:
            inquiry.notes.append("Whether modules mix samples could not be looked at: samples could not be exchanged.")
            break
        if found.comparing and not any(cause.kind is Kind.COMPARISON for cause in inquiry.causes):
            inquiry.add(Kind.COMPARISON, found.comparing, TABLE, remedies.COMPARISON)
        still = [name for name in found.shown if name in shares]
        if still or not found:
            always = {name: shares[name] for name in still}
            _add_mixing(inquiry, always, remedies.MIXING_ALWAYS, "in evaluation mode too")
            shares = {name: share for name, share in shares.items() if name not in still}
            break
        shares |= dict(zip(found.shown, found.shares, strict=True))
        inquiry.lab = lab.but(frozen=lab.frozen | set(found.modules))
    _add_mixing(inquiry, shares, remedies.MIXING, "and nothing does when it runs in evaluation mode")


def _add_mixing(inquiry: Inquiry, shares: Mapping[str, float], remedy: str, says: str) -> None:
    modules = tuple(name for name in shares if name != LOSS_FUNCTION)
    if modules:
        share = max(shares[name] for name in modules)
        evidence = f"With one sample changed, {share:.0%} of what it returns depends on that one and on others, {says}."
        inquiry.add(Kind.MIXING, modules, evidence, remedy)
    if LOSS_FUNCTION in shares:
        evidence = "With one sample changed, what it hands to the model for the others changes."
        inquiry.add(Kind.MIXING, (LOSS_FUNCTION,), evidence, remedies.MIXING_BEFORE)


def _look_for_state(inquiry: Inquiry) -> None:
    lab = inquiry.lab
    rows = probe_rows(lab)
    found = no_trace(lambda: find_state(lab, rows, inquiry.tolerance))
    if found is not None:
        evidence = f"A second forward pass of the same samples gives a loss that differs by {found.error:.1e}."
        inquiry.add(Kind.STATE, found.where, evidence, remedies.STATE)
        return
    moved: Sequence[str] = no_trace(lambda: changed_buffers(lab, rows)) or ()
    buffers = [name for name in moved if name in inquiry.unequal_buffers]
    if buffers:
        evidence = "Gradients do not depend on it, but every forward pass changes it, and a split has more of them."
        inquiry.add(Kind.STATE, buffers, evidence, remedies.STATE_BUFFER)


def _look_for_padding(inquiry: Inquiry) -> None:
    lab = inquiry.lab
    found = no_trace(lambda: find_padding(lab, inquiry.rules, inquiry.tolerance))
    if found is not None:
        evidence = f"The same sample, padded further, gives a gradient that differs by {found.error:.1e}."
        inquiry.add(Kind.PADDING, found.where, evidence, remedies.PADDING)
    whole = _collated(lab)
    if whole is not None:
        inquiry.lab = lab.but(batch=whole, collate=None)


def _collated(lab: Lab) -> Any:
    """The batch padded once and for all; None where it cannot be cut then."""
    if lab.collate is None:
        return None
    part = lab.part()
    try:
        is_whole = pytree.sliceable(part).length == lab.num_samples
    except BatchError:
        return None
    shared = [leaf for leaf in pytree.sliceable(part).leaves if leaf.rows is None and _is_number(leaf.value)]
    return part if is_whole and not shared else None  # numbers that collate counted hold for the whole batch only


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _look_at_terms(inquiry: Inquiry) -> bool:
    """What differs when each micro-batch runs by itself, on a copy of its own; True where all of that is explained."""
    lab = inquiry.lab
    try:
        cuts = [_Cut.of(lab, groups) for groups in (thirds(lab.num_samples), strides(lab.num_samples))]
        whole = run_piece(lab, lab.part(), lab.num_samples)
    except AccumulusError:
        raise
    except Exception as error:  # a loss function that refuses small micro-batches
        inquiry.notes.append(f"The loss terms were not looked at: {type(error).__name__}: {error}.")
        return False
    is_explained = True
    for name, right in whole.items():
        unequal = [cut for cut in cuts if not _adds_up(right, cut.of_term(name), inquiry.tolerance)]
        if unequal:
            is_explained &= _explain_term(inquiry, name, right, unequal[0])
    return is_explained


@dataclass(frozen=True)
class _Cut:
    """The batch in a few micro-batches, each of which ran by itself."""

    parts: Sequence[Any]
    sizes: Sequence[int]
    pieces: Sequence[Mapping[str, Piece]]

    @classmethod
    def of(cls, lab: Lab, groups: Sequence[Sequence[int]]) -> _Cut:
        parts, sizes = [lab.part(rows) for rows in groups], [len(rows) for rows in groups]
        return cls(parts, sizes, [run_piece(lab, part, size) for part, size in zip(parts, sizes, strict=True)])

    def of_term(self, name: str) -> list[Piece]:
        """A loss term's pieces; none where not every micro-batch has it."""
        found = [pieces[name] for pieces in self.pieces if name in pieces]
        return found if len(found) == len(self.pieces) else []


def _adds_up(whole: Piece, pieces: Sequence[Piece], tolerance: float) -> bool:
    weight = sum(piece.weight for piece in pieces)
    if not pieces or not weight or not whole.weight:
        return bool(pieces) and weight == whole.weight
    used = [piece for piece in pieces if piece.weight]
    vector = sum((piece.vector(1 / weight) for piece in used[1:]), start=used[0].vector(1 / weight))
    right = whole.vector(1 / whole.weight)
    # The loss, as the last entry, may nearly cancel, and is judged beside the gradient.
    return relative(vector, right) <= tolerance


def _explain_term(inquiry: Inquiry, name: str, whole: Piece, cut: _Cut) -> bool:
    lab = inquiry.lab
    called = _second_argument(lab.prototype.loss_fn)
    counted = [candidates(part, size, called) for part, size in zip(cut.parts, cut.sizes, strict=True)]
    pieces = cut.of_term(name)
    weighting = find_weighting(whole, pieces, counted, inquiry.tolerance) if pieces else None
    where = f"loss term {name!r}" if name != "loss" else "the loss"
    if weighting is not None and weighting.form not in ("ratio", "factor"):
        inquiry.add(Kind.WEIGHT, (where,), *_weight_words(weighting, called))
        return True
    rows = spaced(lab.num_samples, min(lab.num_samples, MAX_PROBES))
    meeting: Meeting | None = no_trace(lambda: find_meeting(lab, rows, name))
    if meeting is not None:
        _add_meeting(inquiry, where, name, meeting)
        return True
    if weighting is not None and weighting.form == "factor":
        shares = " : ".join(f"{share:.3g}" for share in weighting.shares)
        evidence = f"Each piece is scaled by a factor of its own ({shares}), which its samples make together."
        inquiry.add(Kind.STATISTIC, (where,), evidence, remedies.STATISTIC)
        return True
    if weighting is not None:
        inquiry.add(Kind.WEIGHT, (where,), *_weight_words(weighting, called))
        return True
    if any(cause.kind in (Kind.COMPARISON, Kind.MIXING) for cause in inquiry.causes):
        return any(cause.kind is Kind.COMPARISON for cause in inquiry.causes)
    inquiry.add(
        Kind.UNKNOWN, (where,), "It differs by more than rounding, and no suspect explains it.", remedies.UNKNOWN
    )
    return False


def _second_argument(function: Any) -> str:
    """What a loss function calls its micro-batch."""
    try:
        return list(inspect.signature(function).parameters)[1]
    except (ValueError, TypeError, IndexError):  # a callable that does not tell
        return "batch"


def _weight_words(weighting: Weighting, called: str) -> tuple[str, str]:
    shares = " : ".join(f"{share:.3g}" for share in weighting.shares)
    if weighting.form == "sum":
        return (
            "The scalar is a sum over the micro-batch, and a scalar counts as a mean over its samples.",
            "Return acc.Loss(loss, weight) with the number of elements that it sums over.",
        )
    if weighting.form == "ratio":
        return (
            f"It is a mean over something of which the pieces hold {shares}, and which no field of the batch counts.",
            "Return acc.Loss.mean(loss, weight) with the number of elements that it is a mean over.",
        )
    found = f"Weighted by {weighting.expression} the pieces give the whole batch's gradient ({weighting.error:.1e})."
    count = f"len({called})" if weighting.expression == "the number of samples" else weighting.expression
    return found, f"Return acc.Loss.mean(loss, {count})."


def _add_meeting(inquiry: Inquiry, where: str, name: str, meeting: Meeting) -> None:
    places = (where, *meeting.where)
    if meeting.is_comparison:
        tables = [cause for cause in inquiry.causes if cause.kind is Kind.COMPARISON and cause.evidence is TABLE]
        inquiry.causes[:] = [cause for cause in inquiry.causes if cause not in tables]
        places += tuple(place for cause in tables for place in cause.where)
        evidence = f"{meeting.share:.0%} of pairs of samples feel each other's outputs, pair by pair."
        inquiry.add(Kind.COMPARISON, places, evidence, remedies.COMPARISON)
    elif meeting.through == "outputs" and remedies.is_routing(inquiry.lab.prototype.model, name, meeting.where):
        evidence = "All samples meet in a few sums over what the router returns."
        inquiry.add(Kind.BALANCE, places, evidence, remedies.BALANCE)
    else:
        source = "the model's outputs" if meeting.through == "outputs" else "the batch's data"
        evidence = f"Each sample's gradient depends on statistics of {source} over the micro-batch."
        inquiry.add(Kind.STATISTIC, places, evidence, remedies.STATISTIC)
