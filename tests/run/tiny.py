"""A task small enough for tests, in the form that a user's own file has."""

import dataclasses

import torch

import accumulus as acc


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    weights = torch.randint(0, 5, (count,), generator=generator)
    return [{"x": x, "y": x.sum().reshape(1), "weight": w} for x, w in zip(inputs, weights, strict=True)]


def weighted_loss(model, batch):
    squares = (model(batch["x"]) - batch["y"]).square().squeeze(1)
    return acc.Loss((squares * batch["weight"]).sum(), batch["weight"].sum())


def line(dropout: float = 0.0, **sizes):
    return acc.Task(
        model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        loss_fn=weighted_loss,
        train_data=rows(50),
        eval_data=rows(13, seed=1),
        **sizes,
    )


def line_with_dropout():
    return line(dropout=0.5)


def nothing():
    return None


def without_parameters():
    return acc.Task(model=torch.nn.ReLU(), optimizer=lambda model: None, loss_fn=weighted_loss, train_data=rows(4))


def without_data():
    task = line()
    return acc.Task(model=task.model, optimizer=task.optimizer, loss_fn=task.loss_fn, train_data=[])


def without_optimizer():
    task = line()
    return acc.Task(model=task.model, optimizer=3, loss_fn=task.loss_fn, train_data=task.train_data)


def failing():
    raise RuntimeError("the disk\nis on fire")


def diverging():
    task = line()

    def loss_fn(model, batch):
        return weighted_loss(model, batch).sum * float("nan")

    return acc.Task(model=task.model, optimizer=task.optimizer, loss_fn=loss_fn, train_data=task.train_data)


def refused_loss():
    """Learns for two steps and then returns what is no loss."""
    task, calls = line(), []

    def loss_fn(model, batch):
        calls.append(1)
        return weighted_loss(model, batch) if len(calls) <= 2 else model(batch["x"])

    return acc.Task(model=task.model, optimizer=task.optimizer, loss_fn=loss_fn, train_data=task.train_data)


def without_weight():
    task = line()
    data = [{**row, "weight": row["weight"] * 0} for row in task.train_data]
    return acc.Task(model=task.model, optimizer=task.optimizer, loss_fn=task.loss_fn, train_data=data)


def line_with_metrics():
    """Metrics whose names are also those of records, and terms over different counts."""
    task = line()

    def loss_fn(model, batch):
        loss = weighted_loss(model, batch)
        metrics = {"loss": (7.0, 1), "step": (1000.0, 1), "by_row": acc.Metric(batch["x"], per_sample=True)}
        return {"rows": acc.Loss(loss.sum, 5), "cells": acc.Loss(loss.sum, 20, metrics=metrics)}

    return acc.Task(model=task.model, optimizer=task.optimizer, loss_fn=loss_fn, train_data=task.train_data)


def line_with_evaluation():
    """Its own measure returns a tensor and leaves the model in evaluation mode; a part of it is frozen."""
    task = line(dropout=0.5)
    model = torch.nn.Sequential(task.model, torch.nn.BatchNorm1d(1))
    model[1].eval()

    def evaluate(model, data):
        model.eval()
        return {"loss": torch.tensor(1.5)}

    def loss_fn(model, batch):
        modes.append((model[0].training, model[1].training))
        return weighted_loss(model, batch)

    modes.clear()
    return acc.Task(
        model=model,
        optimizer=task.optimizer,
        loss_fn=loss_fn,
        train_data=task.train_data,
        eval_data=task.eval_data,
        evaluate=evaluate,
    )


modes: list = []


def running_out(limit):
    """A loss function that more samples than `limit[0]` do not fit; every call is counted."""

    def loss_fn(model, batch):
        if len(batch["x"]) > limit[0]:
            raise torch.OutOfMemoryError("no memory for so many samples")
        return weighted_loss(model, batch)

    return loss_fn


def little_memory():
    """At most 3 samples fit at a time, in training and in evaluation."""
    task = line()
    return dataclasses.replace(task, loss_fn=running_out([3]))


def no_memory_later():
    """In the fourth step not even one sample fits any more."""
    limit = [16]

    class Optimizer(torch.optim.SGD):
        num_steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.num_steps += 1
            limit[0] = 16 if self.num_steps < 3 else 0

    task = line()
    return dataclasses.replace(
        task, optimizer=lambda model: Optimizer(model.parameters(), lr=0.01), loss_fn=running_out(limit), eval_data=None
    )


def breaking_update():
    """In the fourth step the optimizer runs out of memory when it has changed some parameters."""

    class Optimizer(torch.optim.SGD):
        num_steps = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.num_steps += 1
            if self.num_steps == 4:
                self.param_groups[0]["params"][0].add_(1.0)
                raise torch.OutOfMemoryError("no memory for the update")
            super().step(closure)

    # Momentum is state: without any, each step counts as a parameter's first one, which is undone.
    return dataclasses.replace(
        line(), optimizer=lambda model: Optimizer(model.parameters(), lr=0.01, momentum=0.9), eval_data=None
    )
