"""The plan of real tasks: its numbers are the library's, its choice fits, and nothing is touched."""

import json
import shlex
from pathlib import Path

import pytest
import torch

import accumulus as acc
from accumulus.cli.options import parse
from accumulus.errors import UsageError
from accumulus.run.config import TrainConfig
from accumulus.run.parts import collate_of
from accumulus.run.plan import heaviest_batch, make_plan, plan
from accumulus.run.plan_config import PlanConfig
from accumulus.run.task import load_task, make_optimizer

DEEP = Path(__file__).with_name("deep.py")


def config(function="task", **options):
    settings = {"batch_size": 12, "memory": "500KiB", "device": "cpu", "precisions": ("fp32", "bf16")}
    return PlanConfig(task=f"{DEEP}:{function}", **(settings | options))


@pytest.fixture(scope="module")
def found():
    return make_plan(config())


def test_every_row_is_what_the_library_estimates(found):
    options = config()
    task = load_task(options.task)
    batch, _ = heaviest_batch(options, task)
    optimizer = make_optimizer(options.task, task)
    assert {(row.precision, row.microbatch) for row in found.rows} > {
        (p, n) for p in ("fp32", "bf16") for n in (1, 2, 4, 8)
    }
    for row in found.rows:
        if row.microbatch not in (1, 4, 12):
            continue
        expected = acc.memory.estimate(
            task.model,
            optimizer,
            task.loss_fn,
            batch,
            precision=row.precision,
            microbatch=row.microbatch,
            collate=collate_of(task),
            device="cpu",
        )
        assert row.peak_bytes == expected.peak_bytes
        assert row.parts == expected.parts
        assert (row.phase, row.method) == (expected.phase, "fake")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_real_step_holds_more_than_was_planned_and_the_longest_nearly_as_much(found, precision):
    """Live bytes of real steps as `accumulus train` makes them, over batches of all lengths."""
    options = config()
    task = load_task(options.task)
    optimizer = make_optimizer(options.task, task)
    step = acc.TrainStep(
        task.model,
        optimizer,
        task.loss_fn,
        precision=precision,
        microbatch=4,
        max_grad_norm=1.0,
        collate=collate_of(task),
    )
    longest, _ = heaviest_batch(options, task)
    step(longest)  # makes the optimizer's state
    planned = next(row for row in found.rows if (row.precision, row.microbatch) == (precision, 4))
    for batch in (longest, *(task.train_data[start : start + 12] for start in range(0, 28, 4))):
        live = acc.memory.LiveBytes()
        with live.watching(step):
            step(batch)
        assert live.peak_bytes <= 1.01 * planned.peak_bytes
        if batch is longest:
            # Planned as if every micro-batch were padded to the longest sample, and only the first one is.
            assert live.peak_bytes >= 0.95 * planned.peak_bytes


def test_the_choice_is_a_row_that_fits_and_the_largest_that_fits_is_listed(found):
    assert found.choice.row in found.rows
    assert found.choice.row.peak_bytes <= 0.9 * 500 * 1024
    by_precision = {}
    for row in found.rows:
        assert (row.verdict == "no") == (row.peak_bytes > 500 * 1024)
        by_precision.setdefault(row.precision, []).append(row)
    for rows in by_precision.values():
        fitting = max(row.microbatch for row in rows if row.verdict != "no")
        beyond = [row.microbatch for row in rows if row.verdict == "no"]
        assert not beyond or fitting < min(beyond)


def test_the_command_trains_what_was_planned(found):
    words = shlex.split(found.choice.command)
    assert words[:2] == ["accumulus", "train"]
    trained = parse(TrainConfig, words[2:], verb="train", description="")
    trained.validate()
    assert trained.task == f"{DEEP}:task"
    assert (trained.batch_size, trained.device) == (12, "cpu")
    assert trained.precision == found.choice.row.precision
    assert trained.cut().size == found.choice.row.microbatch


def test_options_that_were_given_are_in_the_command():
    given = PlanConfig(task="a b.py:f", data=("x y", "z"), batch_size=7, lr=0.5, seed=3, d_model=64, max_grad_norm=2.0)
    words = given.train_words(precision="bf16", microbatch=2)
    trained = parse(TrainConfig, shlex.split(shlex.join(words)), verb="train", description="")
    for name in ("task", "data", "batch_size", "lr", "seed", "d_model", "max_grad_norm", "max_length"):
        assert getattr(trained, name) == getattr(given, name)
    assert (trained.precision, trained.microbatch) == ("bf16", "2")


def test_an_accelerator_that_is_not_here_is_not_in_the_command():
    found = make_plan(config(device="A100-40GB", memory="auto", precisions=("auto",)))
    assert found.limit.limit_bytes == acc.memory.device_bytes("A100-40GB")
    assert "--device" not in found.choice.command
    assert found.choice.row.precision == "bf16"
    assert any("A100-40GB itself is not here" in note for note in found.notes)
    if not torch.cuda.is_available():
        assert any("CPU's kernels" in note for note in found.notes)


def test_nothing_is_touched(monkeypatch):
    seen = {}
    real = load_task

    def load(spec, options):
        task = real(spec, options)
        seen["task"] = task
        seen["before"] = [(tensor, tensor.clone(), tensor.device) for tensor in task.model.state_dict().values()]
        seen["data"] = [sample.clone() for sample in task.train_data]
        return task

    monkeypatch.setattr("accumulus.run.plan.load_task", load)
    make_plan(config(memory="1KiB", precisions=("fp32",)))
    for tensor, before, device in seen["before"]:
        assert torch.equal(tensor, before) and tensor.device == device
    assert all(parameter.grad is None for parameter in seen["task"].model.parameters())
    assert all(torch.equal(*pair) for pair in zip(seen["task"].train_data, seen["data"], strict=True))


def test_the_batch_is_the_longest_samples_longest_first():
    options = config(batch_size=5)
    task = load_task(options.task)
    batch, note = heaviest_batch(options, task)
    assert [len(sample) for sample in batch] == sorted(map(len, task.train_data), reverse=True)[:5]
    assert note == "Estimated for the 5 longest samples, so it holds for every batch."


def test_without_lengths_it_is_the_first_steps_batch_and_says_so(tiny_file):
    found = make_plan(
        PlanConfig(task=f"{tiny_file}:line", batch_size=8, memory="1GiB", device="cpu", precisions=("fp32",))
    )
    assert "first step's batch" in found.notes[0]


def test_models_that_depend_on_the_data_are_measured_and_it_says_so():
    found = make_plan(config("gated", precisions=("fp32",)))
    assert {row.method for row in found.rows} == {"measured"}
    assert any(note.startswith("Measured on micro-batches of 2 and 4 real samples") for note in found.notes)


def test_precisions_that_the_model_refuses_are_left_out_with_the_reason():
    found = make_plan(config("double"))
    assert {row.precision for row in found.rows} == {"fp32"}
    assert any(note.startswith("bf16 is left out: ") and "float64" in note for note in found.notes)
    with pytest.raises(UsageError, match="bf16 is left out: .*float64"):
        make_plan(config("double", precisions=("bf16",)))


def test_auto_is_listed_once():
    fast = str(acc.Precision.parse("auto", "cpu"))
    found = make_plan(config(precisions=("auto", fast)))
    assert {row.precision for row in found.rows} == {fast}
    assert len({row.microbatch for row in found.rows}) == len(found.rows)


def test_the_size_that_was_asked_for_is_listed():
    found = make_plan(config(microbatch="7", precisions=("fp32",)))
    assert 7 in [row.microbatch for row in found.rows]


def test_files_and_exit_code(tmp_path, capsys):
    json_file, picture = tmp_path / "plan.json", tmp_path / "plan.html"
    assert plan(config(precisions=("fp32",), json=str(json_file), picture=str(picture))) == 0
    content = json.loads(json_file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["memory"] == {
        "limit_bytes": 500 * 1024,
        "safe_bytes": int(0.9 * 500 * 1024),
        "safe_ratio": 0.9,
        "source": "given",
    }
    for row in content["rows"]:
        assert sum(row["parts"].values()) == row["peak_bytes"]
        assert row["fits"] == (row["peak_bytes"] <= 500 * 1024)
        assert row["method"] == "fake"
    chosen = content["recommendation"]
    assert (chosen["precision"], content["shortfall"]) == ("fp32", None)
    assert chosen["command"] in capsys.readouterr().out
    assert "<figcaption>" in picture.read_text()


def test_what_cannot_fit_ends_with_one_and_says_what_would_help(tmp_path, capsys):
    json_file = tmp_path / "plan.json"
    assert plan(config(precisions=("fp32",), memory="250KiB", json=str(json_file))) == 1
    content = json.loads(json_file.read_text())
    assert content["recommendation"] is None
    shortfall = content["shortfall"]
    assert shortfall["dominant"]["part"] == "optimizer state"
    assert {tuple(measure["changes"]) for measure in shortfall["measures"]} >= {
        ("activation checkpointing",),
        ("SGD with momentum",),
        ("SGD without momentum",),
        ("bf16-pure",),
    }
    text = capsys.readouterr().out
    assert "Not one sample fits: fp32 needs" in text
    assert "Recommended" not in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 41}, "--batch-size 41 is more than the 40 samples of task"),
        ({"function": "no_loss"}, "task .*deep.py:no_loss.*: the loss function returned 'nothing'"),
        ({"function": "nothing"}, "has no function 'nothing'; it has "),
        ({"json": "nowhere/plan.json"}, "--json nowhere/plan.json: its folder does not exist"),
        ({"json": "."}, "--json . is a folder"),
        ({"picture": "nowhere/plan.png"}, "--picture nowhere/plan.png: its folder does not exist"),
        ({"picture": "plan.gif"}, "--picture plan.gif: the name must end in .png or .html"),
        ({"precisions": ()}, "--precisions: nothing is unknown"),
        ({"microbatch": "some"}, "--microbatch 'some' must be a number of samples"),
    ],
)
def test_bad_input(options, told):
    with pytest.raises(UsageError, match=told):
        plan(config(**options))
