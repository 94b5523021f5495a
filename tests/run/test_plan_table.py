import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from accumulus.run.plan_result import Measure, Shortfall
from accumulus.run.plan_table import choose_unit, show_plan

from .lines import PARTS, Line, make_plan


def shown(plan, *, width=80, **options):
    output = io.StringIO()
    show_plan(Console(file=output, width=width, **options), plan)
    return output.getvalue()


@given(st.lists(st.integers(1, 10**16), min_size=1))
def test_the_unit_gives_the_largest_number_at_most_six_characters(peaks):
    unit = choose_unit(peaks)
    assert len(unit.show(max(peaks))) <= 6 or unit.name == "TiB"
    assert max(peaks) / unit.size < 10_000 or unit.name == "TiB"


@pytest.mark.parametrize("scale", [1, 10**4, 10**7, 10**10])
def test_the_table_has_every_row_and_fits_80_columns(scale):
    plan = make_plan(200 * scale, {"fp32": Line(100 * scale, 10 * scale), "bf16": Line(120 * scale, 5 * scale)})
    lines = shown(plan).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    numbers = [line.replace("fp32", "").replace("bf16", "").split() for line in lines[5:]]
    for row in plan.rows:
        found = [words for words in numbers if words[:2] == [str(row.microbatch), str(row.num_microbatches)]]
        unit = choose_unit([each.peak_bytes for each in plan.rows])
        expected = [unit.show(num_bytes) for num_bytes in (*row.parts.values(), row.peak_bytes)]
        assert any(words[2:9] == expected and words[-1] == row.verdict for words in found), row


def test_a_narrow_window_leaves_the_parts_out_and_cuts_no_number():
    text = shown(make_plan(200), width=50)
    assert "…" not in text
    assert "The parts need 80 columns; --json FILE holds them" in text
    assert all(len(line.rstrip()) <= 50 for line in text.splitlines())


def test_the_recommended_line_and_the_command():
    text = shown(make_plan(200))
    assert "Recommended: bf16, 2 micro-batches of 8: 160 B, 80% of the memory\n" in text
    assert "\n  accumulus train --microbatch 8\n" in text
    assert "bf16: it has units." in text
    assert "Estimated for the longest samples." in text


def shortfall():
    parts = dict.fromkeys(PARTS, 0) | {"optimizer state": 60, "parameters": 40}
    return Shortfall(
        precision="fp32",
        peak_bytes=100,
        parts=parts,
        phase="update",
        measures=(
            Measure(changes=("less state",), peak_bytes=70, saved_bytes=30, is_enough=False, how="by a half."),
            Measure(changes=("less state", "other"), peak_bytes=40, saved_bytes=60, is_enough=True, how="both."),
        ),
        notes=("Something was not counted.",),
    )


def test_what_does_not_fit_says_what_dominates_and_what_would_help():
    text = " ".join(shown(make_plan(50, shortfall=shortfall())).split())
    assert "Not one sample fits: fp32 needs 100 B, 50 B more than there is." in text
    assert "Most of it is optimizer state: 60 B, 60% of the peak (update)." in text
    assert "less state 30 B 70 B no less state + other 60 B 40 B yes" in text
    assert "less state: by a half." in text
    assert "Something was not counted." in text
    assert "Recommended" not in text


def test_a_name_in_brackets_is_printed_as_it_is():
    plan = make_plan(200)
    plan = type(plan)(**{**vars(plan), "task": "[red].py:job", "notes": ("[bold] samples",)})
    assert "[red].py:job" in shown(plan)
    assert "[bold] samples" in shown(plan)


def test_colour_is_not_needed():
    assert "\x1b[" not in shown(make_plan(200))
    assert "\x1b[" in shown(make_plan(200), force_terminal=True, color_system="standard")
