import json
import math
from pathlib import Path

import pytest

from accumulus.errors import UsageError
from accumulus.run.record import Recorder, make_folder, plan_folder, read_records, to_json


def test_json_is_valid_whatever_the_numbers():
    value = {"a": math.nan, "b": [math.inf, 1.5, -math.inf], "c": {"d": (math.nan, None, True)}, "e": "NaN"}
    assert json.loads(to_json(value)) == {
        "a": None,
        "b": [None, 1.5, None],
        "c": {"d": [None, None, True]},
        "e": "NaN",
    }
    assert "NaN" not in to_json({"a": math.nan})


def test_each_record_is_on_the_disk_at_once_and_later_ones_are_dropped_on_resume(tmp_path):
    with Recorder(tmp_path, last_step=0) as recorder:
        for step in range(1, 6):
            recorder.add_step({"step": step})
            assert len(read_records(tmp_path / "metrics.jsonl")) == step
        recorder.add_heldout({"step": 5, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with Recorder(tmp_path, last_step=3) as recorder:
        recorder.add_step({"step": 4, "new": True})
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_records(tmp_path / "heldout.jsonl") == []


def test_a_planned_folder_is_not_made(tmp_path):
    folder = plan_folder(str(tmp_path / "a" / "b"), "bytes")
    assert not (tmp_path / "a").exists()
    make_folder(folder, config_toml="", environment={})
    assert (folder / "config.toml").exists()
    with pytest.raises(UsageError, match="holds another run"):
        plan_folder(str(folder), "bytes")


def test_folders_that_cannot_be_used(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        plan_folder(str(file), "bytes")
    with pytest.raises(UsageError, match="cannot be written"):
        plan_folder(str(file / "inside"), "bytes")
    with pytest.raises(UsageError, match="is not empty"):
        plan_folder(str(tmp_path), "bytes")
    with pytest.raises(UsageError, match="cannot be written"):
        make_folder(file / "inside", config_toml="", environment={})


def test_default_folders_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = plan_folder(None, "path/to/my.py:task")
    assert first.parts[0] == "runs"
    assert first.name.startswith("task-")
    first.mkdir(parents=True)
    monkeypatch.setattr("time.strftime", lambda form: first.name.removeprefix("task-"))
    assert plan_folder(None, "task") == Path("runs") / f"{first.name}-2"
