"""A plan in the terminal: the table, the bars, the recommendation; readable without colour and in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accumulus.run.plan_bars import show_bars
from accumulus.run.plan_result import Plan, Shortfall
from accumulus.run.plan_rows import FITS, TIGHT, Row
from accumulus.units import format_bytes

SHORT = {
    "parameters": "para-\nmeters",
    "gradients": "gradi-\nents",
    "optimizer state": "opti-\nmizer",
    "cast weights": "cast\nwghts",
    "activations": "activ-\nations",
    "temporary": "tempo-\nrary",
}
"""Headings that fit above a number."""

TABLE_WIDTH = 80

VERDICT_STYLES = {FITS: "green", TIGHT: "yellow"}


@dataclass(frozen=True)
class Unit:
    """One unit for a whole table, so that its numbers can be compared by their width."""

    name: str
    size: int
    digits: int

    def show(self, num_bytes: float) -> str:
        """A number of bytes in this unit."""
        return f"{num_bytes / self.size:.{self.digits}f}"


def choose_unit(peaks: Sequence[int]) -> Unit:
    """The unit in which the largest number has at most six characters.

    Args:
        peaks: the numbers to show.

    Returns:
        The smallest such unit.

    Example:
        >>> choose_unit([3 * 2**20, 200 * 2**20]).name
        'MiB'
    """
    largest = max(peaks)
    for exponent, name in enumerate(("KiB", "MiB", "GiB"), start=1):
        if largest < 10_000 * 1024**exponent:
            return Unit(name, 1024**exponent, digits=2 if largest < 999 * 1024**exponent else 1)
    return Unit("TiB", 1024**4, digits=2)


def show_plan(console: Console, plan: Plan) -> None:
    """Prints a plan.

    Args:
        console: where to.
        plan: what to print.
    """
    unit = choose_unit([row.peak_bytes for row in plan.rows])
    console.print(
        Text(f"{plan.task}, batch {plan.batch_size}, on {plan.device}\n", style="bold").append(
            f"peak memory of a step in {unit.name}; limit {format_bytes(plan.limit.limit_bytes)} ({plan.limit.source})",
            style="not bold",
        )
    )
    console.print()
    has_room = console.width >= TABLE_WIDTH
    console.print(make_table(plan, unit, with_parts=has_room))
    if not has_room:
        console.print(
            f"The parts need {TABLE_WIDTH} columns; --json FILE holds them too.", style="dim", highlight=False
        )
    console.print()
    show_bars(console, plan)
    console.print()
    for note in plan.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    if plan.choice is not None:
        show_choice(console, plan)
    if plan.shortfall is not None:
        show_shortfall(console, plan.shortfall, plan.limit.limit_bytes)


def make_table(plan: Plan, unit: Unit, *, with_parts: bool) -> Table:
    """Precision and micro-batch, the parts, the peak and whether it fits.

    Args:
        plan: with at least one row.
        unit: of the numbers.
        with_parts: whether there is room for them.

    Returns:
        A table of `TABLE_WIDTH` columns; less than half of it without the parts.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("preci-\nsion", no_wrap=True)
    parts = list(plan.rows[0].parts) if with_parts else []
    titles = ["micro-\nbatch", "how\nmany", *(SHORT.get(part, part) for part in parts)]
    for title in [*titles, "\npeak", "of\nlimit", "\nfits"]:
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    before = None
    for row in plan.rows:
        if before not in (None, row.precision):
            table.add_row()
        is_chosen = plan.choice is not None and plan.choice.row == row
        table.add_row(
            row.precision if before != row.precision else "",
            *cells(row, unit, parts),
            style="bold" if is_chosen else "",
        )
        before = row.precision
    return table


def cells(row: Row, unit: Unit, parts: Sequence[str]) -> list[Text | str]:
    """A row's cells, from the micro-batch on."""
    percent = 100 * row.limit_ratio
    share = f"{percent:.0f}%" if 0.5 <= percent < 999.5 else "<1%" if percent < 1 else ">999%"
    return [
        str(row.microbatch),
        str(row.num_microbatches),
        *(unit.show(row.parts[part]) for part in parts),
        unit.show(row.peak_bytes),
        share,
        Text(row.verdict, style=VERDICT_STYLES.get(row.verdict, "red")),
    ]


def show_choice(console: Console, plan: Plan) -> None:
    """Prints the recommended line and what to type."""
    assert plan.choice is not None
    row = plan.choice.row
    pieces = f"{row.num_microbatches} micro-batch{'es' if row.num_microbatches > 1 else ''} of {row.microbatch}"
    share = f"{100 * row.limit_ratio:.2g}% of the memory"
    console.print(
        Text("Recommended: ", style="bold").append(
            f"{row.precision}, {pieces}: {format_bytes(row.peak_bytes)}, {share}", style="bold green"
        )
    )
    console.print(Text(f"  {plan.choice.command}", style="bold"), soft_wrap=True)
    for reason in plan.choice.reasons:
        console.print(f"  {reason}", style="dim", markup=False, highlight=False)


def show_shortfall(console: Console, shortfall: Shortfall, limit_bytes: int) -> None:
    """Prints what dominates, and what would make one sample fit.

    Args:
        console: where to.
        shortfall: why nothing fits.
        limit_bytes: the memory to fit into.
    """
    name, num_bytes, ratio = shortfall.dominant
    missing = format_bytes(shortfall.peak_bytes - limit_bytes)
    console.print(
        Text("Not one sample fits: ", style="bold red")
        .append(
            f"{shortfall.precision} needs {format_bytes(shortfall.peak_bytes)}, {missing} more than there is. ",
            style="bold",
        )
        .append(f"Most of it is {name}: {format_bytes(num_bytes)}, {ratio:.0%} of the peak ({shortfall.phase}).")
    )
    if shortfall.measures:
        console.print()
        console.print(measures_table(shortfall))
        console.print()
    for measure in shortfall.measures:
        if len(measure.changes) == 1:
            console.print(f"{measure.name}: {measure.how}", markup=False, highlight=False)
    for note in shortfall.notes:
        console.print(note, markup=False, highlight=False)


def measures_table(shortfall: Shortfall) -> Table:
    """Each measure with the bytes it saves and whether they are enough."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what would help")
    for title in ("saves", "then needs", "enough"):
        table.add_column(title, justify="right", no_wrap=True)
    for measure in shortfall.measures:
        table.add_row(
            measure.name,
            format_bytes(max(0, measure.saved_bytes)),
            format_bytes(measure.peak_bytes),
            Text("yes", style="green") if measure.is_enough else Text("no", style="red"),
        )
    return table
