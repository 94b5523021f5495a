"""`accumulus bench`: one task in several precisions, accumulated and whole, beside a plain loop, in one go."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accumulus.errors import UsageError
from accumulus.run.bench_config import BenchConfig
from accumulus.run.cases import PLAIN, Case, list_cases
from accumulus.units import format_bytes

CAPTION = (
    "Each case ran in a process of its own, with the same seed, samples and number of steps. Speed: the median step "
    "after the first. Memory: the most that training added to the loaded model and data. Loss: the last step's."
)


def bench(config: BenchConfig) -> int:
    """Measures every case, prints the table and writes the figures where a file was asked for.

    Args:
        config: what to measure.

    Returns:
        The exit code: 1 where a case failed.

    Raises:
        UsageError: bad input; or every case failed in the same way.

    Cost:
        About a minute with the defaults on two cores; nothing else should run beside it.
    """
    config.validate()
    console = Console()
    rows = []
    with console.status("") as status:
        for case in list_cases(config):
            status.update(f"{case.name}, {case.precision}, micro-batches of {case.microbatch}")
            rows.append({**asdict(case), **run_case(config, case)})
    failed = [row for row in rows if "error" in row]
    if len(failed) == len(rows):
        raise UsageError(failed[0]["error"])
    add_ratios(rows)
    show_table(console, rows)
    if config.json is not None:
        write_json(Path(config.json), config, rows)
    return 1 if failed else 0


def run_case(config: BenchConfig, case: Case) -> dict[str, Any]:
    """Measures one case in a fresh process, so that neither memory nor warm caches of another one count.

    Args:
        config: what to measure.
        case: which row.

    Returns:
        Its figures; or `{"error": one line}`.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(config, case, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the process ends the wait
    try:
        figures: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        return {"error": f"the process ended with exit code {process.exitcode}; was it out of memory?"}
    finally:
        receiver.close()
    process.join()
    return figures


def _measure_and_send(config: BenchConfig, case: Case, sender: Connection) -> None:
    """What the fresh process does. Torch is imported here, so that the parent stays small and starts fast."""
    from accumulus.run.measure import measure

    try:
        sender.send(measure(config, case))
    except Exception as error:  # a sentence for the table
        sender.send({"error": " ".join(f"{error}".split()) or type(error).__name__})
    finally:
        sender.close()


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Adds each row's speed in plain loops, where both ran."""
    plain = next((row.get("samples_per_second") for row in rows if row["name"] == PLAIN), None)
    for row in rows:
        if plain and "samples_per_second" in row:
            row["plain_ratio"] = row["samples_per_second"] / plain


def show_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows.

    Args:
        console: where to.
        rows: cases with their figures.
    """
    table = Table(box=None, pad_edge=False, caption=CAPTION, caption_justify="left")
    for title in ("case", "precision", "micro-batch", "samples/s", "of plain", "memory", "last loss"):
        table.add_column(title, justify="left" if title in ("case", "precision") else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["name"], row["precision"], str(row["microbatch"]), *cells(row))
    console.print(table)
    for row in rows:
        note = row.get("error") or (f"{row['num_skipped']} steps skipped" if row["num_skipped"] else "")
        if note:
            console.print(f"{row['name']}, {row['precision']}: {note}", markup=False, soft_wrap=True)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The measured part of a row as text."""
    if "error" in row:
        return ["failed", "", "", ""]
    return [
        f"{row['samples_per_second']:.0f}",
        f"{row['plain_ratio']:.2f}" if "plain_ratio" in row else "",
        format_bytes(row["peak_bytes"]),
        f"{row['loss']:.4f}",
    ]


def write_json(path: Path, config: BenchConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the figures.

    Args:
        path: the file; replaced.
        config: what was measured.
        rows: cases with their figures.

    Raises:
        UsageError: it cannot be written.
    """
    from accumulus.run.record import without_nonfinite

    try:
        path.write_text(json.dumps(without_nonfinite({"config": asdict(config), "rows": rows}), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written ({error.strerror}); give another file") from None
