"""Every error this library raises on purpose, as one tree to catch from.

::

    AccumulusError
    ├── BatchError (ValueError)            the batch cannot be cut: no tensors, unequal lengths, an unknown type
    ├── SplitError (ValueError)            the micro-batch size asked for cannot be used
    ├── LossError (ValueError)             what the loss function returned is not a loss, or has no graph
    ├── WeightError (ValueError)           weights that are negative, NaN, all zero, or unknown where they must be known
    ├── PrecisionError (ValueError)        an unknown precision, or parameters that do not fit it
    ├── OptimizerError (ValueError)        an optimizer that does not fit the model or cannot be driven
    ├── StateError (ValueError)            a saved state that does not belong to what loads it
    ├── MemoryLimitError (ValueError)      an amount of memory that cannot be read, or a device that is not known
    ├── UsageError (ValueError)            bad input to the command line: one line, exit code 2
    ├── WindowError (RuntimeError)         a step that cannot start: one is already running, or gradients lie about
    ├── OutOfMemoryError (RuntimeError)    one sample alone does not fit in memory
    ├── CorruptStepError (RuntimeError)    an error in the middle of the update; parameters are not to be trusted
    ├── ScaleCollapseError (RuntimeError)  too many non-finite steps in a row; training has stopped
    └── UnsupportedError (NotImplementedError)  a combination that is not built; the text says what to use instead

Each message gives the value, the bound and the remedy. Catch by type; the texts may change.
"""

__all__ = [
    "AccumulusError",
    "BatchError",
    "CorruptStepError",
    "LossError",
    "MemoryLimitError",
    "OptimizerError",
    "OutOfMemoryError",
    "PrecisionError",
    "ScaleCollapseError",
    "SplitError",
    "StateError",
    "UnsupportedError",
    "UsageError",
    "WeightError",
    "WindowError",
]


class AccumulusError(Exception):
    """The root of the tree: catches everything this library raises on purpose, and nothing else."""


class BatchError(AccumulusError, ValueError):
    """The batch cannot be cut: no tensors, tensors of unequal first dimension, or a type that is not known."""


class SplitError(AccumulusError, ValueError):
    """The micro-batch size asked for cannot be used."""


class LossError(AccumulusError, ValueError):
    """What the loss function returned is not a loss, or no gradient can flow from it."""


class WeightError(AccumulusError, ValueError):
    """A weight is negative, NaN or not a scalar; or all are zero; or the terms' totals must be known and are not."""


class PrecisionError(AccumulusError, ValueError):
    """The precision is unknown, or the model's parameters do not fit it."""


class OptimizerError(AccumulusError, ValueError):
    """The optimizer holds none of the model's parameters, or cannot be driven by a gradient that is already there."""


class StateError(AccumulusError, ValueError):
    """A saved state does not belong to the object that loads it."""


class MemoryLimitError(AccumulusError, ValueError):
    """An amount of memory cannot be read, or the memory of a device is not known."""


class UsageError(AccumulusError, ValueError):
    """Bad input to the command line. The text is the one line that the user sees; the exit code is 2."""


class WindowError(AccumulusError, RuntimeError):
    """A step cannot start or go on: another is running, or gradients from elsewhere are already there."""


class OutOfMemoryError(AccumulusError, RuntimeError):
    """One sample alone does not fit in memory. Parameters are untouched."""


class CorruptStepError(AccumulusError, RuntimeError):
    """An error in the middle of the optimizer's in-place update. Parameters are not to be trusted: load them anew."""


class ScaleCollapseError(AccumulusError, RuntimeError):
    """Too many steps in a row were non-finite. Parameters are as after the last applied step."""


class UnsupportedError(AccumulusError, NotImplementedError):
    """The combination is not built. The text says what to use instead."""
