import math

import pytest
import torch

import accumulus as acc
from accumulus.run.evaluate import mean_loss, pieces, to_device

from .tiny import rows, running_out, weighted_loss

CPU = torch.device("cpu")


def evaluate(model, data, *, loss_fn=weighted_loss, batch_size=4, length=None, precision="fp32"):
    return mean_loss(
        model,
        data,
        loss_fn=loss_fn,
        collate=torch.utils.data.default_collate,
        batch_size=batch_size,
        length=length,
        precision=acc.Precision.parse(precision),
        device=CPU,
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1).double()


@pytest.fixture
def data():
    return [{name: value.double() for name, value in row.items()} for row in rows(13)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 12, 13, 100])
def test_mean_is_exact_over_uneven_pieces(model, data, batch_size):
    whole = weighted_loss(model, torch.utils.data.default_collate(data))
    assert evaluate(model, data, batch_size=batch_size) == pytest.approx(
        float((whole.sum / whole.weight).detach()), rel=1e-13
    )


@pytest.mark.parametrize("batch_size", [1, 8, 24, 1000])
def test_pieces_by_tokens_hold_every_sample_once_and_stay_within(model, data, batch_size):
    lengths = {id(row): 1 + 5 * index % 23 for index, row in enumerate(data)}

    def length(row):
        return lengths[id(row)]

    found = list(pieces(data, batch_size, length))
    assert sorted(id(row) for piece in found for row in piece) == sorted(id(row) for row in data)
    longest = max(lengths.values())
    assert all(len(piece) * max(map(length, piece)) <= max(batch_size, -(-longest // 8) * 8) for piece in found)
    assert evaluate(model, data, batch_size=batch_size, length=length) == pytest.approx(
        evaluate(model, data, batch_size=13), rel=1e-13
    )


def test_where_memory_runs_out_halves_are_evaluated(model, data):
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch["x"]))
        return running_out([3])(model, batch)

    assert evaluate(model, data, loss_fn=loss_fn, batch_size=8) == pytest.approx(evaluate(model, data), rel=1e-13)
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 5, 2, 3]
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, data, loss_fn=running_out([0]))


def test_scalars_and_terms(model, data):
    def scalar(model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()

    def terms(model, batch):
        return {"a": weighted_loss(model, batch), "b": acc.Loss(model(batch["x"]).sum(), len(batch["x"]))}

    whole = torch.utils.data.default_collate(data)
    assert evaluate(model, data, loss_fn=scalar) == pytest.approx(float(scalar(model, whole).detach()), rel=1e-13)
    expected = sum(float(loss.sum.detach()) / float(loss.weight) for loss in terms(model, whole).values())
    assert evaluate(model, data, loss_fn=terms) == pytest.approx(expected, rel=1e-13)


def test_nothing_to_weigh_is_nan(model, data):
    assert math.isnan(evaluate(model, [{**row, "weight": row["weight"] * 0} for row in data]))


def test_mode_is_put_back_and_dropout_is_off(data):
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.9)).double()
    assert evaluate(model, data) == evaluate(model, data)
    assert model.training
    assert model[1].training


def test_autocast_is_used():
    seen = []

    def loss_fn(model, batch):
        output = model(batch["x"])
        seen.append(output.dtype)
        return output.float().mean()

    evaluate(torch.nn.Linear(4, 1), rows(4), loss_fn=loss_fn, precision="bf16")
    assert seen == [torch.bfloat16]


def test_trees_keep_their_shape():
    point = torch.Size([1])  # a tuple that is not a plain one is kept as far as its type can be made again
    tree = {"a": [torch.ones(1), "text"], "b": (torch.zeros(1), 3), "c": None}
    moved = to_device(tree, CPU)
    assert moved["a"][1] == "text"
    assert moved["b"][1] == 3
    assert moved["c"] is None
    assert isinstance(moved["b"], tuple)
    assert tuple(to_device(point, CPU)) == (1,)


def test_a_mean_over_nothing_counts_for_nothing(model, data):
    def loss_fn(model, batch):
        squares = (model(batch["x"]) - batch["y"]).square().squeeze(1)
        weight = batch["weight"].sum()
        return acc.Loss.mean((squares * batch["weight"]).sum() / weight, weight)

    empty = [{**row, "weight": row["weight"] * 0} for row in data[:4]]
    assert evaluate(model, empty + data[4:], loss_fn=loss_fn) == pytest.approx(evaluate(model, data[4:]), rel=1e-12)


def test_frozen_modules_stay_frozen(data):
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)).double()
    model[1].eval()
    evaluate(model, data)
    assert (model[0].training, model[1].training) == (True, False)
