"""Every planted cause is named: its kind, and where it lies; and nothing else is accused."""

from __future__ import annotations

import pytest

import accumulus as acc
from accumulus.equivalence import Kind

from .planted import planted

PLANTED = planted()


def test_there_are_enough():
    assert len(PLANTED) >= 25
    assert {case.kind for case in PLANTED} == set(Kind) - {Kind.RANDOM, Kind.UNKNOWN}


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_the_cause_is_named(case):
    report = acc.check(case.model, case.loss_fn, case.batch, **case.options)
    assert not report
    assert {cause.kind for cause in report.causes} == {case.kind}, str(report)
    text = "\n".join(map(str, report.causes))
    assert case.where in text
    assert case.says in text
