import math

import pytest
import torch
from torch.nn import functional as F

from accumulus.errors import UsageError
from accumulus.run.bytes_model import START, ByteModel
from accumulus.run.bytes_task import IGNORED, bytes_task, collate, loss_fn, printable


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ByteModel(d_model=16, num_layers=2, num_heads=2)


def test_collate_pads_right_and_counts_on_the_host():
    batch = collate([b"abc", b"\xff"])
    assert batch["inputs"].tolist() == [[START, 97, 98, 99] + [START] * 12, [START, 255] + [START] * 14]
    assert batch["labels"].tolist() == [[97, 98, 99] + [IGNORED] * 13, [255] + [IGNORED] * 15]
    assert batch["num_bytes"] == 4
    assert type(batch["num_bytes"]) is int


def test_padding_and_company_change_nothing(model):
    together = loss_fn(model, collate([b"abc", b"defghijk", b"x"]))
    alone = [loss_fn(model, collate([text])) for text in (b"abc", b"defghijk", b"x")]
    torch.testing.assert_close(together.sum, sum(loss.sum for loss in alone))
    assert together.weight == sum(loss.weight for loss in alone) == 12


def test_no_byte_sees_itself_or_what_follows(model):
    logits = model(collate([b"abcdefgh"])["inputs"])
    changed = model(collate([b"abcdXYZW"])["inputs"])
    torch.testing.assert_close(logits[:, :5], changed[:, :5])
    assert not torch.allclose(logits[:, 5:], changed[:, 5:])


def test_position_matters(model):
    logits = model(collate([b"aaaaaaaa"])["inputs"])[0]
    assert not torch.allclose(logits[3], logits[6])


def test_the_first_loss_is_near_that_of_a_guess(model):
    loss = loss_fn(model, collate([bytes(range(97, 123)) * 4]))
    assert 0.8 < float(loss.sum.detach()) / loss.weight / math.log(257) < 1.5


def test_loss_is_summed_in_float32_under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        batch = collate([b"hello", b"you"])
        loss = loss_fn(model, batch)
        logits = model(batch["inputs"])
    assert logits.dtype == torch.bfloat16
    assert loss.sum.dtype == torch.float32
    expected = F.cross_entropy(
        logits.double().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(loss.sum.double(), expected, rtol=1e-5, atol=0)


def test_sizes_that_do_not_fit():
    with pytest.raises(UsageError, match=r"--d-model 10 .* 8 would fit"):
        ByteModel(d_model=10, num_layers=1, num_heads=4)


def test_the_task_over_a_file(text_file):
    task = bytes_task(data=[str(text_file)], max_length=32, d_model=8, num_layers=1, num_heads=1)
    assert not set(task.train_data) & set(task.eval_data)
    before = torch.get_rng_state()
    text = task.sample(task.model)
    assert text.startswith("def ")
    assert text == task.sample(task.model)
    assert torch.equal(before, torch.get_rng_state())
    assert task.derived["bits_per_byte"](math.log(2)) == 1.0


def test_one_piece_of_text_is_too_little(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(UsageError, match="single piece"):
        bytes_task(data=[str(tmp_path / "a.txt")])


def test_what_is_printed_cannot_disturb_a_terminal():
    assert printable(b"a\n\t\x1b[31m\x07\xff") == "a\n\t?[31m?\N{REPLACEMENT CHARACTER}"
