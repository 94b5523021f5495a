"""A plan as a picture: a PNG, or a page that opens offline, on a phone and in dark mode. Needs the extra "plot"."""

from __future__ import annotations

import html
import json
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from accumulus.errors import UsageError
from accumulus.run.plan_result import Plan
from accumulus.run.plan_rows import TIGHT, TOO_LARGE, Row, worth_drawing
from accumulus.run.plan_table import Unit, choose_unit
from accumulus.units import format_bytes

COLORS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "cast weights": "#56B4E9",
    "activations": "#D55E00",
    "temporary": "#CC79A7",
}
"""Told apart with any colour vision, on white and on black. Source: Okabe and Ito, "Color Universal Design" (2008)."""

BAR_HEIGHT = 20
BEYOND = 1.25
"""How far beyond the limit the axis goes, in limits; longer bars end at its edge, and their numbers say the rest."""

PALE = 0.4
"""Opacity of what does not fit."""

PNG_WIDTH, PNG_SCALE = 640, 2


def require_charts() -> None:
    """Refuses to draw where the drawing packages are not installed.

    Raises:
        UsageError: see above; it says how to install them.
    """
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise UsageError(f"--picture needs {' and '.join(missing)}; install them with: pip install 'accumulus[plot]'")


def write_picture(path: Path, found: Plan) -> None:
    """Draws a plan.

    Args:
        path: ends in .png or .html; replaced.
        found: the plan.

    Raises:
        UsageError: it cannot be written, or a package is missing.
    """
    require_charts()
    content = to_png(found) if path.suffix.lower() == ".png" else to_page(found).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"--picture {path} cannot be written ({error.strerror}); give another file") from None


def to_png(found: Plan) -> bytes:
    """The picture as a PNG on white."""
    import vl_convert

    title = {"text": title_of(found), "subtitle": subtitle_of(found), "anchor": "start", "offset": 12}
    chart = make_chart(found).properties(width=PNG_WIDTH, background="white", padding=16, title=title)
    content: bytes = vl_convert.vegalite_to_png(chart.to_json(), scale=PNG_SCALE)
    return content


def to_page(found: Plan) -> str:
    """The picture as a page that holds everything it needs: scripts, data, and the table as text."""
    import vl_convert

    chart = make_chart(found).properties(width="container").to_dict()
    page = Template(Path(__file__).with_name("plan_page.html").read_text("utf-8"))
    return page.substitute(
        title=html.escape(title_of(found)),
        subtitle=html.escape(subtitle_of(found)),
        description=html.escape(describe(found)),
        recommended=recommended(found),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in found.notes),
        table=table_of(found),
        spec=as_script(chart),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
    )


def make_chart(found: Plan) -> Any:
    """The stacked bars, the limit and each peak's number.

    Args:
        found: the plan.

    Returns:
        An altair chart without a width.
    """
    import altair

    rows = drawn_rows(found)
    unit = choose_unit([row.peak_bytes for row in rows])
    limit, end = found.limit.limit_bytes / unit.size, axis_end(rows, found.limit.limit_bytes) / unit.size
    labels = make_labels(rows)
    y = altair.Y("label:N", sort=None, scale=altair.Scale(domain=labels), title=None)
    layers = [bar_layer(part_records(rows, unit, end), y, title=f"peak memory, {unit.name}", end=end)]
    if limit <= end:
        layers += limit_layers(limit, end, limit_text(found))
    layers += number_layers(peak_records(found, unit, end), y)
    return (
        altair.layer(*layers)
        .properties(height=BAR_HEIGHT * len(labels), description=describe(found))
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=12, titleFontSize=12, labelLimit=200)
        .configure_axisY(domain=False, ticks=False, labelPadding=8)
        .configure_legend(labelFontSize=12)
    )


def bar_layer(records: list[dict[str, Any]], y: Any, *, title: str, end: float) -> Any:
    """The stacked bars; what does not fit is pale.

    Args:
        records: of `part_records`.
        y: where each bar stands.
        title: of the axis.
        end: of the axis, in the chart's unit.

    Returns:
        An altair chart.
    """
    import altair

    parts = [part for part in COLORS if any(record["part"] == part for record in records)]
    colors = altair.Scale(domain=parts, range=[COLORS[part] for part in parts])
    legend = altair.Legend(title=None, orient="top", columns=3, symbolType="square", labelLimit=160)
    axis = altair.Axis(title=title, tickCount=6, format=".6~g")
    return (
        altair.Chart(as_data(records))
        .mark_bar(clip=True)
        .encode(
            x=altair.X("start:Q", scale=altair.Scale(domain=[0, end], nice=False), axis=axis),
            x2="end:Q",
            y=y,
            color=altair.Color("part:N", scale=colors, legend=legend),
            opacity=altair.condition("datum.full_color", altair.value(1), altair.value(PALE)),
            tooltip=["precision:N", "microbatch:Q", "part:N", "size:N", "peak:N"],
        )
    )


def number_layers(records: list[dict[str, Any]], y: Any) -> list[Any]:
    """Each bar's peak as text behind it; the recommended one's in bold."""
    import altair

    return [
        altair.Chart(as_data([record for record in records if record["bold"] == bold]))
        .mark_text(align="left", dx=5, fontSize=12, fontWeight="bold" if bold else "normal")
        .encode(x="at:Q", y=y, text="text:N")
        for bold in (False, True)
    ]


def limit_layers(limit: float, end: float, text: str) -> list[Any]:
    """A dashed line at the limit, and above it what it is."""
    import altair

    rule = altair.Chart(as_data([{"limit": limit, "text": text}])).encode(x="limit:Q")
    above = rule.mark_text(
        align="right" if 2 * limit > end else "left", baseline="bottom", dy=-4, fontSize=12, fontWeight="bold", y=0
    )
    return [rule.mark_rule(strokeWidth=2, strokeDash=[6, 4]), above.encode(text="text:N")]


def as_data(records: list[dict[str, Any]]) -> Any:
    """Records as altair takes them, without a data frame."""
    return {"values": records}


def drawn_rows(found: Plan) -> list[Row]:
    """Every precision's rows up to the first that does not fit; where nothing fits, one sample in each precision."""
    if found.choice is None:
        return [row for row in found.rows if row.microbatch == 1]
    precisions = dict.fromkeys(row.precision for row in found.rows)
    return [row for name in precisions for row in worth_drawing([row for row in found.rows if row.precision == name])]


def axis_end(rows: list[Row], limit_bytes: int) -> float:
    """The bytes at which the axis ends: the longest bar, cut beyond the limit where some bar ends before it."""
    peaks = [row.peak_bytes for row in rows]
    longest = min(max(peaks), BEYOND * limit_bytes) if min(peaks) <= limit_bytes else max(peaks)
    return longest if 3 * longest < limit_bytes else max(longest, 1.02 * limit_bytes)


def label_of(row: Row) -> str:
    """What stands before a bar."""
    return f"{row.precision} × {row.microbatch}"  # noqa: RUF001


def make_labels(rows: list[Row]) -> list[str]:
    """The labels from top to bottom, with an empty one, each of another width, between two precisions."""
    labels: list[str] = []
    before = rows[0].precision
    for row in rows:
        if row.precision != before and len(rows) > len({row.precision for row in rows}):
            labels.append(" " * (1 + sum(not label.strip() for label in labels)))
        before = row.precision
        labels.append(label_of(row))
    return labels


def part_records(rows: list[Row], unit: Unit, end: float) -> list[dict[str, Any]]:
    """One record for each part of each bar, with where it starts and ends in the chart's unit."""
    records = []
    some_fit = any(row.verdict != TOO_LARGE for row in rows)
    for row in rows:
        total = 0
        for part, num_bytes in row.parts.items():
            records.append(
                {
                    "label": label_of(row),
                    "precision": row.precision,
                    "microbatch": row.microbatch,
                    "part": part,
                    "start": min(total / unit.size, end),
                    "end": min((total + num_bytes) / unit.size, end),
                    "size": format_bytes(num_bytes),
                    "peak": format_bytes(row.peak_bytes),
                    "full_color": row.verdict != TOO_LARGE or not some_fit,
                }
            )
            total += num_bytes
    return records


def peak_records(found: Plan, unit: Unit, end: float) -> list[dict[str, Any]]:
    """One record a bar: its peak as text, and what the text says besides."""
    chosen = None if found.choice is None else found.choice.row
    words = {TOO_LARGE: " too large", TIGHT: " tight"}
    return [
        {
            "label": label_of(row),
            "at": min(row.peak_bytes / unit.size, end),
            "text": unit.show(row.peak_bytes) + words.get(row.verdict, " recommended" if row == chosen else ""),
            "bold": row == chosen,
        }
        for row in drawn_rows(found)
    ]


def title_of(found: Plan) -> str:
    """What the picture shows."""
    return f"Peak memory of {found.task}, batch {found.batch_size}"


def limit_text(found: Plan) -> str:
    """The limit in words."""
    return f"limit {format_bytes(found.limit.limit_bytes)}"


def subtitle_of(found: Plan) -> str:
    """The device, the limit and how to read the labels."""
    return f"{found.device}, {limit_text(found)} ({found.limit.source}); one bar for each precision × micro-batch"  # noqa: RUF001


def describe(found: Plan) -> str:
    """The picture in two sentences, for those who do not see it."""
    rows = found.rows
    low, high = min(rows, key=lambda row: row.peak_bytes), max(rows, key=lambda row: row.peak_bytes)
    text = (
        f"Stacked bars of the peak memory of {found.task} with batch {found.batch_size}, from "
        f"{format_bytes(low.peak_bytes)} ({low.precision}, micro-batch {low.microbatch}) to "
        f"{format_bytes(high.peak_bytes)} ({high.precision}, micro-batch {high.microbatch}); "
        f"{limit_text(found)}."
    )
    if found.choice is None:
        return f"{text} Not one sample fits."
    row = found.choice.row
    return f"{text} Recommended: {row.precision}, micro-batch {row.microbatch}, {format_bytes(row.peak_bytes)}."


def recommended(found: Plan) -> str:
    """The recommendation, or what dominates where nothing fits, as a paragraph."""
    if found.choice is not None:
        row, text = found.choice.row, " ".join(found.choice.reasons)
        what = f"{row.precision}, {row.num_microbatches} × {row.microbatch} samples, {format_bytes(row.peak_bytes)}"  # noqa: RUF001
        return (
            f"<p><strong>Recommended: {html.escape(what)}.</strong> {html.escape(text)}</p>"
            f"<pre><code>{html.escape(found.choice.command)}</code></pre>"
        )
    assert found.shortfall is not None
    name, num_bytes, ratio = found.shortfall.dominant
    return (
        f"<p><strong>Not one sample fits.</strong> {html.escape(found.shortfall.precision)} needs "
        f"{format_bytes(found.shortfall.peak_bytes)}; most of it is {name}: {format_bytes(num_bytes)}, {ratio:.0%}.</p>"
        "<ul>"
        + "".join(
            f"<li>{html.escape(measure.name)}: saves {format_bytes(max(0, measure.saved_bytes))}, then needs "
            f"{format_bytes(measure.peak_bytes)}, {'enough' if measure.is_enough else 'not enough'}</li>"
            for measure in found.shortfall.measures
        )
        + "</ul>"
    )


def table_of(found: Plan) -> str:
    """All numbers as a table."""
    parts = list(found.rows[0].parts)
    heads = ["precision", "micro-batch", "how many", *parts, "peak", "fits"]
    lines = ["<thead><tr>" + "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr></thead><tbody>"]
    for row in found.rows:
        sizes = [format_bytes(num_bytes) for num_bytes in (*row.parts.values(), row.peak_bytes)]
        cells = [row.precision, str(row.microbatch), str(row.num_microbatches), *sizes, row.verdict]
        mark = ' class="chosen"' if found.choice is not None and found.choice.row == row else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</tbody>"])


def as_script(chart: dict[str, Any]) -> str:
    """A chart as a JavaScript value that cannot end the script around it."""
    without_link = {key: value for key, value in chart.items() if key != "$schema"}
    return json.dumps(without_link, allow_nan=False).replace("<", "\\u003c")
