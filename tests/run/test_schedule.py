import math
from itertools import pairwise

import pytest
import torch

from accumulus.run.schedule import FINAL_LR_RATIO, Progress, WarmupCosine, set_peak_rate


def make_optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def test_progress_by_steps_depends_on_nothing_else():
    progress = Progress(max_steps=100, max_seconds=None)
    due = []
    for _ in range(100):
        progress.end_step(applied=True)
        due += [progress.num_steps] if progress.eval_is_due(50) else []
    assert due == list(range(2, 101, 2))
    assert progress.ratio() == 1


@pytest.mark.parametrize("evals", [1, 3, 7, 10])
def test_the_last_step_is_always_measured(evals):
    progress = Progress(max_steps=10, max_seconds=None)
    due = []
    for _ in range(10):
        progress.end_step(applied=True)
        due += [progress.num_steps] if progress.eval_is_due(evals) else []
    assert len(due) == evals
    assert due[-1] == 10


def test_progress_by_time_goes_on_where_it_stopped():
    progress = Progress(max_steps=None, max_seconds=1000)
    progress.start_clock()
    progress.load_state_dict({"seconds": 500.0, "num_steps": 3, "num_skipped": 1, "num_evals": 2})
    assert 0.5 <= progress.ratio() < 0.6
    assert progress.state_dict()["num_skipped"] == 1
    assert 490 > progress.seconds_left() > 400 or progress.seconds_left() == pytest.approx(500, rel=0.01)
    assert math.isnan(Progress(max_steps=5, max_seconds=None).seconds_left())


def test_learning_rate_rises_then_falls():
    optimizer = make_optimizer(1.0, 0.1)
    progress = Progress(max_steps=40, max_seconds=None)
    schedule = WarmupCosine(optimizer, warmup=4, progress=lambda: progress.ratio(ahead=1))
    rates = []
    for _ in range(40):
        rates.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
        progress.end_step(applied=True)
    first = [rate for rate, _ in rates]
    assert first[0] == 0.25
    assert max(first) == first[3] > 0.95
    assert all(later < earlier for earlier, later in pairwise(first[4:]))
    assert FINAL_LR_RATIO < first[-1] < FINAL_LR_RATIO + 0.01
    assert all(small == pytest.approx(large / 10) for large, small in rates)


def test_schedule_goes_on_from_its_state():
    optimizer = make_optimizer(1.0)
    schedule = WarmupCosine(optimizer, warmup=10, progress=lambda: 0.0)
    schedule.step()
    other = WarmupCosine(make_optimizer(0.5), warmup=10, progress=lambda: 0.0)
    other.load_state_dict(schedule.state_dict())
    other.step()
    schedule.step()
    assert other.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.3)


def test_peak_rate_keeps_proportions():
    optimizer = make_optimizer(0.1, 0.01)
    set_peak_rate(optimizer, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.1])
