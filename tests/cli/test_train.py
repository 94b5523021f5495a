import json
import shutil
import subprocess
import sys

import pytest

from accumulus.cli.main import main
from accumulus.run.record import read_records

TASK = """
import torch
import accumulus as acc

def task():
    return acc.Task(
        model=torch.nn.Linear(3, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, rows: (model(rows) - 1).square().mean(),
        train_data=list(torch.randn(20, 3)),
    )
"""


@pytest.fixture
def task_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    return "mine.py:task"


def test_train_then_more_of_it(task_file, tmp_path, capsys):
    words = ["train", task_file, "--steps", "3", "--batch-size", "8", "--microbatch", "3", "--out", "run one"]
    assert main(words) == 0
    assert main(["train", "--resume", "run one", "--steps=5", "--microbatch", "8"]) == 0
    records = read_records(tmp_path / "run one" / "metrics.jsonl")
    assert [record["num_microbatches"] for record in records] == [3, 3, 2, 1, 1]
    assert main(["train", "--resume=run one", "--steps", "9", "--seed", "3"]) == 2
    assert "--seed was 0 and cannot become 3" in capsys.readouterr().err
    assert main(["train", "--resume", "run one", "--out", "elsewhere"]) == 2


def test_default_folder(task_file, tmp_path):
    assert main(["train", task_file, "--steps", "1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("task-")
    assert (folder / "state.pt").exists()


def test_options_of_another_task_are_refused(task_file, capsys):
    assert main(["train", task_file, "--num-layers", "3"]) == 2
    assert "--num-layers belongs to the built-in task" in capsys.readouterr().err


def test_a_run_that_cannot_go_on_is_saved_and_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK.replace("- 1).square().mean()", "* float('nan')).mean()"))
    words = ["train", "mine.py:task", "--steps", "500", "--batch-size", "4", "--precision", "fp16", "--out", "run"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "failed; the state before it is saved in run" in shown.out
    assert shown.err.startswith("accumulus: ")
    assert shown.err.count("\n") == 1
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert records[-1]["num_skipped"] == len(records)
    assert (tmp_path / "run" / "state.pt").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_trains_as_the_plain_one(tmp_path):
    """In processes of their own: the compiler's warnings are torch's."""
    losses = []
    for name, flags in (("plain", []), ("compiled", ["--compile"])):
        out = tmp_path / name
        options = [
            "--steps",
            "2",
            "--num-evals",
            "0",
            "--max-length",
            "32",
            "--d-model",
            "16",
            "--num-layers",
            "1",
            "--batch-size",
            "8",
            "--microbatch",
            "3",
        ]
        words = [sys.executable, "-m", "accumulus", "train", *options, "--precision", "fp32", "--out", str(out), *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
