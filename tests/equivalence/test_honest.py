"""Nothing is said against a model that is right: equal, and at most "random, not wrong"."""

from __future__ import annotations

import pytest

import accumulus as acc
from accumulus.equivalence import Kind

from .honest import honest
from .test_planted import PLANTED

HONEST = honest()


def test_there_are_as_many_as_planted_ones_need():
    assert len(HONEST) >= 25
    assert len(PLANTED) >= 25


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_it_is_called_equal(case):
    report = acc.check(case.model, case.loss_fn, case.batch, **case.options)
    assert report, str(report)
    assert report.dtype == "float64"
    assert report.kinds == ({Kind.RANDOM} if case.is_random else set())
    assert max(row.error for row in report.differences) <= 1e-12
