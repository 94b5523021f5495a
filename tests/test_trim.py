"""Where padding lies and what is cut off: nothing that matters is ever lost silently."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumulus as acc
from accumulus import pytree
from accumulus.microbatch import Microbatches
from accumulus.trim import padding_of

CPU = torch.device("cpu")
FULL = 16


def padded(lengths, full=FULL, *, on_left=False):
    """A mask and tokens that are 0 where it is."""
    columns = torch.arange(full)
    columns = columns.flip(0) if on_left else columns
    mask = (columns[None] < torch.tensor(lengths)[:, None]).long()
    tokens = (torch.arange(len(lengths))[:, None] * 100 + torch.arange(full)[None] + 1) * mask
    return {"input_ids": tokens, "attention_mask": mask}


def cut(batch, max_tokens=16, **options):
    options = {"multiple_of": 4} | options
    parts = Microbatches(batch, acc.by_tokens(max_tokens, **options), CPU, collate=None)
    return [part for part, _ in parts], parts


# --- where the padding lies


@given(st.lists(st.integers(0, FULL), min_size=1, max_size=6), st.booleans())
def test_lengths_are_read_off_the_mask(lengths, on_left):
    found = padding_of(pytree.sliceable(padded(lengths, on_left=on_left)), None)
    assert found.full_length == FULL
    if found.is_left == on_left:
        assert found.lengths() == lengths
    else:  # left padding that cannot be told, as all samples are full or empty; or right padding that has none
        assert set(lengths) <= {0, FULL}


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5))
def test_nothing_real_is_ever_cut(rows):
    mask = torch.tensor(rows)
    tokens = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    parts, whole = cut({"tokens": tokens, "mask": mask}, 100, length="mask", multiple_of=1)
    kept = torch.cat([part["tokens"].flatten() for part in parts])
    assert sorted(kept[kept > 0].tolist()) == tokens[mask].tolist()
    assert sorted(whole.order) == list(range(len(rows)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("as_array", [False, True])
def test_masks_of_any_dtype(dtype, as_array):
    batch = padded([3, 9, 16])
    mask = batch["attention_mask"].to(dtype)
    if as_array and dtype == torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    batch["attention_mask"] = mask.numpy() if as_array else mask
    parts, whole = cut(batch)
    assert whole.sizes == [1, 1, 1]
    assert [tuple(part["attention_mask"].shape) for part in parts] == [(1, 16), (1, 12), (1, 4)]


def test_labels_are_padded_with_minus_100():
    batch = padded([3, 9, 16])
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    del batch["attention_mask"]
    parts, _ = cut(batch, length="labels")
    assert [tuple(part["input_ids"].shape) for part in parts] == [(1, 16), (1, 12), (1, 4)]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_prompt_before_the_labels_is_no_padding(num_samples):
    """Also where no sample is padded, so that all labels end in the last column, as left-padded ones would."""
    tokens = torch.randint(9, (num_samples, 8))
    labels = tokens.clone()
    labels[:, :5] = -100
    parts, _ = cut({"tokens": tokens, "labels": labels}, 100, length="labels", multiple_of=1)
    assert torch.equal(parts[0]["tokens"], tokens)


def test_one_prompt_for_all_samples_is_no_padding():
    """Nor is a first token that has no label: by labels alone, only the right side can be padding."""
    tokens = torch.randint(2, 9, (3, 8))
    tokens[:, :3] = torch.tensor([1, 4, 2])
    labels = tokens.clone()
    labels[:, :3] = -100
    parts, _ = cut({"tokens": tokens, "labels": labels}, 100, length="labels", multiple_of=1)
    assert torch.equal(parts[0]["tokens"], tokens)


def test_mixed_padding_is_read_as_padding_on_the_right():
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]])
    parts, whole = cut({"x": mask * 5, "attention_mask": mask}, 100, multiple_of=1)
    assert whole.order == [0, 1]
    assert parts[0]["x"].tolist() == [[0, 0, 5, 5], [5, 5, 5, 0]]


# --- how lengths are found, or not


@pytest.mark.parametrize(
    ("batch", "length", "says"),
    [
        ({"x": torch.ones(2, 4)}, None, "'attention_mask'; it has 'x'.*length="),
        ({"x": torch.ones(2, 4)}, "mask", "'mask'; it has 'x'"),
        ({"x": torch.ones(2, 4)}, "x", "neither a mask .* nor labels"),
        ({"mask": torch.ones(2)}, "mask", "shape"),
        ({"mask": torch.ones(2, 3, 4)}, "mask", "shape"),
        ({"mask": torch.tensor([[0.0, -1e9], [0, 0]])}, "mask", "added to scores"),
        ({"a": {"mask": torch.ones(2, 3)}, "b": {"mask": torch.ones(2, 3)}}, "mask", "a.mask, b.mask"),
        ({"x": torch.ones(2), "mask": 5}, "mask", "is int"),
        (torch.ones(2, 3), None, "one tensor without a name"),
    ],
)
def test_what_cannot_be_inferred(batch, length, says):
    with pytest.raises(acc.SplitError, match=says):
        cut(batch, length=length)


def test_paths():
    inner = padded([3, 16])
    batch = (
        inner["input_ids"],
        {"a b": {"attention_mask": inner["attention_mask"]}, "m": inner["attention_mask"] * 0 + 1},
    )
    for name in ("1.a b.attention_mask", "attention_mask", None):
        assert [part[0].shape for part in cut(batch, length=name)[0]] == [(1, 16), (1, 4)]
    assert [leaf.name for leaf in pytree.sliceable(batch).leaves] == ["0", "1.a b.attention_mask", "1.m"]


# --- what is trimmed


Pair = collections.namedtuple("Pair", "query key")


def test_every_leaf_of_the_masks_length_is_trimmed():
    batch = padded([3, 9, 16])
    mask = batch["attention_mask"]
    batch |= {
        "positions": torch.arange(FULL).expand(3, FULL),
        "weights": mask.double(),
        "embedded": torch.randn(3, FULL, 5) * mask[..., None],
        "array": batch["input_ids"].numpy(),
        "pair": Pair(mask.bool(), batch["input_ids"].to(torch.int32)),
        "other": torch.randn(3, FULL - 1),
        "pooled": torch.randn(3),
        "names": ["a", "b", "c"],
        "table": 3,
    }
    parts, whole = cut(batch)
    assert whole.order == [2, 1, 0]
    for part, length, row in zip(parts, (16, 12, 4), whole.order, strict=True):
        assert part["other"].tolist() == batch["other"][row : row + 1].tolist()
        for name in ("positions", "weights", "embedded", "input_ids", "attention_mask"):
            assert torch.equal(part[name], batch[name][row : row + 1, :length]), name
        assert torch.equal(part["pair"].key, batch["pair"].key[row : row + 1, :length])
        assert (part["array"] == batch["array"][row : row + 1, :length]).all()
        assert part["names"] == [batch["names"][row]]
        assert part["table"] == 3


@pytest.mark.parametrize("trim", [["input_ids", "attention_mask"], {"input_ids": 1, "attention_mask": (1,)}])
def test_leaves_that_are_not_named_are_left(trim):
    batch = padded([3, 9, 16]) | {"features": torch.randn(3, FULL)}
    parts, _ = cut(batch, trim=trim)
    assert [part["features"].shape[1] for part in parts] == [16, 16, 16]
    assert [part["input_ids"].shape[1] for part in parts] == [16, 12, 4]


@pytest.mark.parametrize("on_left", [False, True])
def test_masks_between_positions(on_left):
    """Positions that are kept must not lose sight of anything; what cut positions saw does not matter."""
    batch = padded([3, 9, 16], on_left=on_left)
    real = batch["attention_mask"].bool()
    causal = torch.ones(FULL, FULL, dtype=torch.bool).tril()
    batch["pairs"] = causal[None, None] & real[:, None, None, :]
    trim = {"pairs": (2, 3), "input_ids": 1, "attention_mask": 1}
    parts, whole = cut(batch, trim=trim)
    for part, length, row in zip(parts, (16, 12, 4), whole.order, strict=True):
        kept = slice(FULL - length, None) if on_left else slice(length)
        assert torch.equal(part["pairs"], batch["pairs"][row : row + 1, :, kept, kept])
    batch["pairs"][0, 0, -1 if on_left else 2, 9 if not on_left else 2] = True
    with pytest.raises(acc.BatchError, match=r"batch\.pairs .* row 0, column (9|2) "):
        cut(batch, trim=trim)


@pytest.mark.parametrize(
    ("trim", "says"),
    [
        (["nothing"], "no leaf 'nothing'.*'input_ids'.*trim="),
        (["short"], "dimension 1 of 'short', whose shape is"),
        ({"input_ids": 2}, "dimension 2 of 'input_ids'"),
        ({"input_ids": 0}, "at least 1"),
        (["shared"], "shape is"),
    ],
)
def test_leaves_that_cannot_be_trimmed(trim, says):
    batch = padded([3, 9, 16]) | {"short": torch.zeros(3, 2), "shared": 5}
    with pytest.raises(acc.SplitError, match=says):
        cut(batch, trim=trim)


# --- what is lost, and what is not


def lose(name, value, *, lengths=(3, 9, 16), on_left=False, **options):
    batch = padded(list(lengths), on_left=on_left) | {name: value}
    return cut(batch, **options)


def test_labels_where_the_mask_says_padding():
    labels = torch.full((3, FULL), -100)
    labels[0, :3] = 1
    labels[0, 9] = 7
    with pytest.raises(acc.BatchError, match=r"batch\.labels .* row 0, column 9 .*'attention_mask'.*trim="):
        lose("labels", labels)


@pytest.mark.parametrize("as_array", [False, True])
def test_valid_labels_that_happen_to_be_one_value(as_array):
    """All that would be cut off is 7; but where -100 is about, that is what padding is."""
    labels = torch.full((3, FULL), 7)
    labels[0, 0] = -100
    with pytest.raises(acc.BatchError, match=r"batch\.labels .* row 0, column 4 "):
        lose("labels", labels.numpy() if as_array else labels)


def test_a_label_just_behind_the_mask_is_kept_where_rounding_keeps_it():
    labels = torch.full((3, FULL), -100)
    labels[0, 3] = 7
    parts, _ = lose("labels", labels)
    assert parts[2]["labels"].tolist() == [[-100, -100, -100, 7]]


@pytest.mark.parametrize("on_left", [False, True])
def test_features_that_happen_to_be_as_many_as_columns(on_left):
    features = torch.randn(3, FULL)
    column = 1 if on_left else 4  # what stands at the very end is what the others are compared with
    with pytest.raises(acc.BatchError, match=rf"batch\.features .* row 0, column {column} .*leave it out"):
        lose("features", features, on_left=on_left)
    parts, _ = lose("features", features, on_left=on_left, trim=["input_ids", "attention_mask"])
    assert torch.equal(parts[0]["features"], features[2:])


def test_a_single_entry_is_no_proof_of_padding():
    """One entry always equals itself: nothing is cut where it would be the only one."""
    batch = padded([FULL - 1, FULL]) | {"labels": torch.arange(2 * FULL).view(2, FULL)}
    parts, whole = cut(batch, multiple_of=1)
    assert [part["labels"].shape[1] for part in parts] == [FULL, FULL]
    assert whole.peak_tokens == FULL


def test_position_ids_of_a_single_sample():
    parts, _ = lose("positions", torch.arange(FULL)[None], lengths=(3,))
    assert parts[0]["positions"].tolist() == [[0, 1, 2, 3]]
    with pytest.raises(acc.BatchError, match="positions"):
        lose("positions", torch.arange(FULL).flip(0)[None], lengths=(3,))


def test_padding_of_nan_is_padding():
    values = torch.full((3, FULL), float("nan"))
    values[1, :9] = 2
    parts, _ = lose("values", values)
    assert parts[1]["values"].nan_to_num(0).tolist() == [[2] * 9 + [0] * 3]
    values[0, 12] = 1
    with pytest.raises(acc.BatchError, match="row 0, column 12"):
        lose("values", values)


def test_one_vector_everywhere_is_padding():
    vectors = torch.randn(5).expand(3, FULL, 5).clone()
    vectors[2] = torch.randn(FULL, 5)
    assert lose("vectors", vectors)[0][2]["vectors"].shape == (1, 4, 5)
    vectors[1, 14, 4] += 1
    with pytest.raises(acc.BatchError, match=r"vectors .* row 1, column 14"):
        lose("vectors", vectors)


@given(st.data())
def test_whatever_is_not_padding_is_noticed(data):
    """The law of trimming: put something anywhere; either it is still there, or the step is refused."""
    lengths = data.draw(st.lists(st.integers(0, FULL), min_size=1, max_size=4))
    on_left = data.draw(st.booleans())
    row, column = data.draw(st.integers(0, len(lengths) - 1)), data.draw(st.integers(0, FULL - 1))
    batch = padded(lengths, on_left=on_left)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    batch["labels"][row, column] = 999
    try:
        parts, _ = cut(batch, 40, multiple_of=data.draw(st.integers(1, 6)))
    except acc.BatchError as error:
        assert f"row {row}, column {column}" in str(error)  # noqa: PT017
        return
    assert sum(int((part["labels"] == 999).sum()) for part in parts) == 1


def test_text_in_arrays():
    words = np.full((3, FULL), "pad")
    words[2] = "word"
    assert lose("words", words)[0][2]["words"].shape == (1, 4)
    words[0, 8] = "word"
    with pytest.raises(acc.BatchError, match="row 0, column 8"):
        lose("words", words)


def test_sparse_tensors_are_refused():
    with pytest.raises(acc.BatchError, match="cannot be cut"):
        lose("x", torch.eye(3).to_sparse())
