"""What the doctor found, in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accumulus import NumericsReport
from accumulus.units import format_bytes

KIND_NAMES = {
    "activation": "activation",
    "activation gradient": "its grad.",
    "weight": "weight",
    "weight gradient": "its grad.",
    "update": "update",
}
NAME_WIDTH, HEAD = 28, 9
STYLES = {"certain": "bold red", "likely": "bold yellow", "possible": "bold"}


def show_report(console: Console, report: NumericsReport, *, task: str, num_rows: int) -> None:
    """Prints a report: findings, loss scale, ranges, dtypes and payoff.

    Args:
        console: where to.
        report: what was found.
        task: its name.
        num_rows: lines of each table.
    """
    say(console, f"{task} in {report.precision} on {report.device}, {report.steps}")
    show_findings(console, report)
    if report.scales is not None:
        say(console, f"\nloss scale, {report.scales}")
    if report.updates:
        say(console, report.updates)
    show_ranges(console, report, num_rows)
    show_dtypes(console, report, num_rows)
    if report.payoff is not None:
        say(console, f"\n{report.payoff}")
    for note in report.notes:
        console.print(note, style="dim", markup=False, highlight=False)


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False)


def show_findings(console: Console, report: NumericsReport) -> None:
    """The findings, or that there are none."""
    if not report.findings:
        console.print(Text("No finding.", style="bold green"))
        return
    for number, finding in enumerate(report.findings, 1):
        head = Text(f"{number}. {finding.kind} ", style=STYLES[finding.sureness])
        console.print(head.append(Text(str(finding), style="not bold default")))


def show_ranges(console: Console, report: NumericsReport, num_rows: int) -> None:
    """The layers that low precision treats worst."""
    rows = sorted(report.rows, key=lambda row: -worst_of(row, report.loss_scale))[:num_rows]
    table = new_table("layer", ("of", "median", "largest", "fp16\nzero", "at the\nscale", "fp16\nover", "e4m3\nzero"))
    for row in rows:
        shares = shares_of(row, report.loss_scale)
        zeroed, scaled, over, narrow = (percent(shares[name]) for name in ("fp16", "scaled", "over", "e4m3"))
        table.add_row(
            shortened(row.name),
            KIND_NAMES[row.kind],
            f"{row.histogram.quantile(0.5):.1e}",
            f"{row.histogram.largest:.1e}",
            zeroed,
            scaled if row.kind.endswith("gradient") else "",
            over,
            narrow,
        )
    say(console, f"\nranges, the {len(rows)} worst of {len(report.rows)} (shares of the nonzero numbers)")
    console.print(table)


def shares_of(row: Any, loss_scale: float) -> dict[str, float]:
    """The shares that the table shows; `diagnose` names the formats."""
    shares = row.shares(loss_scale)
    is_gradient = row.kind.endswith("gradient")
    scaled = shares["fp16 scaled"] if is_gradient else shares["fp16"]
    return {
        "fp16": shares["fp16"]["zeroed"],
        "scaled": scaled["zeroed"],
        "over": scaled["overflow"],
        "e4m3": shares["e4m3"]["zeroed"],
    }


def worst_of(row: Any, loss_scale: float) -> float:
    """Orders rows: overflow first, then what becomes zero at the scale, then without it."""
    shares = shares_of(row, loss_scale)
    return 100 * shares["over"] + 10 * shares["scaled"] + shares["fp16"] + shares["e4m3"] / 100


def show_dtypes(console: Console, report: NumericsReport, num_rows: int) -> None:
    """Costly casts, and operators in the wrong dtype."""
    trace = report.trace
    casts = [(cast.module, f"{cast.source} to {cast.target}", cast.count, cast.num_bytes) for cast in trace.casts]
    show_uses(console, "casts, the costly ones first", casts[:num_rows])
    for title, uses in (
        ("in 16 bits: exponentials, norms, losses, large sums", trace.sensitive),
        ("in float32 where 16 bits would do", trace.needless if trace.casts else []),
    ):
        found = [(use.module, f"{use.operator} in {use.output}", use.count, use.num_bytes) for use in uses]
        show_uses(console, title, found[:num_rows])


def show_uses(console: Console, title: str, rows: Sequence[tuple[str, str, int, int]]) -> None:
    """One table of what happened in which module how often; nothing where it is empty."""
    if not rows:
        return
    table = new_table("module", ("what", "calls", "bytes"))
    for module, what, count, num_bytes in rows:
        table.add_row(shortened(module) or "(loss function)", what, str(count), format_bytes(num_bytes))
    say(console, f"\n{title}")
    console.print(table)


def new_table(first: str, others: Sequence[str]) -> Table:
    """A table without a frame, the first column to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold", vertical="bottom")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    return table


def shortened(name: str) -> str:
    """A path that fits its column, without its middle."""
    return name if len(name) <= NAME_WIDTH else f"{name[:HEAD]}...{name[HEAD + 3 - NAME_WIDTH :]}"


def percent(ratio: float) -> str:
    """A share in a few letters; nothing at all is empty."""
    if ratio <= 0:
        return ""
    return "<0.1%" if ratio < 0.001 else f"{100 * ratio:.3g}%"
