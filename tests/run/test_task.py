import math

import pytest
import torch

import accumulus as acc
from accumulus.errors import UsageError
from accumulus.run.task import load_task, make_optimizer


def test_task_from_a_file_and_from_a_module(tiny_file):
    assert isinstance(load_task(f"{tiny_file}:line"), acc.Task)
    assert isinstance(load_task("tests.run.tiny:line"), acc.Task)


def test_options_reach_the_function(tiny_file):
    assert load_task(f"{tiny_file}:line", {"dropout": 0.25}).model[1].p == 0.25


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "must return an acc.Task, not NoneType"),
        ("without_parameters", "no parameter that requires a gradient"),
        ("without_data", "train_data is empty"),
        ("failing", "RuntimeError: the disk$"),
        ("lines", "has no function 'lines'; it has .*line"),
    ],
)
def test_functions_that_make_no_usable_task(tiny_file, name, told):
    with pytest.raises(UsageError, match=told) as caught:
        load_task(f"{tiny_file}:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("bites", "unknown task 'bites': give one of bytes"),
        ("missing.py:task", "no such file"),
        (":task", "unknown task"),
        ("no.such.module:task", "cannot be imported: ModuleNotFoundError"),
        ("math:sqrt", "its function failed"),
    ],
)
def test_names_that_stand_for_nothing(spec, told):
    with pytest.raises(UsageError, match=told):
        load_task(spec)


@pytest.mark.parametrize(
    ("source", "told"),
    [("def task(:\n", "line 1 does not parse"), ("1 / 0\n", "ZeroDivisionError"), ("task = 3\n", "has no function")],
)
def test_files_that_do_not_run(tmp_path, source, told):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=told):
        load_task(f"{path}:task")


def test_an_option_that_the_task_does_not_take(tiny_file):
    with pytest.raises(UsageError, match="--d-model belongs to the built-in task"):
        load_task(f"{tiny_file}:nothing", {"d_model": 8})


def test_optimizers(tiny_file):
    task = load_task(f"{tiny_file}:line")
    assert isinstance(make_optimizer("line", task), torch.optim.AdamW)
    with pytest.raises(UsageError, match="must be a torch optimizer, not int"):
        make_optimizer("it", load_task(f"{tiny_file}:without_optimizer"))


def test_perplexity_is_a_derived_number():
    task = load_task("tests.run.tiny:line", {"derived": {"perplexity": math.exp}})
    assert task.derived["perplexity"](0.0) == 1.0
