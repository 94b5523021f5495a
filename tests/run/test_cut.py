import pytest

from accumulus.errors import UsageError
from accumulus.run.cut import Cut, describe_record, microbatch_option, read_size

CUTS = {
    "32": Cut(size=32),
    "8192tokens": Cut(size=8192, unit="tokens"),
    "auto": Cut(size=None),
    "auto-tokens": Cut(size=None, unit="tokens"),
}


@pytest.mark.parametrize(("text", "cut"), CUTS.items())
def test_what_can_be_asked_for(text, cut):
    assert Cut.parse(text) == cut
    assert cut.describe()


@pytest.mark.parametrize("text", ["", "tokens", "auto-", "-tokens", "autotokens", "auto-samples", "8 k", "1.5", "many"])
def test_what_cannot_be_read(text):
    with pytest.raises(UsageError, match="--microbatch .* must be a number of samples, such as 32, a number of tokens"):
        Cut.parse(text)


@pytest.mark.parametrize("text", ["0", "-3", "0tokens", "-1tokens"])
def test_what_is_too_small(text):
    with pytest.raises(UsageError, match=f"--microbatch {text} must be larger than 0"):
        Cut.parse(text)


def test_samples_never_exceed_the_batch_and_tokens_may():
    assert {text: cut.within(16).size for text, cut in CUTS.items()} == {
        "32": 16,
        "8192tokens": 8192,
        "auto": None,
        "auto-tokens": None,
    }
    assert read_size("32", batch_size=16) == 16


@pytest.mark.parametrize("text", ["32", "8192tokens"])
def test_the_option_comes_back_from_the_record(text):
    record = Cut.parse(text).to_record(None)
    assert set(record) == {"microbatch", "microbatch_unit"}
    assert microbatch_option(record) == text


def test_a_choice_in_words():
    choice = {"size": 4096, "unit": "tokens", "reason": "the fastest", "samples_per_second": 475.3}
    record = Cut.parse("auto-tokens").to_record(choice)
    assert describe_record(record) == "4,096 tokens: the fastest (475 samples/s)"
    assert describe_record({**record, "microbatch_samples_per_second": None}) == "4,096 tokens: the fastest"
    assert microbatch_option(record) == "4096tokens"
