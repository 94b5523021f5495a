"""The law of token budgets: whichever budget, rounding and padding, the update is the ungrouped whole batch's."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accumulus as acc
from accumulus import pytree
from accumulus.grouping import ByTokens
from accumulus.microbatch import Groups, Microbatches

from .reference import IGNORED, applied_gradients, relative_error, whole_batch

NUM_TOKENS = 13
PAD = 1


class Causal(nn.Module):
    """Each position sees the real ones before it; padding is not looked at, on whichever side it stands."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 6)
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, NUM_TOKENS)
        self.score = nn.Linear(6, 1)

    def forward(self, tokens, mask):
        seen = mask.to(self.inner.weight.dtype)[..., None]
        hidden = torch.tanh(self.inner(self.embedding(tokens))) * seen
        context = self.dropout(hidden.cumsum(1) / seen.cumsum(1).clamp(min=1))
        pooled = (context * seen).sum(1) / seen.sum(1).clamp(min=1)
        return self.head(context + hidden), self.score(pooled).squeeze(1)


def make_model(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Causal(**options).to(dtype)


def make_samples(lengths, *, seed=0):
    """Lists of tokens and labels; some labels are ignored, and a sample of length 0 has none."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(2, NUM_TOKENS, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.2, IGNORED, tokens)
        samples.append(
            {"input_ids": tokens.tolist(), "labels": labels.tolist(), "target": index % 3, "name": f"{index}"}
        )
    return samples


def pad(samples, *, multiple_of=1, on_left=False, at_least=1):
    """A collate function, the slow and obvious way."""
    longest = max([at_least, *(len(sample["input_ids"]) for sample in samples)])
    longest = -(-longest // multiple_of) * multiple_of
    columns = {"input_ids": [], "labels": [], "attention_mask": []}
    for sample in samples:
        missing = longest - len(sample["input_ids"])
        for name, filling, values in (
            ("input_ids", PAD, sample["input_ids"]),
            ("labels", IGNORED, sample["labels"]),
            ("attention_mask", 0, [1] * len(sample["input_ids"])),
        ):
            columns[name].append([filling] * missing + values if on_left else values + [filling] * missing)
    batch = {name: torch.tensor(rows) for name, rows in columns.items()}
    batch["target"] = torch.tensor([float(sample["target"]) for sample in samples], dtype=torch.float64)
    batch["name"] = [sample["name"] for sample in samples]
    return batch


def two_terms(model, batch):
    """A loss over tokens and one over samples, and metrics of both kinds."""
    logits, scores = model(batch["input_ids"], batch["attention_mask"])
    labels = batch["labels"]
    tokens = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels.shape)
    errors = (scores - batch["target"].to(scores.dtype)).square()
    names = torch.tensor([float(name) for name in batch["name"]])
    return {
        "tokens": acc.Loss(
            tokens.sum(),
            (labels != IGNORED).sum(),
            metrics={
                "by_sample": acc.Metric(tokens.sum(1), per_sample=True),
                "length": ((labels != IGNORED).sum(), len(labels)),
            },
        ),
        "scores": acc.Loss(
            errors.sum(),
            len(errors),
            metrics={"name": acc.Metric(names, per_sample=True), "error": acc.Metric(errors.sum(), len(errors))},
        ),
    }


def weigh(batch):
    samples = batch if isinstance(batch, list) else None
    if samples is not None:
        return {"tokens": sum(label != IGNORED for s in samples for label in s["labels"]), "scores": len(samples)}
    return {"tokens": (batch["labels"] != IGNORED).sum(), "scores": len(batch["labels"])}


def make_step(rule, *, model=None, loss_fn=two_terms, **options):
    model = make_model() if model is None else model
    options = {"precision": "fp32", "weigh": weigh if loss_fn is two_terms else None} | options
    return acc.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, microbatch=rule, **options)


def metrics_of(model, loss_fn, batch):
    """Every metric of the batch in one piece."""
    with torch.no_grad():
        found = {name: metric for term in loss_fn(model, batch).values() for name, metric in term.metrics.items()}
    pairs = {name: m if isinstance(m, acc.Metric) else acc.Metric(*m) for name, m in found.items()}
    return {
        name: pair.value if pair.per_sample else pair.value.double() / float(pair.weight)
        for name, pair in pairs.items()
    }


def compare(rule, batch, whole, **options):
    """The law, and the results: those of the whole batch in one piece."""
    step = make_step(rule, **options)
    right, metrics = whole_batch(step.model, two_terms, whole), metrics_of(step.model, two_terms, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of samples beyond the budget
        found = applied_gradients(step, batch)
    assert relative_error(found, right.gradients) <= 1e-12
    assert float(step.last.loss) == pytest.approx(right.loss, rel=1e-12)
    assert step.last.num_samples == len(whole["name"])
    assert step.last.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(step.last.metrics[name], value, rtol=1e-12, atol=1e-12, check_dtype=False)


ROUNDING = st.one_of(
    st.fixed_dictionaries({"multiple_of": st.integers(1, 9)}),
    st.fixed_dictionaries(
        {"buckets": st.lists(st.integers(1, 20), min_size=1, max_size=4), "multiple_of": st.integers(1, 4)}
    ),
)
LENGTHS = st.lists(st.integers(0, 17), min_size=1, max_size=9).filter(any)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 150), ROUNDING, st.booleans(), st.integers(0, 99))
def test_law_for_padded_tensors(lengths, max_tokens, rounding, on_left, seed):
    samples = make_samples(lengths, seed=seed)
    batch = pad(samples, on_left=on_left, multiple_of=1 + seed % 3)
    if all(label == IGNORED for sample in samples for label in sample["labels"]):
        return
    compare(acc.by_tokens(max_tokens, **rounding), batch, batch)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 150), st.integers(1, 9), st.integers(0, 99))
def test_law_for_lists_with_collate(lengths, max_tokens, multiple_of, seed):
    samples = make_samples(lengths, seed=seed)
    if all(label == IGNORED for sample in samples for label in sample["labels"]):
        return
    rule = acc.by_tokens(max_tokens, multiple_of=multiple_of)
    compare(rule, samples, pad(samples), collate=lambda some: pad(some, multiple_of=multiple_of))


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 100), st.booleans(), st.integers(0, 99))
def test_law_by_labels(lengths, max_tokens, on_left, seed):
    """By labels alone: what stands before the first label may be a prompt, and is never lost."""
    samples = make_samples(lengths, seed=seed)
    if all(label == IGNORED for sample in samples for label in sample["labels"]):
        return
    batch = pad(samples, on_left=on_left)
    # Ignored labels at the end of a sample look like padding to labels, but its tokens are none.
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], IGNORED)
    compare(acc.by_tokens(max_tokens, length="labels", multiple_of=2), batch, batch)


def test_law_on_a_device_that_the_host_does_not_read(accelerator):
    batch = pad(make_samples([3, 40, 7, 0, 22, 9, 31, 2]))
    compare(acc.by_tokens(64, multiple_of=4), batch, batch)


def test_law_in_float32():
    batch = pad(make_samples([3, 40, 7, 0, 22, 9, 31, 2]))
    batch["target"] = batch["target"].float()
    step = make_step(acc.by_tokens(64, multiple_of=4), model=make_model(torch.float32))
    right = whole_batch(step.model, two_terms, batch)
    assert relative_error(applied_gradients(step, batch), right.gradients) <= 5e-6


# --- groups


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 1000), ROUNDING)
def test_groups_cover_the_batch_and_keep_the_budget(lengths, max_tokens, rounding):
    rule = acc.by_tokens(max_tokens, **rounding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = rule.groups([b"x" * length for length in lengths])
    assert sorted(groups.order) == list(range(len(lengths)))
    ordered = [lengths[index] for index in groups.order]
    assert ordered == sorted(lengths, reverse=True)
    assert list(groups.order) == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))  # stable
    start = 0
    for size, padded in zip(groups.sizes, groups.padded_lengths, strict=True):
        longest = max(ordered[start], 1)
        assert longest <= padded
        assert size * padded <= max_tokens or size == 1
        buckets = [b for b in rounding.get("buckets", ()) if b >= longest]
        assert padded == (min(buckets) if buckets else -(-longest // rounding["multiple_of"]) * rounding["multiple_of"])
        start += size
        assert start == len(ordered) or (size + 1) * padded > max_tokens  # no more would have fitted
    assert groups.padded_lengths == sorted(groups.padded_lengths, reverse=True)  # the peak comes first
    assert groups.peak_tokens == max(s * p for s, p in zip(groups.sizes, groups.padded_lengths, strict=True))


def test_few_shapes_with_buckets():
    seen = []

    def loss_fn(model, part):
        seen.append(part["input_ids"].shape[1])
        return two_terms(model, part)

    batch = pad(make_samples([3, 40, 7, 60, 22, 9, 31, 2]))
    make_step(acc.by_tokens(64, buckets=[48, 16]), loss_fn=loss_fn, weigh=weigh)(batch)
    assert set(seen) == {16, 48, 60}  # 60 is longer than all buckets: rounded, and no longer than the batch


def test_one_warning_for_a_rule_and_its_copies():
    batch = pad(make_samples([30, 5]))
    rule = acc.by_tokens(16)
    step = make_step(rule)
    with pytest.warns(UserWarning, match=r"sample 0 .* 30 tokens, .* max_tokens=16") as seen:
        step(batch)
    assert seen[0].filename == __file__  # it points at the call
    step(batch)  # a second warning would be an error here
    make_step(dataclasses.replace(rule, max_tokens=8))(batch)
    assert step.split(batch).sizes == [1, 1]


@pytest.mark.parametrize("collated", [False, True])
def test_strict_raises_before_anything_runs(collated):
    samples = make_samples([5, 30])
    calls = []
    step = make_step(
        acc.by_tokens(16, strict=True),
        loss_fn=lambda model, part: calls.append(part),
        collate=pad if collated else None,
    )
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(acc.SplitError, match=r"sample 1 .* 3[02] tokens, .*raise max_tokens"):
        step(samples if collated else pad(samples))
    assert calls == []
    assert all(torch.equal(a, b) for a, b in zip(before.values(), step.model.state_dict().values(), strict=True))


def test_a_copy_with_another_budget():
    rule = acc.by_tokens(64, length="labels", multiple_of=4, buckets=[8, 4], trim={"labels": 1}, strict=True)
    smaller = dataclasses.replace(rule, max_tokens=32)
    assert isinstance(smaller, ByTokens)
    assert smaller.max_tokens == 32
    assert dataclasses.replace(smaller, max_tokens=64) == rule
    assert copy.deepcopy(rule) == rule
    assert rule.buckets == (4, 8)


def test_the_largest_micro_batch_is_known():
    batch = pad(make_samples([30, 5, 16, 2]))
    parts = make_step(acc.by_tokens(40)).split(batch)
    shapes = [part["input_ids"].shape for part, _ in parts]
    assert parts.peak_tokens == max(rows * columns for rows, columns in shapes) == 32
    assert shapes == [(1, 30), (2, 16), (1, 8)][: len(shapes)]
    assert parts.order == [0, 2, 1, 3]
    assert make_step(2).split(batch).peak_tokens is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"max_tokens": 8, "multiple_of": 0},
        {"max_tokens": 8, "buckets": [0]},
        {"max_tokens": 8, "buckets": 16},
        {"max_tokens": 8, "buckets": "16"},
        {"max_tokens": 8, "length": 5},
        {"max_tokens": 8, "trim": 5},
        {"max_tokens": 8, "trim": [5]},
        {"max_tokens": 8, "trim": {"x": 0}},
        {"max_tokens": 8, "trim": {"x": "1"}},
        {"max_tokens": 8, "trim": {"x": ()}},
    ],
)
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(acc.SplitError, match=r"by_tokens takes|length=|buckets=|trim="):
        acc.by_tokens(**arguments)


def test_a_function_of_a_sample_needs_a_list():
    with pytest.raises(acc.SplitError, match="needs collate="):
        make_step(acc.by_tokens(16, length=len))(pad(make_samples([3, 4])))


# --- together with everything else


def test_every_kind_of_batch_stays_aligned():
    """Case 26 and its like: row i of every leaf stays with row i of the others."""

    @dataclasses.dataclass
    class Fields:
        mask: torch.Tensor
        rows: list
        array: np.ndarray
        pairs: tuple

    lengths = [2, 9, 4, 7, 1, 8]
    mask = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
    fields = Fields(mask, [f"s{i}" for i in range(6)], np.arange(6), (torch.arange(6), "all"))
    batch = UserDict({"fields": fields, "boxes": [torch.zeros(i + 7) for i in range(6)], "one": 3})
    rule = acc.by_tokens(20, length="fields.mask", multiple_of=2)
    seen = []
    for part, _ in Microbatches(batch, rule, torch.device("cpu"), collate=None):
        assert isinstance(part, UserDict)
        assert part["one"] == 3
        inner = part["fields"]
        assert inner.pairs[1] == "all"
        ids = inner.array.tolist()
        assert inner.rows == [f"s{i}" for i in ids]
        assert inner.pairs[0].tolist() == ids
        assert [len(box) - 7 for box in part["boxes"]] == ids
        assert inner.mask.sum(1).tolist() == [lengths[i] for i in ids]
        seen += ids
    assert seen == [1, 5, 3, 2, 0, 4]


def test_fp16_clipping_dropout_and_empty_micro_batches():
    samples = make_samples([9, 30, 4, 0, 0, 17])
    for sample in samples[1::4]:
        sample["labels"] = [IGNORED] * len(sample["labels"])  # the longest, alone in its micro-batch: weight zero
    batch = pad(samples)
    model = make_model(torch.float32, dropout=0.5)
    step = make_step(
        acc.by_tokens(32), model=model, precision="fp16", max_grad_norm=0.1, loss_scale=acc.DynamicScale(initial=2.0**8)
    )
    result = step(batch)
    assert bool(result.applied)
    assert bool(result.clipped)
    assert result.metrics["by_sample"].dtype == torch.float32
    assert result.metrics["by_sample"][[1, 3, 4]].tolist() == [0, 0, 0]
    assert result.metrics["name"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_of_weight_zero_may_be_skipped():
    batch = pad(make_samples([4, 9]))
    batch["labels"][:] = IGNORED

    def loss_fn(model, part):
        return two_terms(model, part)["tokens"]

    result = make_step(acc.by_tokens(9), loss_fn=loss_fn, on_empty="skip")(batch)
    assert not bool(result.applied)
    assert result.metrics["by_sample"].tolist() == [0, 0]


def test_other_rules_give_the_batchs_own_order_too():
    batch = pad(make_samples([4, 9, 2, 5]))
    assert make_step(3)(batch).metrics["name"].tolist() == [0, 1, 2, 3]


def test_micro_batches_are_marked_for_compilers(monkeypatch):
    marked = []
    monkeypatch.setattr(pytree, "is_compiling", lambda: True)
    monkeypatch.setattr(pytree, "mark_varying", lambda tree: marked.append(tree) or tree)
    step = make_step(acc.by_tokens(16))
    batch = pad(make_samples([4, 9, 2, 5]))
    step(batch)
    assert len(marked) == len(step.split(batch))


class Backwards:
    """A rule of one's own."""

    def groups(self, batch):
        return Groups(order=self.order, sizes=[2, 1])


def test_a_rule_of_ones_own():
    rule, batch = Backwards(), pad(make_samples([4, 9, 2]))
    rule.order = [2, 1, 0]
    compare(rule, batch, batch)
    rule.order = [2, 1, 1]
    with pytest.raises(acc.SplitError, match="once"):
        make_step(rule)(batch)
