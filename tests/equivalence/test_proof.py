"""`check` itself: what it leaves untouched, what it refuses, and what it says of several causes at once."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accumulus as acc
from accumulus.equivalence import Kind
from tests.reference import assert_same

from . import layers as L
from .planted import Counter, Memory, moving_baseline, two_towers


def everything(model, optimizer):
    """All that a check must leave alone, bit for bit."""
    modes = [module.training for module in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    attributes = [dict(vars(module)) for module in model.modules()]
    states = [torch.get_rng_state().tolist(), list(random.getstate()[1]), np.random.get_state()[1].tolist()]
    kept = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), grads, modes, states))
    return kept, [{name: id(value) for name, value in each.items()} for each in attributes]


def trained(model):
    """Optimizer and gradients that have seen a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    return optimizer


SUBJECTS = {
    "equal": lambda: L.mlp(nn.Dropout(0.5)),
    "mixing": lambda: L.mlp(nn.BatchNorm1d(8)),
    "state": lambda: L.mlp(Counter()),
    "buffer": lambda: L.mlp(Memory()),
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_of_the_users_changes(name, precision):
    model = SUBJECTS[name]()
    optimizer = trained(model)
    batch = L.vectors()
    before, held = everything(model, optimizer), copy.deepcopy(batch)
    acc.check(model, L.classify, batch, optimizer=optimizer, precision=precision)
    assert_same(list(before), list(everything(model, optimizer)))
    assert_same(held, batch)
    assert torch.get_default_dtype() is torch.float32


def test_nothing_changes_after_an_error():
    model = L.mlp(Counter())
    optimizer = trained(model)
    before = everything(model, optimizer)
    calls = []

    def failing(model, batch):
        calls.append(torch.rand(()))
        if len(calls) > 2:
            raise ZeroDivisionError
        return L.classify(model, batch)

    with pytest.raises(ZeroDivisionError):
        acc.check(model, lambda model, batch: L.classify(model, batch) / 0 * (1 // 0), L.vectors(), optimizer=optimizer)
    acc.check(model, failing, L.vectors(), optimizer=optimizer)
    assert_same(list(before), list(everything(model, optimizer)))
    assert calls == []  # what a loss function holds is copied with it


def test_hooks_of_the_users_see_copies():
    seen = []
    model = L.mlp()
    model[0].register_forward_hook(lambda module, args, out: seen.append(out))
    assert acc.check(model, L.classify, L.vectors())
    assert seen == []


def test_a_loss_function_that_writes_into_its_batch_does_not_reach_the_users():
    def loss_fn(model, batch):
        batch["x"].mul_(2.0)
        return L.classify(model, batch)

    batch = L.vectors()
    before = copy.deepcopy(batch)
    assert acc.check(L.mlp(), loss_fn, batch)
    assert_same(before, batch)


def test_several_causes_are_all_named():
    """A layer that mixes, one that draws, one that remembers, a wrong weight and a contrast: five at once."""

    def loss_fn(model, batch):
        labels = torch.where(torch.arange(len(batch["y"])) >= 0, batch["y"], 0)
        return {
            "labels": F.cross_entropy(model(batch["x"]), labels),
            "pairs": two_towers(model, batch),
        }

    batch = L.vectors(12) | {"y": torch.where(torch.arange(12) < 5, -100, L.vectors(12)["y"])}
    report = acc.check(L.mlp(nn.BatchNorm1d(8), nn.Dropout(0.3), Counter()), loss_fn, batch)
    kinds = {Kind.MIXING, Kind.RANDOM, Kind.STATE, Kind.WEIGHT, Kind.COMPARISON}
    assert report.kinds == kinds, str(report)
    where = {cause.kind: cause.where[0] for cause in report.causes}
    assert where == {
        Kind.MIXING: "1 (BatchNorm1d)",
        Kind.RANDOM: "2 (Dropout)",
        Kind.STATE: "3 (Counter)",
        Kind.WEIGHT: "loss term 'labels'",
        Kind.COMPARISON: "loss term 'pairs'",
    }


def test_mixing_and_padding_together():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.norm, self.head = nn.Embedding(L.VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, batch):
            return self.head(self.norm(self.embedding(batch["input_ids"]).transpose(1, 2)).mean(2))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch), batch["input_ids"][:, 0] % 3)

    report = acc.check(Model(), loss_fn, L.sentences(), collate=L.pad)
    assert report.kinds == {Kind.MIXING, Kind.PADDING}, str(report)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precision_is_told_whole_and_split(precision):
    report = acc.check(
        L.Transformer(),
        lambda m, b: acc.Loss(L.token_sum(m, b), (b["labels"] != -100).sum()),
        L.tokens((2, 7, 3, 5, 4, 6, 3)),
        precision=precision,
    )
    assert report
    if precision == "fp32":
        assert report.precision_total is None
        assert report.accumulation_adds is None
        return
    assert report.precision == precision
    total = report.precision_total
    assert 1e-5 < total.whole < 0.1
    assert 1e-5 < total.accumulated < 0.1
    assert report.accumulation_adds is False
    assert {row.name for row in report.precision_errors} == {name for name, _ in L.Transformer().named_parameters()}
    assert [row.accumulated for row in report.precision_errors] == sorted(
        (row.accumulated for row in report.precision_errors), reverse=True
    )


def test_what_does_not_fit_is_compared_at_sizes_that_do():
    def loss_fn(model, batch):
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError
        return L.classify(model, batch)

    report = acc.check(L.mlp(), loss_fn, L.vectors(16))
    assert report
    assert report.num_samples == 4
    assert any("16 samples whole did not fit in memory; compared at 8" in note for note in report.notes)


def test_without_float64_it_is_float32_and_its_rounding_is_measured():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = L.mlp()

        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("not implemented for 'Double'")
            return self.inner(x)

    report = acc.check(Single(), L.classify, L.vectors())
    assert report
    assert report.dtype == "float32"
    assert max(row.floor for row in report.differences) > 1e-9
    assert any("not implemented for 'Double'" in note for note in report.notes)
    report = acc.check(Single(), L.classify, L.vectors() | {"y": torch.where(torch.arange(9) < 4, -100, 1)})
    assert report.kinds == {Kind.WEIGHT}


def test_parameters_that_only_the_optimizer_knows_are_compared():
    scale = nn.Parameter(torch.tensor(2.0))
    model = L.mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(scale * model(batch["x"]), batch["y"])

    report = acc.check(model, loss_fn, L.vectors(), optimizer=torch.optim.SGD([*model[0].parameters(), scale], lr=0.1))
    assert report
    names = {row.name for row in report.differences}
    assert names == {"loss", "0.weight", "0.bias", "optimizer[0]"}


def test_a_split_that_cannot_be_run_is_told_and_not_counted():
    def loss_fn(model, batch):
        if len(batch["x"]) < 2:
            raise ValueError("needs two samples")
        return L.classify(model, batch)

    report = acc.check(L.mlp(), loss_fn, L.vectors())
    assert report
    assert {split.name: split.problem for split in report.splits}["singles"] == "ValueError: needs two samples"


def test_where_no_split_can_be_run_the_cause_is_told_or_it_is_an_error():
    report = acc.check(L.mlp(nn.BatchNorm1d(8)), L.classify, L.vectors(3), splits=["uneven"])
    assert not report
    assert report.kinds == {Kind.MIXING}
    assert report.differences == ()

    def loss_fn(model, batch):
        if len(batch["x"]) < 9:
            raise ValueError("needs nine samples")
        return L.classify(model, batch)

    with pytest.raises(acc.UnsupportedError, match="no split could be run: ValueError: needs nine samples"):
        acc.check(L.mlp(), loss_fn, L.vectors())


def test_evidence_carries_figures_and_confirmation():
    report = acc.check(L.mlp(nn.BatchNorm1d(8)), L.classify, L.vectors())
    cause = report.causes[0]
    assert "100%" in cause.evidence
    assert cause.is_confirmed
    assert cause.is_wrong


def test_a_shared_closure_keeps_its_state():
    loss_fn = moving_baseline()
    first = acc.check(L.mlp(), loss_fn, L.vectors())
    second = acc.check(L.mlp(), loss_fn, L.vectors())
    assert first.differences == second.differences


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((torch.zeros(3), L.classify, L.vectors()), acc.OptimizerError, "must be a torch.nn.Module"),
        ((L.mlp(), None, L.vectors()), acc.LossError, "loss_fn must be a function"),
        ((L.mlp(), L.classify, L.vectors(1)), acc.BatchError, "1 sample cannot be split"),
        ((L.mlp().requires_grad_(False), L.classify, L.vectors()), acc.OptimizerError, "no parameters to train"),
        ((L.mlp(), lambda m, b: m(b["x"]), L.vectors()), acc.LossError, "one element"),
        ((L.mlp(), lambda m, b: m(b["x"]).mean() * torch.nan, L.vectors()), acc.LossError, "nan"),
        ((L.mlp(), lambda m, b: m(b["x"]).mean().detach(), L.vectors()), acc.LossError, "no graph"),
        ((L.mlp(), L.classify, {"x": torch.zeros(3, 4), "y": torch.zeros(2)}), acc.BatchError, "first dimension"),
    ],
)
def test_bad_input_is_one_sentence(arguments, error, told):
    with pytest.raises(error, match=told):
        acc.check(*arguments)


def test_bad_options_are_one_sentence():
    model = L.mlp()
    with pytest.raises(acc.SplitError, match="by_count, uneven, singles"):
        acc.check(model, L.classify, L.vectors(), splits=["halves"])
    with pytest.raises(acc.PrecisionError, match="unknown precision"):
        acc.check(model, L.classify, L.vectors(), precision="fp31")
    with pytest.raises(acc.OptimizerError, match="none of the model's parameters"):
        acc.check(model, L.classify, L.vectors(), optimizer=torch.optim.SGD(L.mlp().parameters()))
    with pytest.raises(acc.BatchError, match="list of samples"):
        acc.check(model, L.classify, L.vectors(), collate=L.pad)
    model.handle = (item for item in ())
    with pytest.raises(acc.UnsupportedError, match="cannot be copied"):
        acc.check(model, L.classify, L.vectors())


class NoiseOfTheBatch(nn.Module):
    """Noise as large as the batch's spread: with the noise at its mean, zero, nothing of it is left to see."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows):
        hidden = self.linear(rows)
        return hidden + 0.3 * torch.randn_like(hidden) * hidden.std(0, unbiased=False)


class DroppedTimesMean(nn.Module):
    """What dropout changed, times a batch mean: nothing, where dropout passes all on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows):
        hidden = self.linear(rows)
        return hidden + (self.dropout(hidden) - hidden) * hidden.mean(0)


@pytest.mark.parametrize("kind", [NoiseOfTheBatch, DroppedTimesMean])
def test_what_draws_at_their_mean_hide_is_found(kind):
    torch.manual_seed(0)
    model = kind()
    report = acc.check(model, lambda model, rows: model(rows).square().mean(), torch.randn(8, 4))
    assert not report
    assert Kind.MIXING in {cause.kind for cause in report.causes if cause.is_wrong}


def test_a_loss_that_depends_on_the_order_is_not_rounding():
    torch.manual_seed(0)

    def loss_fn(model, rows):
        return (model(rows).square().mean(1) * (1 + 1e-5 * torch.arange(len(rows)))).mean()

    assert not acc.check(nn.Linear(4, 4), loss_fn, torch.randn(8, 4))


class Times:
    """A loss function's helper that counts, as many users write it, at the top of their file."""

    def __init__(self):
        self.count = 0

    def __call__(self, loss):
        self.count += 1
        return loss * self.count


TIMES, NUMBERS = Times(), np.random.default_rng(0)


def test_helpers_and_generators_of_the_file_are_left_as_they_were():
    def loss_fn(model, rows):
        noise = torch.from_numpy(NUMBERS.normal(size=tuple(rows.shape))).to(rows)
        return TIMES(model(rows + noise).square().mean())

    before = NUMBERS.bit_generator.state
    report = acc.check(nn.Linear(4, 1), loss_fn, torch.randn(8, 4))
    assert Kind.NONDETERMINISTIC not in {cause.kind for cause in report.causes}
    assert TIMES.count == 0 and NUMBERS.bit_generator.state == before


class Packed(nn.Module):
    """An LSTM that runs packed, as samples of several lengths do."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)

    def forward(self, rows, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


def test_a_packed_lstm_is_not_accused_of_mixing():
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5, 4), "n": torch.tensor([5, 2, 3, 4, 5, 1, 2, 3])}

    def loss_fn(model, batch):
        found = model(batch["x"], batch["n"])
        return found[torch.arange(found.shape[1]) < batch["n"][:, None]].square().mean()

    report = acc.check(Packed(), loss_fn, batch)
    assert [(cause.kind, cause.where) for cause in report.causes] == [(Kind.WEIGHT, ("the loss",))]


def test_a_loss_that_never_reaches_the_model_is_one_sentence():
    with pytest.raises(acc.LossError, match="first argument, not a model from outside"):
        acc.check(
            nn.Linear(4, 1), lambda model, rows: rows.sum() * torch.ones((), requires_grad=True), torch.ones(4, 4)
        )


def test_a_hook_on_a_parameter_acts_on_copies_too():
    """It clips each micro-batch's gradient where the whole batch's was to be clipped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    report = acc.check(model, lambda model, rows: model(rows).square().mean(), torch.randn(12, 4))
    assert [row.name for row in report.differences if not row.is_equal] == ["weight"]
    assert model.weight.grad is None


def test_a_hook_that_changes_gradients_in_place_is_refused_as_in_training():
    model = nn.Linear(4, 4)

    def clamp(weight):
        weight.grad.clamp_(-0.01, 0.01)

    model.weight.register_post_accumulate_grad_hook(clamp)
    with pytest.raises(acc.UnsupportedError, match="no split could be run"):
        acc.check(model, lambda model, rows: model(rows).square().mean(), torch.randn(12, 4))


class Drawn(nn.Module):
    """A layer, and draws of a distribution that it parameterises."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, rows):
        return self.draw(self.linear(rows))


@pytest.mark.parametrize(
    "draw",
    [
        lambda value: F.rrelu(value, training=True),
        lambda value: value * torch.poisson(torch.ones_like(value)),
        lambda value: value * torch.binomial(torch.full_like(value, 3), torch.full_like(value, 0.5)),
        lambda value: torch.distributions.Dirichlet(F.softplus(value) + 0.1).rsample(),
        lambda value: torch.distributions.Beta(F.softplus(value) + 0.1, F.softplus(-value) + 0.1).rsample(),
    ],
)
def test_rare_distributions_are_random_and_not_wrong(draw):
    torch.manual_seed(0)
    report = acc.check(Drawn(draw), lambda model, rows: model(rows).square().mean(), torch.randn(12, 4))
    assert report, str(report)
    assert [cause.kind for cause in report.causes] == [Kind.RANDOM]
