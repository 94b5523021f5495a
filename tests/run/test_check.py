from pathlib import Path

import pytest

from accumulus.errors import UsageError
from accumulus.run.check import first_batch, make_report, splits_of
from accumulus.run.check_config import CheckConfig
from accumulus.run.task import load_task

HERE = Path(__file__).parent
LINE, DROPOUT = (f"{HERE / 'tiny.py'}:{name}" for name in ("line", "line_with_dropout"))
DEEP = f"{HERE / 'deep.py'}:task"


def test_the_batch_is_the_first_one_of_the_seed():
    task = load_task(DEEP)
    config = CheckConfig(task=DEEP, batch_size=6, seed=3)
    batch = first_batch(config, task)
    assert [len(sample) for sample in batch] == sorted((len(sample) for sample in batch), reverse=True)
    assert [id(sample) for sample in batch] == [id(sample) for sample in first_batch(config, task)]
    assert len(first_batch(CheckConfig(task=DEEP, batch_size=400), task)) == 40


def test_lengths_of_the_task_cut_by_tokens():
    task = load_task(DEEP)
    batch = first_batch(CheckConfig(task=DEEP, batch_size=6), task)
    assert splits_of(CheckConfig(task=DEEP), task, batch)[-1].length is len
    assert splits_of(CheckConfig(task=LINE, microbatch="2"), load_task(LINE), batch)[-2:] == ["by_tokens", 2]


def test_dropout_is_random_and_not_wrong():
    report = make_report(CheckConfig(task=DROPOUT, batch_size=8))
    assert report
    assert [cause.where for cause in report.causes] == [("1 (Dropout)",)]


def test_a_task_of_one_sample_is_refused():
    task = load_task(LINE)
    object.__setattr__(task, "train_data", task.train_data[:1])
    with pytest.raises(UsageError, match="has 1 sample, which cannot be split"):
        first_batch(CheckConfig(task=LINE), task)
