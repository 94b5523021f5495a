"""Runs whose micro-batches are chosen while they go on, and runs that memory is short for."""

import dataclasses
import shlex

import pytest
import torch

from accumulus import CorruptStepError, OutOfMemoryError
from accumulus.cli.main import main
from accumulus.cli.options import parse
from accumulus.run import loop
from accumulus.run.config import TrainConfig, read_config
from accumulus.run.record import read_records

from .test_loop import TINY, line_config, same, saved

CHOICE = {"microbatch", "microbatch_unit", "microbatch_reason", "microbatch_samples_per_second"}
TUNED = 14  # more steps than any tuning takes


def steps_of(folder):
    return read_records(folder / "metrics.jsonl")


def resume(folder, **changes):
    return loop.train(dataclasses.replace(read_config(folder), resume=str(folder), **changes))


def tuning_of(folder):
    return saved(folder)["step"]["microbatch"]["tuning"]


@pytest.fixture
def tuned(tmp_path, tiny_file, capsys):  # what is shown meanwhile is for the tests to read
    out = tmp_path / "run"
    assert loop.train(line_config(tiny_file, out, microbatch="auto", steps=TUNED)) == 0
    return out


def test_the_choice_is_recorded_said_and_in_the_end_table(tuned, capsys):
    steps, shown = steps_of(tuned), capsys.readouterr().out
    assert all(set(record) >= CHOICE for record in steps)
    last = steps[-1]
    assert last["microbatch"] == tuning_of(tuned)["choice"]
    assert (last["microbatch_unit"], last["microbatch_samples_per_second"] > 0) == ("samples", True)
    assert "micro-batches auto, of samples: found while training" in shown
    said = [line for line in shown.splitlines() if f"micro-batches of {last['microbatch']} samples: " in line]
    assert len(said) == 1 and last["microbatch_reason"] in said[0] and "samples/s)" in said[0]
    (row,) = [line for line in shown.splitlines() if line.startswith("micro-batch  ")]
    assert f"{last['microbatch']} samples: " in row


def test_the_command_that_is_shown_repeats_the_run(tuned, tmp_path, capsys):
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "accumulus train" in line]
    words = shlex.split(line.partition(": accumulus train ")[2])
    config = parse(TrainConfig, words, verb="train", description="")
    size = steps_of(tuned)[-1]["microbatch"]
    assert (config.microbatch, config.steps) == (str(size), TUNED)
    states = []
    for name in ("once", "again"):
        assert loop.train(dataclasses.replace(config, out=str(tmp_path / name), plain=True)) == 0
        states.append(saved(tmp_path / name)["model"])
    assert same(*states)
    losses = [[record["loss"] for record in steps_of(folder)] for folder in (tuned, tmp_path / "once")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_resumed_run_does_not_tune_again(tuned):
    before, size = tuning_of(tuned), steps_of(tuned)[-1]["microbatch"]
    assert resume(tuned, steps=TUNED + 4) == 0
    assert tuning_of(tuned) == before
    assert [record["microbatch"] for record in steps_of(tuned)[TUNED:]] == [size] * 4
    assert not any("trying" in record["microbatch_reason"] for record in steps_of(tuned)[TUNED:])


def test_another_size_on_resume_and_back(tuned):
    assert resume(tuned, steps=TUNED + 1, microbatch="5") == 0
    assert resume(tuned, steps=TUNED + 2, microbatch="auto") == 0
    assert steps_of(tuned)[TUNED]["microbatch"] == 5
    assert tuning_of(tuned)["num_steps"] <= 1, "nothing was kept of the first tuning, so it begins"


def test_a_choice_holds_for_what_it_was_made_for(tuned):
    assert resume(tuned, steps=TUNED + 1, memory_limit="1GiB") == 0
    assert tuning_of(tuned)["num_steps"] <= 1
    assert saved(tuned)["step"]["microbatch"]["limit_bytes"] == 2**30


@pytest.mark.parametrize("microbatch", ["256tokens", "auto-tokens", "auto"])
def test_however_a_batch_is_cut_the_losses_are_the_same(tmp_path, text_file, microbatch, capsys):
    shared = {"data": (str(text_file),), "steps": 6, "precision": "fp32", "num_evals": 1, "lr": 0.01, "plain": True}
    for name, size in (("samples", "6"), ("other", microbatch)):
        config = TrainConfig(**{**TINY, **shared, "microbatch": size, "out": str(tmp_path / name)})
        assert loop.train(config) == 0
    for file in ("metrics.jsonl", "heldout.jsonl"):
        losses = [[record["loss"] for record in read_records(tmp_path / n / file)] for n in ("samples", "other")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    units = {record["microbatch_unit"] for record in steps_of(tmp_path / "other")}
    assert units == {"samples" if microbatch == "auto" else "tokens"}
    assert ("accumulus train --data" in capsys.readouterr().out) == microbatch.startswith("auto")


@pytest.mark.parametrize("record", [{}, {"microbatch": 3, "microbatch_unit": "samples"}])
def test_held_out_data_goes_in_pieces_that_training_has_shown_to_fit(tmp_path, tiny_file, record):
    run = loop.build(line_config(tiny_file, tmp_path / "run", microbatch="auto"))
    assert loop.evaluation_size(run, record) == ((3, "samples") if record else (8, "samples"))


def test_running_out_of_memory_is_survived(tmp_path, tiny_file):
    out = tmp_path / "run"
    assert loop.train(line_config(tiny_file, out, "little_memory", microbatch="auto")) == 0
    assert all(record["microbatch"] <= 3 for record in steps_of(out))
    loop.train(line_config(tiny_file, tmp_path / "fixed", microbatch="3"))
    for file in ("metrics.jsonl", "heldout.jsonl"):
        losses = [[record["loss"] for record in read_records(folder / file)] for folder in (out, tmp_path / "fixed")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_never_fits_ends_the_run_and_the_state_before_is_saved(tmp_path, tiny_file, capsys):
    out = tmp_path / "run"
    words = ["--steps", "6", "--batch-size", "16", "--precision", "fp32", "--plain", "--out", str(out)]
    assert main(["train", f"{tiny_file}:no_memory_later", *words]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("accumulus: memory ran out with a micro-batch of 1, and nothing was changed")
    assert shown.err.count("\n") == 1
    assert f"step 4 failed; the state before it is saved in {out}" in shown.out
    assert saved(out)["progress"]["num_steps"] == len(steps_of(out)) == 3
    model = loop.build(dataclasses.replace(read_config(out), resume=str(out))).task.model
    assert same(saved(out)["model"], model.state_dict())


def test_with_a_size_of_your_own_it_says_what_would_help(tmp_path, tiny_file, capsys):
    out = tmp_path / "run"
    with pytest.raises(torch.OutOfMemoryError):
        loop.train(line_config(tiny_file, out, "no_memory_later"))
    assert f"go on in what there is: accumulus train --resume {out} --microbatch auto" in capsys.readouterr().out
    assert saved(out)["progress"]["num_steps"] == 3


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_broken_update_is_never_saved(tmp_path, tiny_file, is_resumed, capsys):
    out = tmp_path / "run"
    config = line_config(tiny_file, out, "breaking_update", microbatch="auto", steps=2, num_evals=0)
    before = None
    if is_resumed:
        assert loop.train(config) == 0
        before = (out / "state.pt").read_bytes()
        words = ["train", "--resume", str(out), "--steps", "8"]
    else:
        words = ["train", config.task, "--steps", "8", "--batch-size", "16", "--out", str(out), "--precision", "fp32"]
    capsys.readouterr()
    assert main(words) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("accumulus: the optimizer's step failed half way") and shown.err.count("\n") == 1
    assert "broke off inside the optimizer's update" in shown.out
    if is_resumed:
        assert (out / "state.pt").read_bytes() == before
        assert f"the last good state stays in {out}; go on with: accumulus train --resume {out}" in shown.out
    else:
        assert not (out / "state.pt").exists()
        assert "no state was saved before it; start the run anew" in shown.out


def test_the_errors_are_those_of_the_library(tmp_path, tiny_file):
    for name, kind in (("no_memory_later", OutOfMemoryError), ("breaking_update", CorruptStepError)):
        with pytest.raises(kind):
            loop.train(line_config(tiny_file, tmp_path / name, name, microbatch="auto"))
