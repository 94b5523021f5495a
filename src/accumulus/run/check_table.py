"""A check's report in the terminal: the verdict, the causes, the table; readable without colour and in 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from accumulus import EquivalenceReport
from accumulus.units import format_duration

NUM_ROWS = 12


def show_report(console: Console, task: str, report: EquivalenceReport) -> None:
    """Prints a report.

    Args:
        console: where to.
        task: the task's name.
        report: what to print.
    """
    console.print(
        Text(f"{task}: ", style="bold").append(
            report.verdict.upper() if not report else report.verdict, style="bold green" if report else "bold red"
        )
    )
    console.print(
        Text(f"{report.num_samples} samples whole and in pieces, in {report.dtype}, {format_duration(report.seconds)}")
    )
    show_causes(console, report)
    console.print()
    console.print(splits_table(report))
    console.print()
    console.print(differences_table(report))
    show_precision(console, report)
    for note in report.notes:
        console.print(Text(note, style="dim"))


def show_causes(console: Console, report: EquivalenceReport) -> None:
    """Every cause with its evidence and its remedy."""
    for cause in report.causes:
        console.print()
        console.print(Text(f"{cause.kind}: ", style="bold yellow").append(", ".join(cause.where), style="not bold"))
        console.print(Padding(Text(cause.evidence), (0, 0, 0, 2)))
        console.print(Padding(Text(cause.remedy, style="cyan"), (0, 0, 0, 2)))


def splits_table(report: EquivalenceReport) -> Table:
    """The ways in which the batch was cut."""
    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    table.add_column("micro-batches of")
    table.add_column("gradient error", justify="right")
    table.add_column("")
    for split in report.splits:
        sizes = ", ".join(map(str, split.sizes[:10])) + (" ..." if len(split.sizes) > 10 else "")
        error = "" if split.problem else f"{split.error:.1e}"
        verdict = "not run" if split.problem else "equal" if split.is_equal else "not equal"
        table.add_row(Text(split.name), sizes, error, verdict)
    return table


def differences_table(report: EquivalenceReport) -> Table:
    """What differs most, the worst first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("worst first", overflow="fold")
    table.add_column("")
    for name in ("error", "rounding", "allowed"):
        table.add_column(name, justify="right")
    for row in report.differences[:NUM_ROWS]:
        style = "" if row.is_equal else "red"
        numbers = [f"{value:.1e}" for value in (row.error, row.floor, row.allowed)]
        table.add_row(Text(row.name), "" if row.what == row.name else row.what, *numbers, style=style)
    rest = len(report.differences) - NUM_ROWS
    if rest > 0:
        table.add_row(f"... and {rest} more")
    return table


def show_precision(console: Console, report: EquivalenceReport) -> None:
    """How far the asked precision is from float64, whole and in pieces."""
    total = report.precision_total
    if total is None:
        return
    adds = report.accumulation_adds
    says = (
        "the difference above is part of that"
        if adds is None
        else f"accumulation adds {'error' if adds else 'nothing'} to that"
    )
    console.print()
    console.print(
        Text(
            f"In {report.precision} the gradient is {total.whole:.1e} from float64 whole, {total.accumulated:.1e} in "
            f"pieces: {says}."
        )
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("worst first", overflow="fold")
    table.add_column("whole", justify="right")
    table.add_column("in pieces", justify="right")
    for row in report.precision_errors[:NUM_ROWS]:
        table.add_row(Text(row.name), f"{row.whole:.1e}", f"{row.accumulated:.1e}")
    console.print(table)
