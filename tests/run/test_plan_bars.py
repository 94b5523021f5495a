"""Laws of the bars: as long as their bytes, on one scale, with the limit in one column, readable without colour."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from accumulus.run.plan_bars import INKS, Scale, bar, make_scale, pick_rows, show_bars

from .lines import PARTS, Line, make_plan


def shown(plan, *, width=80, encoding="utf-8", **options):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    show_bars(Console(file=output, width=width, **options), plan)
    output.flush()
    return output.buffer.getvalue().decode(encoding)


def test_every_part_has_a_texture_of_its_own():
    assert tuple(INKS) == PARTS
    for kind in ("texture", "ascii_texture", "style"):
        assert len({getattr(ink, kind) for ink in INKS.values()}) == len(PARTS)


@given(st.lists(st.integers(0, 10**12), min_size=6, max_size=6), st.integers(1, 10**12), st.integers(20, 200))
def test_a_bar_is_as_long_as_its_bytes_and_each_part_is_within_one_column(sizes, limit, width):
    row = make_plan(1000).rows[0]
    row = type(row)(**{**vars(row), "parts": dict(zip(PARTS, sizes, strict=True)), "peak_bytes": sum(sizes)})
    scale = Scale(full_bytes=max(sum(sizes), limit, 1), width=width, limit_bytes=limit)
    text = bar(row, scale, is_ascii=True).plain
    assert len(text) == width
    assert text[scale.limit_column] == "|"
    for (part, ink), size in zip(INKS.items(), sizes, strict=True):
        assert abs(text.count(ink.ascii_texture) - width * size / scale.full_bytes) <= 2, part
    drawn = "".join(letter for letter in text if letter.isalpha())
    assert drawn == "".join(sorted(drawn, key=lambda letter: "PGOCAT".index(letter)))  # in the order of the parts


@given(st.lists(st.integers(1, 10**12), min_size=1), st.integers(1, 10**12))
def test_the_limit_is_on_the_scale_unless_all_bars_are_far_below(peaks, limit):
    scale = make_scale(peaks, limit, 50)
    if 3 * max(peaks) >= limit:
        assert scale.limit_column is not None
        assert 0 <= scale.limit_column < 50
    else:
        assert scale.limit_column is None
        assert scale.full_bytes == max(peaks)


def test_the_limit_stands_in_one_column_and_longer_bars_end_in_an_arrow():
    text = shown(make_plan(150))
    lines = [line for line in text.splitlines() if line.startswith(("fp32 ", "bf16 "))]
    columns = {line.index("│") for line in lines}
    assert len(columns) == 1
    assert text.splitlines()[2].index("▼") in columns
    assert "limit 150 B" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    long = shown(make_plan(150, {"bf16": Line(10, 100)}))
    assert [line.count("▶") for line in long.splitlines() if line.startswith("bf16        2")] == [1]


def test_a_limit_far_away_is_said_in_words():
    text = shown(make_plan(10**6))
    assert "limit 977 KiB, 3,846 x this width" in text
    assert "▼" not in text


def test_rows_drawn_are_those_of_the_choice_and_the_others_at_its_size():
    plan = make_plan(200)
    rows = [(row.precision, row.microbatch) for row in pick_rows(plan)]
    assert plan.choice.row.microbatch == 8
    assert rows == [("bf16", size) for size in (1, 2, 4, 8, 16)] + [("fp32", 8)]
    assert [(row.precision, row.microbatch) for row in pick_rows(make_plan(50))] == [("fp32", 1), ("bf16", 1)]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_without_colour_the_legend_names_what_is_drawn(encoding):
    text = shown(make_plan(200), encoding=encoding, no_color=True)
    assert "\x1b[" not in text
    for part, ink in INKS.items():
        assert f"{(ink.ascii_texture if encoding == 'ascii' else ink.texture) * 2} {part}" in text.replace("\n", " ")


def test_colours_where_there_are_any():
    assert "\x1b[" in shown(make_plan(200), force_terminal=True, color_system="truecolor")
