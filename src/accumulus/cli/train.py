"""`accumulus train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accumulus.cli.options import parse
from accumulus.run.config import TrainConfig, read_config


def run(words: Sequence[str]) -> int:
    """Trains.

    Args:
        words: the command line after `train`.

    Returns:
        The exit code.

    Raises:
        UsageError: bad input.
        AccumulusError: the training cannot go on.
    """
    config = parse(
        TrainConfig,
        words,
        verb="train",
        description="Trains a task. Ctrl-C finishes the step, saves, and says how to go on.",
        default=resumed_defaults(words),
    )
    config.validate()
    from accumulus.run.loop import train  # torch takes a second, and --help and bad options need none of it

    return train(config)


def resumed_defaults(words: Sequence[str]) -> TrainConfig:
    """The options that hold where the command line says nothing: a resumed run's own.

    Args:
        words: the command line after `train`.

    Returns:
        A configuration.

    Raises:
        UsageError: there is no run to resume.
    """
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--resume" and (equals or index + 1 < len(words)):
            folder = value if equals else words[index + 1]
            return replace(read_config(folder), resume=folder)
    return TrainConfig()
