"""Terms: shares on the host and on a device agree, and what does not add up is said."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import accumulus as acc

from .reference import applied_gradients

DOUBLE = {"dtype": torch.float64}


def make_step(loss_fn, **options):
    model = nn.ParameterDict({"a": torch.zeros((), **DOUBLE), "b": torch.zeros((), **DOUBLE)})
    options = {"precision": "fp32", "microbatch": 1} | options
    return acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), loss_fn, **options)


def two_terms(weights):
    """Terms whose weights in micro-batch i are weights[i]; the gradients of their means are 1 and 2."""

    def loss_fn(model, i):
        first, second = weights[int(i)]
        return {
            "a": acc.Loss(model["a"] * float(first), first),
            "b": acc.Loss(2 * model["b"] * float(second), second),
        }

    return loss_fn


def as_given(pairs, kind):
    return [tuple(kind(w) for w in pair) for pair in pairs]


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
@pytest.mark.parametrize("factors", [(7, 3), (1_000_003, 7), (1, 1)])
def test_equal_shares_to_1e_12(where, kind, factors):
    pairs = as_given([(factors[0] * n, factors[1] * n) for n in (1, 5, 2)], kind)
    a, b = applied_gradients(make_step(two_terms(pairs)), torch.arange(3))
    assert a.item() == pytest.approx(1.0, rel=1e-12)
    assert b.item() == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_nearly_equal_shares_are_not_equal(where, kind):
    step = make_step(two_terms(as_given([(1_000_000, 1_000_000), (1_000_000, 1_000_001)], kind)))
    with pytest.raises(acc.WeightError, match="pass weigh="):
        step(torch.arange(2))
        step.settle()


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_term_that_begins_with_weight_zero_needs_weigh(where, kind):
    pairs = as_given([(4, 0), (4, 4)], kind)
    step = make_step(two_terms(pairs))
    with pytest.raises(acc.WeightError, match="pass weigh="):
        step(torch.arange(2))
        step.settle()
    step = make_step(two_terms(pairs), weigh=lambda batch: {"a": 8, "b": 4})
    a, b = applied_gradients(step, torch.arange(2))
    assert (a.item(), b.item()) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("weigh", [None, lambda batch: {"a": 8, "b": 0}])
def test_a_term_without_elements_is_left_out_or_refused(where, kind, weigh):
    pairs = as_given([(4, 0), (4, 0)], kind)
    step = make_step(two_terms(pairs), weigh=weigh, on_empty="skip")
    a, *_ = applied_gradients(step, torch.arange(2))
    assert a.item() == 1.0
    assert float(step.last.loss) == 0.0
    assert step.last.applied
    step = make_step(two_terms(pairs), weigh=weigh)
    with pytest.raises(acc.WeightError, match="'b'"):
        step(torch.arange(2))
        step.settle()


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_the_first_term_may_be_the_empty_one(where, kind):
    pairs = as_given([(0, 4), (0, 4)], kind)
    step = make_step(two_terms(pairs), on_empty="skip", weigh=lambda batch: {"a": 0, "b": 8})
    *_, b = applied_gradients(step, torch.arange(2))
    assert b.item() == 2.0
    assert step.last.applied


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_term_that_weigh_says_is_empty_and_is_not(where, kind):
    step = make_step(two_terms(as_given([(4, 4)], kind)), on_empty="skip", weigh=lambda batch: {"a": 0, "b": 4})
    with pytest.raises(acc.WeightError, match="weigh= counted"):
        step(torch.arange(1))
        step.settle()


def test_weigh_that_counts_wrongly_is_told_so():
    step = make_step(two_terms([(4, 2), (4, 3)]), weigh=lambda batch: {"a": 8, "b": 9})
    with pytest.raises(acc.WeightError, match=r"weigh= counted .*9.* but the losses brought .*5"):
        step(torch.arange(2))


def test_terms_are_named_by_strings():
    step = make_step(lambda m, i: {1: m["a"], "1": 2 * m["b"]})
    with pytest.raises(acc.LossError, match="named by strings, not 1"):
        step(torch.arange(2))


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (0.5, "(sum, weight)"),
        ((torch.ones(3), 4), "shape (3,)"),
        (None, "(sum, weight)"),
        (("x", 1), "'x'"),
        ((1, 2, 3), "(sum"),
    ],
)
def test_malformed_metrics_are_named(metric, says):
    step = make_step(lambda m, i: acc.Loss(m["a"] * 1.0, 1, metrics={"accuracy": metric}))
    with pytest.raises(acc.LossError) as caught:
        step(torch.arange(2))
    assert "'accuracy'" in str(caught.value)
    assert says in str(caught.value)


def test_an_empty_dict_is_told_so():
    with pytest.raises(acc.LossError, match="empty dict"):
        make_step(lambda m, i: {})(torch.arange(2))


def test_mean_over_nothing():
    step = make_step(lambda m, i: acc.Loss(m["a"] * 0.0, 0), on_empty="skip")
    assert math.isnan(float(step(torch.arange(2)).loss))


class TestPerSample:
    """Metrics with a value for each sample: whole, in order, and refused where they cannot be."""

    @staticmethod
    def step_with(metric, **options):
        """One whose metric of micro-batch `i` (a tensor of its samples' numbers) is `metric(i)`."""

        def loss_fn(model, i):
            value = metric(i)
            metrics = None if value is None else {"m": value}
            return acc.Loss((model["a"] + model["b"]).expand(len(i)).sum(), len(i), metrics=metrics)

        return make_step(loss_fn, **({"microbatch": 2} | options))

    def test_in_the_order_of_the_batch(self, where):
        result = self.step_with(lambda i: acc.Metric(i * 10, per_sample=True))(torch.arange(5))
        assert result.metrics["m"].tolist() == [0, 10, 20, 30, 40]
        assert result.to_dict()["metrics"]["m"] == [0, 10, 20, 30, 40]
        assert not result.metrics["m"].requires_grad

    def test_further_dimensions(self, where):
        step = self.step_with(lambda i: acc.Metric(i[:, None, None].expand(-1, 2, 3), per_sample=True))
        result = step(torch.arange(5))
        assert result.metrics["m"].shape == (5, 2, 3)
        assert result.to_dict()["metrics"]["m"][3] == [[3, 3, 3], [3, 3, 3]]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_becomes_float32(self, dtype):
        result = self.step_with(lambda i: acc.Metric(i.to(dtype), per_sample=True))(torch.arange(3))
        assert result.metrics["m"].dtype == torch.float32

    def test_values_have_no_graph_and_are_copies(self):
        buffer = torch.zeros(2, **DOUBLE)

        def metric(i):
            return acc.Metric(buffer[: len(i)].copy_(i), per_sample=True)

        assert self.step_with(metric)(torch.arange(5)).metrics["m"].tolist() == [0, 1, 2, 3, 4]
        step = self.step_with(lambda i: acc.Metric(i.double().requires_grad_() * 2, per_sample=True))
        assert not step(torch.arange(5)).metrics["m"].requires_grad

    def test_micro_batches_of_weight_zero_count(self, where):
        def loss_fn(model, i):
            weight = (i > 2).sum()
            loss = ((model["a"] + model["b"]).expand(len(i)) * (i > 2)).sum()
            return acc.Loss(loss, weight, metrics={"m": acc.Metric(i, per_sample=True)})

        assert make_step(loss_fn)(torch.arange(5)).metrics["m"].tolist() == [0, 1, 2, 3, 4]

    def test_a_metric_is_also_a_sum_and_its_weight(self, where):
        assert float(self.step_with(lambda i: acc.Metric(i.sum(), len(i)))(torch.arange(5)).metrics["m"]) == 2.0

    @pytest.mark.parametrize(
        ("metric", "says"),
        [
            (lambda i: acc.Metric(torch.zeros(3), per_sample=True), "3 values for the 2 samples"),
            (lambda i: acc.Metric(5, per_sample=True), "not 5"),
            (lambda i: acc.Metric(torch.tensor(5), per_sample=True), "entry for each"),
            (lambda i: acc.Metric(i, 2, per_sample=True), "takes no weight"),
            (lambda i: None if 0 in i else acc.Metric(i, per_sample=True), "came 1 times in 2"),
            (lambda i: acc.Metric(torch.zeros(2, 1 + int(i[0])), per_sample=True), r"\(1,\).*\(3,\)"),
            (lambda i: (1, 1) if 0 in i else acc.Metric(i, per_sample=True), "name them apart"),
            (lambda i: (1, 1) if 0 not in i else acc.Metric(i, per_sample=True), "name them apart"),
            (lambda i: i, "or Metric"),
            (lambda i: (i, 1), "per_sample=True"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, metric, says):
        step = self.step_with(metric)
        with pytest.raises(acc.LossError, match=says):
            step(torch.arange(4))
        assert all(float(parameter.detach()) == 0 and parameter.grad is None for parameter in step.model.parameters())

    def test_terms_of_one_micro_batch_share_no_metric(self):
        def loss_fn(model, i):
            metrics = {"m": acc.Metric(i, per_sample=True)}
            return {name: acc.Loss(model[name] * len(i), len(i), metrics=metrics) for name in ("a", "b")}

        with pytest.raises(acc.LossError, match="came 4 times in 2"):
            make_step(loss_fn, microbatch=2)(torch.arange(4))
