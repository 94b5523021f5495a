"""What came out of a run, read back from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from accumulus.run.cut import describe_record
from accumulus.run.record import ENVIRONMENT_FILE, HELDOUT_FILE, METRICS_FILE, read_records
from accumulus.units import format_bytes, format_count, format_duration, format_rate


def summarize(folder: Path) -> dict[str, Any]:
    """The run's main numbers.

    Args:
        folder: a run folder with at least one step.

    Returns:
        Plain values; `heldout_first` and `heldout_last` hold the measurements' records, or None.
    """
    steps, heldout = read_records(folder / METRICS_FILE), read_records(folder / HELDOUT_FILE)
    environment = json.loads((folder / ENVIRONMENT_FILE).read_text("utf-8"))
    return {
        "folder": str(folder),
        "microbatch": describe_record(steps[-1]),
        "precision": environment["precision"],
        "precision_reason": environment["precision_reason"],
        "num_steps": steps[-1]["step"],
        "num_skipped": steps[-1]["num_skipped"],
        "num_samples": sum(record["num_samples"] for record in steps),
        "num_tokens": sum(record["num_tokens"] for record in steps),
        "step_seconds": sum(record["step_seconds"] for record in steps),
        "tokens_per_second": median(record["tokens_per_second"] for record in steps),
        "peak_bytes": max(record["peak_bytes"] for record in steps),
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "heldout_first": heldout[0] if heldout else None,
        "heldout_last": heldout[-1] if heldout else None,
    }


def show_summary(console: Console, summary: Mapping[str, Any], *, unit: str) -> None:
    """Prints a summary as a short table.

    Args:
        console: where to.
        summary: what `summarize` gave.
        unit: what the loss's weight counts.
    """
    skipped = f", {summary['num_skipped']} skipped" if summary["num_skipped"] else ""
    rows = [
        ("steps", f"{summary['num_steps']:,}{skipped}"),
        ("learned from", learned_from(summary, unit)),
        ("time in steps", format_duration(summary["step_seconds"])),
        ("speed", format_rate(summary["tokens_per_second"], unit)),
        ("peak memory", format_bytes(summary["peak_bytes"])),
        ("precision", summary["precision"]),
        ("micro-batch", summary["microbatch"]),
        ("training loss", change(summary["loss_first"], summary["loss_last"])),
    ]
    if summary["heldout_first"] is not None:
        first, last = summary["heldout_first"], summary["heldout_last"]
        rows += [
            (f"held-out {name.replace('_', ' ')}", change(first[name], last[name]))
            for name in last
            if name not in ("step", "seconds")
        ]
    rows.append(("run folder", summary["folder"]))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value, style="")
    console.print(table, highlight=False)


def learned_from(summary: Mapping[str, Any], unit: str) -> str:
    """How much was learned from, in elements and in samples, and in one of them where they are the same."""
    samples = f"{summary['num_samples']:,} samples"
    return samples if unit == "samples" else f"{format_count(summary['num_tokens'])} {unit}, {samples}"


def change(first: float | None, last: float | None) -> str:
    """From one number to another; None stands for one that was not finite."""
    shown = ["not finite" if number is None else f"{number:.4f}" for number in (first, last)]
    return " -> ".join(shown)
