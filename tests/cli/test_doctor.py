import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accumulus.cli.main import main

RUN = Path(__file__).parent.parent / "run"
DEEP = f"{RUN / 'deep.py'}:task"
QUICK = ["--batch-size", "8", "--microbatch", "4", "--device", "cpu", "--rounds", "0", "--steps", "2"]

SICK = """
import torch
import accumulus as acc

class Bad(torch.nn.Module):
    def forward(self, x):
        return (x.relu() * 0).sqrt()

def task():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Bad(), torch.nn.Linear(4, 1))
    return acc.Task(model=model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                    loss_fn=lambda model, x: model(x).float().square().mean(), train_data=list(torch.randn(32, 4)))

def narrow():
    model = torch.nn.Linear(4, 1).bfloat16()
    return acc.Task(model=model, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-7),
                    loss_fn=lambda model, x: model(x).float().square().mean(),
                    train_data=list(torch.randn(32, 4).bfloat16()))

def broken():
    model = torch.nn.Linear(4, 1)
    return acc.Task(model=model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                    loss_fn=lambda model, x: model(x[:, :2]).mean(), train_data=list(torch.randn(32, 4)))
"""


@pytest.fixture
def sick(tmp_path):
    path = tmp_path / "sick.py"
    path.write_text(SICK)
    return path


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--precision bf17", "--precision: 'bf17' is unknown"),
        ("--steps 0", "--steps 0 must be larger than 0"),
        ("--rows 0", "--rows 0 must be at least 1"),
        ("--rounds -1", "--rounds -1 must be at least 0"),
        ("--device toaster", "toaster"),
        ("--json nowhere/doctor.json", "its folder does not exist"),
        ("--page doctor.png", "the name must end in .html"),
        ("--page nowhere/doctor.html", "its folder does not exist"),
        ("--precison fp16", "did you mean --precision?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(line, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", DEEP, "--batch-size", "8", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accumulus: ") and shown.err.count("\n") == 1
    assert told in shown.err
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_says_so_before_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("accumulus.run.doctor.find_spec", lambda name: None)
    assert main(["doctor", DEEP, *QUICK, "--page", str(tmp_path / "doctor.html")]) == 2
    assert "pip install 'accumulus[plot]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vl_convert") is None, reason="needs the extra plot")
def test_the_built_in_task_with_all_files(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {number}, which is about the number {number}." for number in range(80)))
    files = ["--json", str(tmp_path / "doctor.json"), "--page", str(tmp_path / "doctor.html")]
    small = ["--d-model", "16", "--num-heads", "1", "--num-layers", "1"]
    assert main(["doctor", "--data", str(text), *QUICK, *small, *files]) == 0
    out = capsys.readouterr().out
    assert "bytes in fp16 on cpu, 2 steps" in out and "No finding." in out
    content = json.loads((tmp_path / "doctor.json").read_text())
    assert content["findings"] == []
    assert "vegaEmbed" in (tmp_path / "doctor.html").read_text()


def test_a_sick_task_is_told_and_the_exit_code_says_so(sick, capsys):
    assert main(["doctor", f"{sick}:task", *QUICK, "--precision", "fp32"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "1. non-finite" in out and "made by '1', div in the backward pass" in out


def test_a_task_that_fails_is_no_finding(sick, capsys):
    """Exit code 1 would say that the numbers are bad; they were never looked at."""
    assert main(["doctor", f"{sick}:broken", *QUICK]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "its loss function failed: RuntimeError: mat1 and mat2" in shown.err


def test_a_task_with_16_bit_parameters(sick, capsys):
    assert main(["doctor", f"{sick}:narrow", *QUICK]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "bf16 parameters" in out and "weights stand still" in out


def test_a_dumb_terminal_gets_80_plain_columns():
    environment = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    words = [sys.executable, "-m", "accumulus", "doctor", DEEP, *QUICK]
    shown = subprocess.run(words, capture_output=True, env=environment)
    assert shown.stderr == b""
    assert shown.returncode == 0
    text = shown.stdout.decode("ascii")
    assert "\x1b" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
