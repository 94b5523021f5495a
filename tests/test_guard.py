"""What a loss function must not do behind the window's back: a sentence, and nothing changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumulus as acc

from .reference import assert_same, snapshot, token_loss, tokens_batch, tokens_model


def make_step(model, loss_fn, optimizer):
    return acc.TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=1)


def backward(model, optimizer, loss):
    loss.sum.backward(retain_graph=True)


def zero_grad(model, optimizer, loss):
    optimizer.zero_grad()


def zero_grad_in_place(model, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)


def whole_loop(model, optimizer, loss):
    optimizer.zero_grad()
    loss.sum.backward(retain_graph=True)
    optimizer.step()


@pytest.mark.parametrize("does", [backward, zero_grad, zero_grad_in_place, whole_loop])
def test_gradients_changed_inside(does):
    model = tokens_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        loss = token_loss(model, batch)
        does(model, optimizer, loss)
        return loss

    before = snapshot(model)
    with pytest.raises(acc.WindowError, match=r"inside (the|a) window.*leave backward\(\)"):
        make_step(model, loss_fn, optimizer)(tokens_batch([3, 4]))
    assert_same(before, snapshot(model))  # optimizer.step() too was stopped before it began
    assert all(p.grad is None for p in model.parameters())


def test_parameters_changed_inside():
    model = tokens_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        loss = token_loss(model, batch)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        return loss

    with pytest.raises(acc.WindowError, match="parameters were changed inside the window"):
        make_step(model, loss_fn, optimizer)(tokens_batch([3, 4]))


def test_gradients_taken_inside_are_fine():
    """A gradient penalty, by torch.autograd.grad."""
    model = nn.Linear(2, 1)

    def loss_fn(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    assert make_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(4, 2)).applied


def test_a_first_parameter_without_gradient_does_not_blind_it():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        if batch.item() == 2:
            optimizer.zero_grad()
        return model[1](batch).mean()

    with pytest.raises(acc.WindowError):
        make_step(model, loss_fn, optimizer)(torch.tensor([[1.0], [2.0]]))


def test_optimizers_inside_the_backward_pass():
    model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(acc.UnsupportedError, match="weight has a post-accumulate-grad hook"):
        make_step(model, token_loss, torch.optim.SGD(model.parameters()))


def test_an_error_while_weighing_leaves_the_optimizer_free():
    model = tokens_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=1, weigh=lambda batch: -1)
    with pytest.raises(acc.WeightError):
        step(tokens_batch([3]))
    optimizer.step()


def test_wrapped_optimizers():
    class Wrapped(torch.optim.Optimizer):
        """As some trainers wrap one: a subclass that never called its parent's constructor."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure=None):
            self.optimizer.step()

    model = nn.Linear(1, 1)
    with pytest.raises(acc.OptimizerError, match="a Wrapped wraps an optimizer; pass the plain one"):
        make_step(model, token_loss, Wrapped(torch.optim.SGD(model.parameters())))


def test_pending_gradients_of_another_optimizers_half():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    step = make_step(model, lambda m, b: m[0](b).mean(), torch.optim.SGD(model[0].parameters(), lr=0.1))
    model[1](torch.ones(1, 1)).sum().backward()
    with pytest.raises(acc.WindowError, match="'1.weight'"):
        step(torch.ones(2, 1))
    assert model[1].weight.grad is not None  # not ours to drop


def test_layers_that_renorm_their_weights_in_the_forward_pass():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1))
    step = make_step(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        assert step(torch.arange(4)).applied


def test_steps_in_threads_of_their_own():
    """Windows open and close in one thread while another one looks at which are open."""
    import sys
    import threading

    errors: list[BaseException] = []

    def train() -> None:
        try:
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = acc.TrainStep(
                model, optimizer, lambda model, x: model(x).square().mean(), precision="fp32", microbatch=2
            )
            for _ in range(100):
                step(torch.ones(4, 2))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
