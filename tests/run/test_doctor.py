import pytest
import torch

import accumulus as acc
from accumulus.errors import UsageError
from accumulus.run.doctor import make_subject, write_page
from accumulus.run.doctor_config import DoctorConfig
from accumulus.run.task import Task


def make_task(dtype=torch.float32):
    return Task(
        model=torch.nn.Linear(4, 1).to(dtype),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, x: model(x).float().square().mean(),
        train_data=list(torch.randn(16, 4, dtype=dtype)),
    )


def test_a_task_is_diagnosed_as_it_would_be_trained():
    config = DoctorConfig(precision="bf16", microbatch="4", max_grad_norm=0.5, lr=0.25)
    step, options = make_subject(config, make_task(), torch.device("cpu"))
    assert isinstance(step, acc.TrainStep) and options == {}
    assert str(step.precision) == "bf16" and step.update.max_grad_norm == 0.5
    assert step.update.optimizer.param_groups[0]["lr"] == 0.25
    assert step.microbatch.sizes(6) == [4, 2]


def test_16_bit_parameters_are_given_as_a_model():
    task = make_task(torch.float16)
    model, options = make_subject(DoctorConfig(), task, torch.device("cpu"))
    assert model is task.model
    assert options["loss_fn"] is task.loss_fn and options["microbatch"] == 32


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("vl_convert")
    report = acc.diagnose(
        torch.nn.Linear(4, 1), [torch.randn(4, 4)], loss_fn=lambda m, x: m(x).float().square().mean(), rounds=0
    )
    with pytest.raises(UsageError, match=r"--page .*nowhere/doctor.html cannot be written"):
        write_page(tmp_path / "nowhere" / "doctor.html", report)


def test_options_are_checked():
    DoctorConfig().validate()
    with pytest.raises(UsageError, match="--precision: 'fp4' is unknown"):
        DoctorConfig(precision="fp4").validate()
