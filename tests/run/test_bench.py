import io
import json

import pytest
from rich.console import Console

from accumulus.errors import UsageError
from accumulus.run.bench import add_ratios, bench, show_table
from accumulus.run.bench_config import BenchConfig
from accumulus.run.cases import list_cases
from accumulus.run.measure import measure


def config(tiny_file, **options):
    settings = {"batch_size": 16, "microbatch": "5", "steps": 2, "device": "cpu"}
    return BenchConfig(task=f"{tiny_file}:line", **(settings | options))


def test_cases():
    cases = [(case.name, case.precision, case.microbatch) for case in list_cases(BenchConfig(precisions=("bf16",)))]
    assert cases == [("plain loop", "fp32", 32), ("accumulated", "bf16", 32), ("whole batch", "bf16", 256)]


def test_every_case_makes_the_same_steps(tiny_file):
    options = config(tiny_file)
    losses = {(case.name, case.precision): measure(options, case)["loss"] for case in list_cases(options)}
    plain = losses["plain loop", "fp32"]
    assert losses["accumulated", "fp32"] == pytest.approx(plain, rel=1e-5)
    assert losses["whole batch", "fp32"] == pytest.approx(plain, rel=1e-5)
    assert all(loss == pytest.approx(plain, rel=0.05) for loss in losses.values())


def test_table_shows_failures_and_ratios():
    good = {"precision": "fp32", "microbatch": 4, "peak_bytes": 2**21, "loss": 0.5, "num_skipped": 1}
    rows = [
        {"name": "plain loop", "samples_per_second": 50.0, **good},
        {"name": "accumulated", "samples_per_second": 75.0, **good},
        {"name": "whole batch", "precision": "fp16", "microbatch": 8, "error": "no [fp16] here"},
    ]
    add_ratios(rows)
    output = io.StringIO()
    show_table(Console(file=output, width=80), rows)
    assert "1.50" in output.getvalue()
    assert "accumulated, fp32: 1 steps skipped" in output.getvalue()
    assert "no [fp16] here" in output.getvalue()
    assert "2.00 MiB" in output.getvalue()


@pytest.mark.slow
def test_processes_of_their_own_and_the_file(tiny_file, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert bench(config(tiny_file, precisions=("fp32",), json=str(path))) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["plain loop", "accumulated", "whole batch"]
    assert all(row["samples_per_second"] > 0 and row["peak_bytes"] < 2**30 for row in rows)
    assert "plain loop" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_what_fails_everywhere_is_bad_input(tiny_file):
    with pytest.raises(UsageError, match="its function must return"):
        bench(BenchConfig(task=f"{tiny_file}:nothing", precisions=("fp32",)))
