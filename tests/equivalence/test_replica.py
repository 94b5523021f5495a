from __future__ import annotations

import functools

import torch
from torch import nn

from accumulus.equivalence.replica import Replica, cast, replicate, replicate_original

COUNTS = {"calls": 0}
TEMPERATURE = torch.tensor(2.0)


def counting(model, batch):
    COUNTS["calls"] += 1
    helper()
    return model(batch).sum() * TEMPERATURE


def helper():
    COUNTS["calls"] += 10


def test_what_a_function_uses_of_its_module_is_copied_once_for_all():
    copied = replicate_original(nn.Linear(2, 1), counting, None)
    copied.loss_fn(copied.model, torch.zeros(1, 2))
    assert COUNTS == {"calls": 0}
    assert copied.loss_fn.__globals__["COUNTS"] == {"calls": 11}


def test_the_model_in_a_closure_is_the_copied_model():
    model = nn.Linear(2, 1)

    def loss_fn(_, batch):
        return model(batch).sum()

    copied = replicate_original(model, loss_fn, None)
    copied.loss_fn(None, torch.ones(1, 2)).backward()
    assert copied.model.weight.grad is not None
    assert model.weight.grad is None


def test_methods_partials_and_modules_as_loss_functions():
    class Criterion(nn.Module):
        def forward(self, model, batch):
            self.seen = getattr(self, "seen", 0) + 1
            return model(batch).sum()

    criterion, seen = Criterion(), []
    copied = replicate_original(nn.Linear(2, 1), criterion, None)
    copied.loss_fn(copied.model, torch.zeros(1, 2))
    assert not hasattr(criterion, "seen")
    copied = replicate_original(nn.Linear(2, 1), criterion.forward, None)
    assert copied.loss_fn.__self__ is not criterion
    partial = functools.partial(lambda model, batch, log: log.append(1), log=seen)
    copied = replicate_original(nn.Linear(2, 1), partial, None)
    copied.loss_fn(copied.model, None)
    assert seen == []


def test_hooks_are_copied_with_what_they_hold():
    seen = []
    model = nn.Linear(2, 1)
    model.register_forward_hook(lambda module, args, out: seen.append(1))
    copied = replicate_original(model, lambda m, b: m(b), None)
    copied.model(torch.zeros(1, 2))
    assert seen == []


def test_trained_parameters_are_those_of_the_optimizer():
    model, extra = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Parameter(torch.ones(()))
    copied = replicate_original(model, counting, torch.optim.SGD([model[1].weight, extra]))
    assert list(copied.parameters()) == ["1.weight", "optimizer[0]"]
    assert copied.parameters()["1.weight"] is copied.model[1].weight
    every = [name for name, _ in model.named_parameters()]
    assert list(replicate_original(model, counting, None).parameters()) == every


def test_everything_that_is_held_is_cast():
    weight, options = torch.ones(3), {"smoothing": torch.tensor(0.1)}

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(2, 3)
            self.plain = torch.ones(3)

    def loss_fn(model, batch):
        return (model(batch) * weight * options["smoothing"]).sum()

    copied = cast(replicate_original(Model(), loss_fn, None), torch.float64)
    assert copied.model.plain.dtype is torch.float64
    assert copied.loss_fn(copied.model, torch.ones(1, 2, dtype=torch.float64)).dtype is torch.float64
    held = [cell.cell_contents for cell in copied.loss_fn.__closure__]
    assert held[0]["smoothing"].dtype is torch.float64
    assert held[1].dtype is torch.float64
    assert weight.dtype is torch.float32


def test_saved_buffers_only():
    model = nn.BatchNorm1d(2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    assert set(Replica(model, counting, (), ()).buffers()) == {"running_mean", "running_var", "num_batches_tracked"}


def test_copies_share_what_was_shared():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copied = replicate(replicate_original(model, counting, None))
    assert copied.model[1].weight is copied.model[0].weight


def test_data_is_not_copied_with_the_trainer_that_holds_it():
    class Trainer:
        def __init__(self):
            self.data, self.seen = torch.utils.data.TensorDataset(torch.zeros(3)), []

        def loss(self, model, batch):
            self.seen.append(len(self.data))
            return model(batch).sum()

    trainer = Trainer()
    copied = replicate_original(nn.Linear(2, 1), trainer.loss, None)
    copied.loss_fn(copied.model, torch.zeros(1, 2))
    assert copied.loss_fn.__self__.data is trainer.data
    assert (trainer.seen, copied.loss_fn.__self__.seen) == ([], [3])
