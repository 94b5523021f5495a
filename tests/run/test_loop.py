import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import accumulus as acc
from accumulus.errors import AccumulusError, UsageError
from accumulus.run import loop
from accumulus.run.batches import Batches
from accumulus.run.config import TrainConfig, read_config
from accumulus.run.record import read_records
from accumulus.run.task import load_task

TINY = {"max_length": 48, "d_model": 16, "num_layers": 1, "num_heads": 2, "batch_size": 16, "microbatch": "6"}

RECORDED = {
    *("step", "loss", "bits_per_byte", "grad_norm", "loss_scale", "all_finite", "applied", "lr", "num_skipped"),
    *("num_tokens", "num_samples", "num_microbatches", "step_seconds", "tokens_per_second", "peak_bytes"),
}


def line_config(tiny_file, out, name="line", **options):
    settings = {"batch_size": 16, "microbatch": "5", "steps": 6, "precision": "fp32", "warmup": 2, "num_evals": 2}
    return TrainConfig(task=f"{tiny_file}:{name}", out=str(out), plain=True, **(settings | options))


def saved(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def same(left, right):
    """Bitwise equality of trees."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_bits_per_byte_falls_and_everything_is_recorded(tmp_path, text_file, capsys):
    out = tmp_path / "run"
    config = TrainConfig(data=(str(text_file),), steps=30, precision="fp32", num_evals=3, out=str(out), lr=0.02, **TINY)
    assert loop.train(config) == 0
    heldout = read_records(out / "heldout.jsonl")
    assert [record["step"] for record in heldout] == [0, 10, 20, 30]
    assert heldout[-1]["bits_per_byte"] < heldout[0]["bits_per_byte"] - 2
    assert heldout[0]["bits_per_byte"] == pytest.approx(heldout[0]["loss"] / math.log(2))
    steps = read_records(out / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert set(steps[0]) >= RECORDED
    assert steps[0]["num_microbatches"] == 3
    assert steps[0]["num_samples"] == 16
    assert read_config(out) == TrainConfig.from_toml(config.stored().to_toml())
    assert json.loads((out / "environment.json").read_text())["precision"] == "fp32"
    shown = capsys.readouterr().out
    assert "held-out bits per byte" in shown
    assert "the model writes:\ndef " in shown
    assert str(out) in shown


def test_recorded_loss_and_norm_are_the_whole_batchs(tmp_path, text_file):
    out = tmp_path / "run"
    loop.train(
        TrainConfig(data=(str(text_file),), steps=1, precision="fp32", num_evals=0, out=str(out), seed=3, **TINY)
    )
    torch.manual_seed(3)
    sizes = {name: TINY[name] for name in ("max_length", "d_model", "num_layers", "num_heads")}
    task = load_task("bytes", {"data": (str(text_file),), **sizes})
    batch = Batches(task.train_data, batch_size=16, seed=3)[0]
    task.model.double()
    loss = task.loss_fn(task.model, task.collate(batch))
    (loss.sum / loss.weight).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in task.model.parameters()])
    (record,) = read_records(out / "metrics.jsonl")
    assert record["loss"] == pytest.approx(float(loss.sum.detach()) / loss.weight, rel=1e-5)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert record["num_tokens"] == loss.weight


def test_short_last_batch_of_an_epoch(tmp_path, tiny_file):
    loop.train(line_config(tiny_file, tmp_path / "run"))
    steps = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["num_samples"] for record in steps] == [16, 16, 16, 2, 16, 16]
    assert [record["num_microbatches"] for record in steps] == [4, 4, 4, 1, 4, 4]


class StopAfter:
    """Stands in for a signal that arrives in the middle of a step."""

    def __init__(self, monkeypatch, step):
        take_step = loop.take_step

        def take_step_then_signal(run):
            record = take_step(run)
            if record["step"] == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return record

        monkeypatch.setattr(loop, "take_step", take_step_then_signal)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stopped_and_resumed_is_bitwise_the_uninterrupted_run(tmp_path, tiny_file, monkeypatch, precision, capsys):
    options = {"name": "line_with_dropout", "precision": precision}
    assert loop.train(line_config(tiny_file, tmp_path / "whole", **options)) == 0
    with monkeypatch.context() as patch:
        StopAfter(patch, 3)
        code = loop.train(line_config(tiny_file, tmp_path / "parts", **options))
    assert code == 128 + signal.SIGTERM
    assert f"accumulus train --resume {tmp_path / 'parts'}" in capsys.readouterr().out
    torch.manual_seed(999)  # the state brings its own
    resumed = line_config(tiny_file, None, **options)
    assert loop.train(TrainConfig(**{**vars(resumed), "out": None, "resume": str(tmp_path / "parts")})) == 0
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    for state in (whole, parts):
        del state["progress"]["seconds"]
    assert same(whole, parts)
    for name in ("metrics.jsonl", "heldout.jsonl"):
        timeless = [
            [
                {key: value for key, value in record.items() if "second" not in key and key != "peak_bytes"}
                for record in read_records(folder / name)
            ]
            for folder in (tmp_path / "whole", tmp_path / "parts")
        ]
        assert timeless[0] == timeless[1]


def test_a_finished_run_goes_on_only_with_a_larger_limit(tmp_path, tiny_file):
    loop.train(line_config(tiny_file, tmp_path / "run", steps=2))
    again = {**vars(line_config(tiny_file, None, steps=2)), "out": None, "resume": str(tmp_path / "run")}
    with pytest.raises(UsageError, match=r"all is done, --steps 2 was reached; give a larger one"):
        loop.train(TrainConfig(**again))
    assert loop.train(TrainConfig(**{**again, "steps": 3})) == 0
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 3


def test_states_that_do_not_belong(tmp_path, tiny_file):
    out = tmp_path / "run"
    loop.train(line_config(tiny_file, out, steps=2))
    again = TrainConfig(**{**vars(line_config(tiny_file, None, steps=4)), "out": None, "resume": str(out)})
    state = saved(out)
    torch.save({**state, "num_train_samples": 3}, out / "state.pt")
    with pytest.raises(UsageError, match="had 3 training samples and now has 50"):
        loop.train(again)
    torch.save({**state, "model": {}}, out / "state.pt")
    with pytest.raises(UsageError, match="does not fit the task"):
        loop.train(again)
    torch.save({"weights": 1}, out / "state.pt")
    with pytest.raises(UsageError, match="not a state of this version"):
        loop.train(again)
    (out / "state.pt").write_bytes(b"rubbish")
    with pytest.raises(UsageError, match="damaged"):
        loop.train(again)
    (out / "state.pt").unlink()
    with pytest.raises(UsageError, match="never saved"):
        loop.train(again)


def test_an_error_in_the_middle_saves_the_state(tmp_path, tiny_file):
    with pytest.raises(AccumulusError):
        loop.train(line_config(tiny_file, tmp_path / "run", name="refused_loss", batch_size=5))
    assert saved(tmp_path / "run")["progress"]["num_steps"] == 2


def test_a_diverging_run_is_recorded_as_valid_json_and_skipped(tmp_path, tiny_file, capsys):
    loop.train(line_config(tiny_file, tmp_path / "run", name="diverging", steps=3))
    steps = read_records(tmp_path / "run" / "metrics.jsonl")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [record["loss"] for record in steps] == [None] * 3
    assert [record["num_skipped"] for record in steps] == [1, 2, 3]
    assert not any(record["applied"] or record["all_finite"] for record in steps)
    assert "not finite" in capsys.readouterr().out


def test_a_time_limit_ends_a_run(tmp_path, tiny_file):
    started = time.monotonic()
    loop.train(line_config(tiny_file, tmp_path / "run", steps=None, minutes=0.01))
    assert 0.5 < time.monotonic() - started < 20
    assert read_records(tmp_path / "run" / "heldout.jsonl")[-1]["seconds"] >= 0.5


def test_bad_input_leaves_nothing_behind(tmp_path, tiny_file):
    for options in ({"name": "nothing"}, {"lr": -1.0}, {"precision": "fp12"}, {"d_model": 3}):
        with pytest.raises(UsageError):
            loop.train(line_config(tiny_file, tmp_path / "run", **options))
    assert list(tmp_path.iterdir()) == []


def test_several_ranks_are_refused(tmp_path, tiny_file, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"2 ranks|several ranks|WORLD_SIZE"):
        loop.train(line_config(tiny_file, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_then_resume(tmp_path, tiny_file):
    command = [sys.executable, "-m", "accumulus", "train"]
    options = ["--steps", "400", "--batch-size", "16", "--microbatch", "1", "--precision", "fp32", "--num-evals", "0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run([*command, f"{tiny_file}:line", *options, "--out", whole], check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, f"{tiny_file}:line", *options, "--out", parts], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(read_records(parts / "metrics.jsonl")) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"accumulus train --resume {parts}" in output
    assert 20 <= saved(parts)["progress"]["num_steps"] < 400
    subprocess.run([*command, "--resume", parts], check=True, capture_output=True)
    assert same(saved(whole)["model"], saved(parts)["model"])
    assert same(saved(whole)["optimizer"], saved(parts)["optimizer"])


def test_an_empty_batch_is_skipped_and_counted(tmp_path, tiny_file):
    loop.train(line_config(tiny_file, tmp_path / "run", name="without_weight", steps=2))
    steps = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(record["applied"], record["num_skipped"], record["num_tokens"]) for record in steps] == [
        (False, 1, 0),
        (False, 2, 0),
    ]


def test_public_name():
    assert acc.Task is load_task("tests.run.tiny:line").__class__


def test_metrics_do_not_overwrite_the_record_and_terms_are_not_added_up(tmp_path, tiny_file):
    out = tmp_path / "run"
    assert loop.train(line_config(tiny_file, out, "line_with_metrics", steps=1, batch_size=5, microbatch="5")) == 0
    (record,) = read_records(out / "metrics.jsonl")
    assert record["step"] == 1
    assert record["loss"] != 7.0
    assert record["metrics"] == {"loss": 7.0, "step": 1000.0}
    assert record["num_tokens"] == 5


def test_a_measure_of_the_users_own_changes_no_mode(tmp_path, tiny_file):
    out = tmp_path / "run"
    assert loop.train(line_config(tiny_file, out, "line_with_evaluation", steps=2)) == 0
    assert {record["loss"] for record in read_records(out / "heldout.jsonl")} == {1.5}
    modes = sys.modules["accumulus_task_tiny"].modes
    assert set(modes) == {(True, False)}


def test_a_run_that_goes_on_measures_what_it_ends_with(tmp_path, tiny_file):
    out = tmp_path / "run"
    loop.train(line_config(tiny_file, out, steps=3, num_evals=1))
    config = dataclasses.replace(read_config(out), resume=str(out), steps=5)
    assert loop.train(config) == 0
    assert [record["step"] for record in read_records(out / "heldout.jsonl")] == [0, 3, 5]


def test_a_run_goes_on_from_any_folder(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(data=(text_file.name,), steps=1, precision="fp32", num_evals=0, out="run", **TINY)
    loop.train(config)
    monkeypatch.chdir("/")
    folder = str(tmp_path / "run")
    assert loop.train(dataclasses.replace(read_config(folder), resume=folder, steps=2)) == 0


def test_changed_data_is_noticed(tmp_path, text_file):
    out = tmp_path / "run"
    loop.train(TrainConfig(data=(str(text_file),), steps=1, precision="fp32", num_evals=0, out=str(out), **TINY))
    text_file.write_text(text_file.read_text().replace("anybody", "nobody!"))
    with pytest.raises(UsageError, match="samples"):
        loop.train(dataclasses.replace(read_config(out), resume=str(out), steps=2))


def test_a_run_that_learned_nothing_says_so(tmp_path, tiny_file, capsys):
    assert loop.train(line_config(tiny_file, tmp_path / "run", "diverging", steps=2)) == 1
    assert "no step was applied" in capsys.readouterr().out


def test_on_a_device_schedule_and_state_are_those_of_the_host(tmp_path, tiny_file, monkeypatch):
    """There, a step's outcome is settled late: neither the rates nor a saved state may lag behind."""
    from accumulus import host

    loop.train(line_config(tiny_file, tmp_path / "host"))
    monkeypatch.setattr(host, "reads_freely", lambda device: False)
    loop.train(line_config(tiny_file, tmp_path / "device"))
    rates = [[r["lr"] for r in read_records(tmp_path / name / "metrics.jsonl")] for name in ("host", "device")]
    assert rates[0] == rates[1]
    states = [saved(tmp_path / name) for name in ("host", "device")]
    assert states[0]["schedule"] == states[1]["schedule"]
    assert states[0]["step"]["num_applied"] == states[1]["step"]["num_applied"] == 6
