import pytest

from accumulus.errors import UsageError
from accumulus.run.check_config import CheckConfig


def test_defaults_are_valid_and_round_trip():
    config = CheckConfig()
    config.validate()
    assert CheckConfig.from_toml(config.to_toml()) == config


def test_a_microbatch_is_one_more_split():
    assert CheckConfig(batch_size=8).microbatch_size() == 8
    assert CheckConfig(batch_size=8, microbatch="3").microbatch_size() == 3


@pytest.mark.parametrize("wrong", [{"batch_size": 1}, {"precision": "fp31"}, {"microbatch": "many"}])
def test_what_cannot_work_is_refused(wrong):
    with pytest.raises(UsageError):
        CheckConfig(**wrong).validate()
