"""`make bench`: measures everything, prints it, and writes the README's table from what was measured.

python benchmarks/run_all.py            measure, write benchmarks/results/latest.json and the table
python benchmarks/run_all.py --table    write the table again from the last results
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from timing import Rows, show

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"
SCRIPTS = ("overhead", "streaming", "update", "norm", "low_precision", "memory", "tokens", "auto", "doctor")
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def measure_apart(script: str) -> Rows:
    """Each script in a process of its own, so that none runs on what another left behind."""
    code = f"import json, {script}; print(json.dumps({script}.measure()))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parent
    )
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def measure_all() -> dict[str, object]:
    import torch

    import accumulus

    rows: Rows = []
    for script in SCRIPTS:
        print(f"measuring {script} ...", file=sys.stderr)
        rows += measure_apart(script)
    return {
        "rows": rows,
        "torch": torch.__version__,
        "accumulus": accumulus.__version__,
        "cpu": cpu_name(),
        "num_threads": torch.get_num_threads(),
        "num_cores": os.cpu_count(),
        "fast_precision": str(accumulus.Precision.parse("auto", "cpu")),
        "why": accumulus.Precision.parse("auto", "cpu").reason,
    }


def table(results: dict[str, object]) -> str:
    rows = []
    for row in results["rows"]:  # type: ignore[attr-defined]
        bound = "" if row["bound"] is None else f"{row['bound']:.2f}"
        rows.append(f"| {row['what']} | {row['against']} | **{row['ratio']:.2f}** | {bound} |")
    where = f"{results['cpu']}, {results['num_threads']} threads, torch {results['torch']}; {results['why']}"
    head = ["| time of | against, in the same run | ratio | bound |", "|---|---|---|---|"]
    return "\n".join([BEGIN, *head, *rows, "", f"Measured by `make bench` on {where}.", END])


def main() -> None:
    if "--table" not in sys.argv:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(measure_all(), indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    show(results["rows"])
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    readme.write_text(before + table(results) + rest.split(END)[1])


if __name__ == "__main__":
    main()
