import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accumulus.cli.main import main

RUN = Path(__file__).parent.parent / "run"
LINE = f"{RUN / 'tiny.py'}:line"
DEEP = f"{RUN / 'deep.py'}:task"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--device toaster", "--device toaster cannot be used"),
        ("--precision bf17", "'bf17' is unknown; use one of auto, fp32, tf32, bf16, fp16"),
        ("--batch-size 1", "--batch-size 1: one sample cannot be split"),
        ("--batch-size 0", "--batch-size 0 must be larger than 0"),
        ("--microbatch half", "--microbatch 'half' must be a number of samples"),
        ("--json nowhere/check.json", "--json nowhere/check.json: its folder does not exist"),
        ("--d-model 64", "--d-model belongs to the built-in task"),
        ("--presicion bf16", "did you mean --precision?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(line, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", DEEP, *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accumulus: ") and shown.err.count("\n") == 1
    assert told in shown.err


@pytest.mark.parametrize(
    ("name", "told"),
    [("failing", "its loss function failed: RuntimeError: the loss is lost"), ("no_loss", "returned 'nothing'")],
)
def test_a_task_that_cannot_be_run_is_bad_input_and_not_unequal(name, told, capsys):
    assert main(["check", DEEP.replace(":task", f":{name}")]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.count("\n") == 1


def test_equal_is_0_and_unequal_is_1(tmp_path, capsys):
    assert main(["check", LINE, "--batch-size", "8", "--json", str(tmp_path / "equal.json")]) == 0
    assert "equal" in capsys.readouterr().out
    assert json.loads((tmp_path / "equal.json").read_text())["is_equal"] is True
    assert main(["check", DEEP, "--batch-size", "8", "--json", str(tmp_path / "unequal.json")]) == 1
    shown = capsys.readouterr().out
    assert "NOT EQUAL" in shown
    assert "depends on padding: the loss function" in shown
    content = json.loads((tmp_path / "unequal.json").read_text())
    assert content["verdict"] == "not equal"
    assert [cause["kind"] for cause in content["causes"]] == ["padding"]


def test_the_built_in_task_is_equal_in_its_precision_too(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {number}, about the number {number**number}." for number in range(40)))
    words = ["--data", str(text), "--max-length", "32", "--d-model", "32", "--batch-size", "8", "--microbatch", "3"]
    assert main(["check", *words, "--precision", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert "3 at a time" in shown
    assert "by_tokens(" in shown
    assert "accumulation adds nothing to that" in " ".join(shown.split())


def test_a_dumb_terminal_gets_80_plain_columns():
    environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    shown = subprocess.run(
        [sys.executable, "-m", "accumulus", "check", DEEP, "--batch-size", "8"], capture_output=True, env=environment
    )
    assert shown.returncode == 1
    assert shown.stderr == b""
    text = shown.stdout.decode("ascii")
    assert "\x1b" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
