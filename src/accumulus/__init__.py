"""accumulus: ask for the batch you want; get exactly its gradient. The public names, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accumulus.errors import (
    AccumulusError,
    BatchError,
    CorruptStepError,
    LossError,
    MemoryLimitError,
    OptimizerError,
    OutOfMemoryError,
    PrecisionError,
    ScaleCollapseError,
    SplitError,
    StateError,
    UnsupportedError,
    UsageError,
    WeightError,
    WindowError,
)

if TYPE_CHECKING:
    from accumulus import memory, testing
    from accumulus.equivalence.proof import check
    from accumulus.equivalence.report import EquivalenceReport
    from accumulus.grouping import by_tokens
    from accumulus.lookahead import windows
    from accumulus.memory.recover import recover_from_oom
    from accumulus.microbatch import by_count, to_device
    from accumulus.numerics.diagnosis import diagnose
    from accumulus.numerics.ranges import RangeWatch
    from accumulus.numerics.report import NumericsReport
    from accumulus.origin import Origin
    from accumulus.precision import Precision
    from accumulus.rng import random_state, set_random_state
    from accumulus.run.task import Task
    from accumulus.scaling import DynamicScale, NoScale, StaticScale
    from accumulus.step import TrainStep
    from accumulus.stream import Accumulator
    from accumulus.types import Choice, Loss, Metric, StepResult

__version__ = "0.1.0"

# Name to module. Importing torch takes a second, and `accumulus --help` must not: so a name is loaded on first use.
_HOMES = {
    "Accumulator": "stream",
    "Choice": "types",
    "DynamicScale": "scaling",
    "EquivalenceReport": "equivalence.report",
    "Loss": "types",
    "Metric": "types",
    "NoScale": "scaling",
    "NumericsReport": "numerics.report",
    "Origin": "origin",
    "Precision": "precision",
    "RangeWatch": "numerics.ranges",
    "StaticScale": "scaling",
    "StepResult": "types",
    "Task": "run.task",
    "TrainStep": "step",
    "by_count": "microbatch",
    "by_tokens": "grouping",
    "check": "equivalence.proof",
    "diagnose": "numerics.diagnosis",
    "memory": "memory",
    "random_state": "rng",
    "recover_from_oom": "memory.recover",
    "set_random_state": "rng",
    "testing": "testing",
    "to_device": "microbatch",
    "windows": "lookahead",
}

__all__ = [
    "Accumulator",
    "AccumulusError",
    "BatchError",
    "Choice",
    "CorruptStepError",
    "DynamicScale",
    "EquivalenceReport",
    "Loss",
    "LossError",
    "MemoryLimitError",
    "Metric",
    "NoScale",
    "NumericsReport",
    "OptimizerError",
    "Origin",
    "OutOfMemoryError",
    "Precision",
    "PrecisionError",
    "RangeWatch",
    "ScaleCollapseError",
    "SplitError",
    "StateError",
    "StaticScale",
    "StepResult",
    "Task",
    "TrainStep",
    "UnsupportedError",
    "UsageError",
    "WeightError",
    "WindowError",
    "by_count",
    "by_tokens",
    "check",
    "diagnose",
    "memory",
    "random_state",
    "recover_from_oom",
    "set_random_state",
    "testing",
    "to_device",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accumulus' has no attribute {name!r}")
    home = import_module(f"accumulus.{_HOMES[name]}")
    value = home if name == _HOMES[name] else getattr(home, name)  # `memory` and `testing` are modules themselves
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
