import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accumulus.cli.main import main

RUN = Path(__file__).parent.parent / "run"
DEEP = f"{RUN / 'deep.py'}:task"
QUICK = ["--batch-size", "8", "--precisions", "fp32", "--device", "cpu"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--memory lots", "--memory lots: "),
        ("--memory 24XiB", "24GiB"),
        ("--memory 0GiB", "at least 1 byte"),
        ("--device toaster", "--device toaster is no torch device"),
        ("--device A100", "did you mean A100-40GB or A100-80GB?"),
        ("--precisions bf17", "'bf17' is unknown; use some of auto, fp32, tf32, bf16, fp16"),
        ("--precisions bf16-pure", "'bf16-pure' is unknown"),
        ("--batch-size 0", "--batch-size 0 must be larger than 0"),
        ("--batch-size 41", "--batch-size 41 is more than the 40 samples"),
        ("--microbatch 0", "--microbatch 0 must be larger than 0"),
        ("--microbatch half", "--microbatch 'half' must be a number of samples"),
        ("--json nowhere/plan.json", "--json nowhere/plan.json: its folder does not exist"),
        ("--picture plan.pdf", "--picture plan.pdf: the name must end in .png or .html"),
        ("--picture nowhere/plan.png", "its folder does not exist"),
        ("--d-model 64", "--d-model belongs to the built-in task"),
        ("--memroy 1GiB", "did you mean --memory?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(line, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", DEEP, "--batch-size", "8", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accumulus: ") and shown.err.count("\n") == 1
    assert told in shown.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_task_is_one_line(capsys):
    assert main(["plan", "bites"]) == 2
    assert capsys.readouterr().err.startswith("accumulus: unknown task 'bites'")


def test_a_loss_function_that_fails_is_one_line_and_the_works_own_failure(capsys):
    assert main(["plan", DEEP.replace(":task", ":failing"), *QUICK, "--memory", "1MiB"]) == 1
    shown = capsys.readouterr()
    assert "the loss is lost" in shown.err
    assert shown.err.count("\n") == 1


def test_without_the_extra_it_says_so_before_it_estimates(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("accumulus.run.plan_picture.find_spec", lambda name: None)
    assert main(["plan", DEEP, *QUICK, "--picture", str(tmp_path / "plan.png")]) == 2
    shown = capsys.readouterr()
    assert "pip install 'accumulus[plot]'" in shown.err
    assert shown.out == ""


def test_the_built_in_task_with_all_files(tmp_path, capsys):
    """One run of everything: the table, both kinds of picture, the JSON file."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {number}, which is about the number {number}." for number in range(80)))
    words = [
        "plan",
        "--data",
        str(text),
        "--batch-size",
        "16",
        "--memory",
        "1GiB",
        "--precisions",
        "fp32",
        "--device",
        "cpu",
    ]
    for name in ("plan.png", "plan.html"):
        assert main([*words, "--json", str(tmp_path / "plan.json"), "--picture", str(tmp_path / name)]) == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    assert [row["microbatch"] for row in content["rows"]] == [1, 2, 4, 8, 16]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "vegaEmbed" in (tmp_path / "plan.html").read_text()
    assert capsys.readouterr().out.count("Recommended: fp32, 1 micro-batch of 16: ") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json", "plan.png", "text.txt"]


def test_a_dumb_terminal_gets_80_plain_columns():
    environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    shown = subprocess.run(
        [sys.executable, "-m", "accumulus", "plan", DEEP, *QUICK, "--memory", "200KiB"],
        capture_output=True,
        env=environment,
    )
    assert shown.returncode == 1
    assert shown.stderr == b""
    text = shown.stdout.decode("ascii")
    assert "\x1b" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "Not one sample fits" in text
