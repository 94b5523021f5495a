import io

from rich.console import Console

from accumulus.equivalence import Cause, Difference, EquivalenceReport, Kind, PrecisionGap, SplitOutcome
from accumulus.run.check_table import show_report


def shown(report, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_report(console, "mine", report)
    return console.file.getvalue()


def make(*, is_equal=False, **changes):
    row = {"what": "gradient", "floor": 1e-16, "allowed": 1e-12, "split": "uneven"}
    return EquivalenceReport(
        is_equal=is_equal,
        dtype="float64",
        num_samples=9,
        differences=tuple(Difference(name=f"layer.{i}.weight", error=10.0**-i, **row) for i in range(14)),
        splits=(
            SplitOutcome(name="uneven", sizes=(5, 3, 1), error=0.5, is_equal=False),
            SplitOutcome(name="singles", sizes=(), error=float("nan"), is_equal=False, problem="ValueError: two"),
        ),
        causes=(Cause(kind=Kind.MIXING, where=("norm (BatchNorm1d)",), evidence="It does [really].", remedy="Stop."),),
        notes=("A note.",),
        **changes,
    )


def test_the_verdict_the_causes_and_the_worst_come_first():
    text = shown(make())
    assert text.startswith("mine: NOT EQUAL")
    assert "module mixes samples: norm (BatchNorm1d)" in text
    assert "It does [really]." in text  # not read as markup
    assert text.index("layer.0.weight") < text.index("layer.1.weight")
    assert "... and 2 more" in text
    assert "not run" in text
    assert "A note." in text


def test_precision_is_told_in_a_sentence():
    total = PrecisionGap(name="all", whole=1e-3, accumulated=3e-3)
    text = " ".join(shown(make(precision="bf16", precision_total=total, precision_errors=(total,))).split())
    assert "In bf16 the gradient is 1.0e-03 from float64 whole, 3.0e-03 in pieces: the difference above is part" in text


def test_what_accumulation_adds_is_told_where_the_rest_is_equal():
    total = PrecisionGap(name="all", whole=1e-3, accumulated=3e-3)
    assert "accumulation adds error" in shown(make(is_equal=True, precision_total=total))
    total = PrecisionGap(name="all", whole=1e-3, accumulated=1e-3)
    assert "accumulation adds nothing" in " ".join(shown(make(is_equal=True, precision_total=total)).split())


def test_it_fits_80_columns():
    assert all(len(line) <= 80 for line in shown(make()).splitlines())
