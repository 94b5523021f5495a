"""A report as one page that opens offline, on a phone and in dark mode: histograms over the ranges of the formats."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from accumulus.errors import UnsupportedError
from accumulus.numerics.formats import E4M3, E5M2, FP16, Format
from accumulus.numerics.ranges import KINDS, RangeRow
from accumulus.numerics.result import Diagnosis
from accumulus.numerics.scales import power
from accumulus.numerics.tables import DTYPE_HEADS, RANGE_HEADS, cast_cells, describe_updates, range_cells, use_cells

__all__ = ["require_charts", "to_page"]

COLORS = {"fp16": "#0072B2", "e5m2": "#009E73", "e4m3": "#E69F00"}
"""Told apart with any colour vision. Source: Okabe and Ito, "Color Universal Design" (2008)."""

CELLS = "#D55E00"
ROW_HEIGHT = 16
BAND_HEIGHT = 11
MOST_ROWS = 400
LOWEST, HIGHEST = -60, 40
"""Powers of two that are drawn; what lies outside is at the edge."""

MARGIN = 2


def require_charts() -> None:
    """Refuses to draw where the drawing packages are not installed.

    Raises:
        UnsupportedError: see above; it says how to install them.
    """
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"a page needs {' and '.join(missing)}; install them with: pip install 'accumulus[plot]'"
        )


def to_page(report: Diagnosis) -> str:
    """The page.

    Args:
        report: what was found.

    Returns:
        HTML with its scripts, data and tables inside.

    Raises:
        UnsupportedError: the drawing packages are not installed.
    """
    require_charts()
    import vl_convert

    kinds = [kind for kind in KINDS if any(row.kind == kind and row.histogram.num_nonzero for row in report.rows)]
    specs = {f"chart-{KINDS.index(kind)}": make_chart(report, kind) for kind in kinds}
    page = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    count = len(report.findings)
    found = "no finding" if not count else f"{count} finding{'s' if count > 1 else ''}"
    return page.substitute(
        title=f"Numerics in {html.escape(report.precision)}: {found}",
        subtitle=html.escape(f"{report.steps} on {report.device}, loss scale {power(report.loss_scale)}"),
        findings=findings_of(report),
        summary="<br>".join(html.escape(f"{text}.") for text in summaries(report)),
        figures="\n".join(figure_of(report, kind) for kind in kinds),
        tables=tables_of(report),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in report.notes),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        specs=as_script(specs),
    )


def summaries(report: Diagnosis) -> list[str]:
    """The loss scale, the updates and the payoff, as far as there are any, in a sentence each."""
    scales = "" if report.scales is None else f"loss scale, {report.scales}"
    found = (scales, describe_updates(report.rows), "" if report.payoff is None else str(report.payoff))
    return [text for text in found if text]


def make_chart(report: Diagnosis, kind: str) -> dict[str, Any]:
    """One line a layer, one cell a power of two, over the ranges of the formats.

    Args:
        report: what was found.
        kind: of numbers.

    Returns:
        A Vega-Lite chart as wide as the page.
    """
    import altair

    rows = drawn_rows(report, kind)
    labels = [row.name for row in rows]
    cells = [record for row in rows for record in cell_records(row)]
    low = min(record["from"] for record in cells) - MARGIN
    high = max(record["to"] for record in cells) + MARGIN
    low, high = min(low, -26), max(high, 17)
    bands = band_records(low, high)
    formats = altair.Scale(domain=list(COLORS), range=list(COLORS.values()))
    axis = altair.Axis(title="power of two", tickMinStep=4, format="d", grid=False)
    x = altair.X("from:Q", scale=altair.Scale(domain=[low, high], nice=False), axis=axis)
    y = altair.Y("layer:N", sort=None, scale=altair.Scale(domain=labels), title=None)
    height = max(3 * BAND_HEIGHT, ROW_HEIGHT * len(labels))
    behind = (
        altair.Chart({"values": bands})
        .mark_rect()
        .encode(
            x=x,
            x2="to:Q",
            color=altair.Color("format:N", scale=formats, legend=altair.Legend(title="holds", orient="top")),
            opacity=altair.Opacity("opacity:Q", scale=None),
            tooltip=["format:N", "what:N"],
        )
    )
    drawn = (
        altair.Chart({"values": cells})
        .mark_rect(color=CELLS, stroke=CELLS, strokeOpacity=0.25, strokeWidth=0.5)
        .encode(
            x=x,
            x2="to:Q",
            y=y,
            opacity=altair.Opacity("opacity:Q", scale=None),
            tooltip=["layer:N", "magnitude:N", "share:N", "becomes zero in fp16:N", "beyond fp16:N"],
        )
    )
    chart = altair.layer(behind, drawn, *scale_lines(report, kind, low, high))
    spec: dict[str, Any] = (
        chart.properties(width="container", height=height, description=describe(report, kind))
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=12, titleFontSize=12, labelLimit=220)
        .configure_axisY(domain=False, ticks=False)
        .to_dict()
    )
    return {key: value for key, value in spec.items() if key != "$schema"}


def drawn_rows(report: Diagnosis, kind: str) -> list[RangeRow]:
    """The rows of a kind that have something to draw."""
    return [row for row in report.rows if row.kind == kind and row.histogram.num_nonzero][:MOST_ROWS]


def cell_records(row: RangeRow) -> list[dict[str, Any]]:
    """One record for each power of two that a row's numbers have."""
    edges: dict[int, int] = {}
    for exponent, count in row.histogram.exponents().items():
        inside = max(LOWEST, min(HIGHEST, exponent))
        edges[inside] = edges.get(inside, 0) + count
    total = row.histogram.num_nonzero
    return [
        {
            "layer": row.name,
            "from": exponent,
            "to": exponent + 1,
            "opacity": round(0.15 + 0.85 * math.sqrt(count / total), 3),  # rare magnitudes must be seen
            "magnitude": f"2^{exponent} to 2^{exponent + 1}",
            "share": f"{count / total:.3%}",
            "becomes zero in fp16": f"{row.histogram.zeroed_ratio(FP16):.2%}",
            "beyond fp16": f"{row.histogram.overflow_ratio(FP16):.2%}",
        }
        for exponent, count in edges.items()
    ]


def band_records(low: float, high: float) -> list[dict[str, Any]]:
    """What the formats hold, from the widest to the narrowest: with all bits, and paler with fewer."""
    records = []
    for form, opacity in ((FP16, 0.16), (E5M2, 0.14), (E4M3, 0.18)):
        for what, start, end, strength in bands_of(form):
            if start < high and end > low:
                records.append(
                    {
                        "format": form.name,
                        "what": what,
                        "from": max(start, low),
                        "to": min(end, high),
                        "opacity": opacity * strength,
                    }
                )
    return records


def bands_of(form: Format) -> list[tuple[str, float, float, float]]:
    """A format's two ranges as powers of two: normal, and subnormal."""
    zero, normal, end = (math.log2(edge) for edge in (form.zero_below, form.smallest_normal, form.overflow_from))
    return [
        (f"{form.name} holds it with all {form.num_bits} bits", normal, end, 1.0),
        (f"{form.name} holds it with fewer bits", zero, normal, 0.5),
    ]


def scale_lines(report: Diagnosis, kind: str, low: float, high: float) -> list[Any]:
    """For gradients, where fp16 begins and ends under the present loss scale."""
    if not kind.endswith("gradient") or report.loss_scale == 1.0:
        return []
    import altair

    shift = math.log2(report.loss_scale)
    ends = ((FP16.zero_below, "fp16 begins"), (FP16.overflow_from, "fp16 ends"))
    records = [
        {"from": math.log2(edge) - shift, "text": f"{text} at loss scale {power(report.loss_scale)}"}
        for edge, text in ends
        if low <= math.log2(edge) - shift <= high
    ]
    lines = altair.Chart({"values": records}).mark_rule(strokeDash=[5, 4], strokeWidth=1.5)
    return [lines.encode(x="from:Q", tooltip=["text:N"])]


def figure_of(report: Diagnosis, kind: str) -> str:
    """A chart's place and what it shows, in words."""
    number, rows = KINDS.index(kind), drawn_rows(report, kind)
    is_open = " open" if len(rows) <= 40 or kind == "activation gradient" else ""
    return (
        f'<details{is_open}><summary>{html.escape(kind.capitalize())}s</summary><figure><div class="chart" '
        f'id="chart-{number}"></div><figcaption>{html.escape(describe(report, kind))}</figcaption></figure></details>'
    )


def describe(report: Diagnosis, kind: str) -> str:
    """A chart in two sentences, for those who do not see it."""
    rows = drawn_rows(report, kind)
    all_rows = sum(row.kind == kind and row.histogram.num_nonzero > 0 for row in report.rows)
    largest = max(rows, key=lambda row: row.histogram.largest)
    smallest = min(rows, key=lambda row: row.histogram.quantile(0.5))
    scale = " at loss scale 1" if kind.endswith("gradient") else ""
    cut = f" The first {len(rows)} of {all_rows} are drawn." if len(rows) < all_rows else ""
    what = "layers" if kind.startswith("activation") else "parameters"
    return (
        f"Powers of two of the {kind}s{scale} of {len(rows)} {what}. "
        f"The largest, {largest.histogram.largest:.3g}, is in {largest.name}; {smallest.name} has the smallest median, "
        f"{smallest.histogram.quantile(0.5):.3g}.{cut}"
    )


def findings_of(report: Diagnosis) -> str:
    """The findings as a list."""
    if not report.findings:
        return "<p><strong>No finding.</strong></p>"
    items = "".join(
        f"<li><strong>{html.escape(finding.kind)}</strong>: {html.escape(str(finding))}</li>"
        for finding in report.findings
    )
    return f'<ol class="findings">{items}</ol>'


def tables_of(report: Diagnosis) -> str:
    """Ranges, casts and operators as tables that can be unfolded."""
    trace = report.trace
    parts = [table("Ranges and shares", RANGE_HEADS, [range_cells(row, report.loss_scale) for row in report.rows])]
    parts.append(table("Casts, the costly ones first", DTYPE_HEADS, [cast_cells(cast) for cast in trace.casts]))
    for title, uses in (
        ("Ran in 16 bits: exponentials, norms, losses, large sums", trace.sensitive),
        ("Ran in float32 where 16 bits would do", trace.needless),
        ("Every operator", trace.uses),
    ):
        parts.append(table(title, DTYPE_HEADS, [use_cells(use) for use in uses]))
    return "\n".join(parts)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title; nothing where it has no rows."""
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    body = "\n".join(lines)
    return (
        f'<details><summary>{html.escape(title)}</summary><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def as_script(value: object) -> str:
    """A value as JavaScript that cannot end the script around it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
