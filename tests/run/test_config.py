from dataclasses import fields, replace

import pytest

from accumulus.cli.options import parse
from accumulus.errors import UsageError
from accumulus.run.bench_config import BenchConfig
from accumulus.run.config import (
    DEFAULT_MINUTES,
    MAY_CHANGE_ON_RESUME,
    TrainConfig,
    check_resumed,
    read_config,
)
from accumulus.run.cut import Cut

EVERYTHING = TrainConfig(
    task="a.py:b",
    data=("x", "y z"),
    batch_size=7,
    microbatch="3",
    memory_limit="1GiB",
    max_grad_norm=0.5,
    lr=0.1,
    seed=3,
    device="cpu",
    max_length=5,
    d_model=6,
    num_layers=7,
    num_heads=8,
    precision="fp16",
    warmup=2,
    steps=9,
    minutes=0.5,
    num_evals=4,
    out="o",
    resume="r",
    compile=True,
    plain=True,
)


def test_round_trip_of_every_field():
    for field in fields(TrainConfig):
        assert getattr(EVERYTHING, field.name) != field.default, f"{field.name} is not tested"
    assert TrainConfig.from_toml(EVERYTHING.to_toml()) == EVERYTHING
    assert TrainConfig.from_toml(TrainConfig().to_toml()) == TrainConfig()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 0}, "--batch-size 0"),
        ({"batch_size": -3}, "--batch-size -3"),
        ({"microbatch": "0"}, "--microbatch 0"),
        ({"microbatch": "-1"}, "--microbatch -1"),
        ({"microbatch": "many"}, "--microbatch 'many'"),
        ({"microbatch": "0tokens"}, "--microbatch 0tokens"),
        ({"microbatch": "tokens"}, "--microbatch 'tokens' must be"),
        ({"microbatch": "autotokens"}, "--microbatch 'autotokens' must be .* auto-tokens"),
        ({"microbatch": "1.5"}, "--microbatch '1.5'"),
        ({"microbatch": "8", "memory_limit": "1GiB"}, "--memory-limit 1GiB is for --microbatch auto"),
        ({"precision": "fp12"}, "--precision 'fp12'"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"steps": 0}, "--steps 0"),
        ({"minutes": -1.0}, "--minutes -1.0"),
        ({"minutes": float("inf")}, "--minutes inf"),
        ({"max_length": 0}, "--max-length 0"),
        ({"d_model": -8}, "--d-model -8"),
        ({"num_layers": 0}, "--num-layers 0"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm 0.0"),
        ({"warmup": -1}, "--warmup -1"),
        ({"num_evals": -1}, "--num-evals -1"),
        ({"seed": 2**64}, "--seed"),
    ],
)
def test_bounds(change, told):
    with pytest.raises(UsageError, match=told) as caught:
        replace(TrainConfig(), **change).validate()
    assert "\n" not in str(caught.value)


def test_the_defaults_are_valid():
    TrainConfig().validate()
    BenchConfig().validate()


def test_bench_bounds(tmp_path):
    with pytest.raises(UsageError, match="fp12"):
        BenchConfig(precisions=("fp32", "fp12")).validate()
    with pytest.raises(UsageError, match="nothing"):
        BenchConfig(precisions=()).validate()
    with pytest.raises(UsageError, match="folder does not exist"):
        BenchConfig(json=str(tmp_path / "no" / "file.json")).validate()


def test_limits():
    assert TrainConfig().limits() == (None, DEFAULT_MINUTES * 60)
    assert TrainConfig(steps=3).limits() == (3, None)
    assert TrainConfig(steps=3, minutes=2).limits() == (3, 120)


def test_micro_batch_never_exceeds_the_batch():
    assert TrainConfig(batch_size=8, microbatch="32").cut() == Cut(size=8)
    assert TrainConfig(batch_size=8, microbatch="32tokens").cut() == Cut(size=32, unit="tokens")
    assert BenchConfig(batch_size=8, microbatch="32").microbatch_size() == 8


def test_the_words_that_repeat_a_run():
    config = TrainConfig(
        task="a.py:b", data=("x", "y z"), lr=0.1, compile=True, out="o", plain=True, memory_limit="1GiB"
    )
    words = config.repeat_words(microbatch="8", num_steps=57)  # limited by time: steps stand in for that
    read = parse(TrainConfig, words, verb="train", description="")
    expected = replace(config, microbatch="8", steps=57, memory_limit="auto", out=None, plain=False)
    assert read == expected
    given = replace(config, steps=9)
    assert parse(TrainConfig, given.repeat_words(microbatch="8", num_steps=9), verb="train", description="").steps == 9


def test_only_given_task_options_are_passed_on():
    assert TrainConfig().task_options() == {}
    assert TrainConfig(d_model=8, data=("a",)).task_options() == {"d_model": 8, "data": ("a",)}


def test_unknown_options_in_a_file_are_refused():
    with pytest.raises(UsageError, match="batchsize"):
        TrainConfig.from_toml("batchsize = 3")
    with pytest.raises(UsageError, match="not a configuration"):
        TrainConfig.from_toml("][")


def test_reading_what_is_no_run(tmp_path):
    with pytest.raises(UsageError, match="give the folder of a run"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_text("][")
    with pytest.raises(UsageError, match="--resume"):
        read_config(tmp_path)


def test_what_may_change_on_resume():
    free = {name: getattr(EVERYTHING, name) for name in MAY_CHANGE_ON_RESUME | {"resume"}}
    check_resumed(TrainConfig(), replace(TrainConfig(), **free))
    with pytest.raises(UsageError, match=r"--lr was None and cannot become 0\.1"):
        check_resumed(TrainConfig(), TrainConfig(lr=0.1))
