from __future__ import annotations

import json
import math

from accumulus.equivalence import Cause, Difference, EquivalenceReport, Kind, PrecisionGap, SplitOutcome


def row(name="w", error=1e-15, **changes):
    return Difference(name=name, what="gradient", error=error, floor=1e-16, allowed=1e-12, split="uneven", **changes)


def make(**changes):
    values = {"is_equal": False, "dtype": "float64", "num_samples": 4, "differences": (row(error=0.5),)}
    return EquivalenceReport(**values | changes)


def test_it_is_true_where_all_is_equal():
    assert not make()
    assert make(is_equal=True)
    assert (make().verdict, make(is_equal=True).verdict) == ("not equal", "equal")


def test_a_difference_is_rounding_up_to_what_is_allowed():
    assert row().is_equal
    assert not row(error=1e-11).is_equal
    assert not row(error=math.inf).is_equal


def test_it_is_json_with_nothing_that_json_has_not():
    cause = Cause(kind=Kind.STATE, where=("1 (Counter)",), evidence="Seen.", remedy="Move it.")
    split = SplitOutcome(name="singles", sizes=(1, 1), error=math.nan, is_equal=False, problem="ValueError")
    report = make(causes=(cause,), splits=(split,), differences=(row(error=math.inf),))
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["causes"][0]["kind"] == "state"
    assert content["differences"][0]["error"] is None
    assert content["splits"][0]["sizes"] == [1, 1]
    assert content["verdict"] == "not equal"


def test_the_text_names_the_worst_and_the_cause():
    cause = Cause(kind=Kind.MIXING, where=tuple(f"norm{i} (BatchNorm2d)" for i in range(6)), evidence="E.", remedy="R.")
    text = str(make(causes=(cause,), differences=tuple(row(f"p{i}", error=0.5) for i in range(9))))
    assert text.startswith("not equal: 4 samples")
    assert "largest error 5.0e-01 in p0" in text
    assert "norm3 (BatchNorm2d) and 2 more. E. R." in text
    assert "... and 1 more" in text


def test_what_accumulation_adds_is_beyond_half_of_what_precision_costs():
    assert make().accumulation_adds is None
    for accumulated, adds in ((1.4e-3, False), (2e-3, True)):
        total = PrecisionGap(name="all", whole=1e-3, accumulated=accumulated)
        assert make(is_equal=True, precision_total=total).accumulation_adds is adds
        assert make(precision_total=total).accumulation_adds is None
    assert PrecisionGap(name="w", whole=0.0, accumulated=0.0).factor == 1.0
    assert PrecisionGap(name="w", whole=0.0, accumulated=1e-3).factor == math.inf


def test_randomness_is_not_wrong():
    assert not Cause(kind=Kind.RANDOM, where=(), evidence="", remedy="").is_wrong
    assert all(Cause(kind=kind, where=(), evidence="", remedy="").is_wrong for kind in set(Kind) - {Kind.RANDOM})
