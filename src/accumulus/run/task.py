"""`Task`: what every verb of the command line works on, by built-in name or from the user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from accumulus.errors import UsageError

BUILT_IN = {"bytes": "accumulus.run.bytes_task:bytes_task"}
"""Built-in names and where they are made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model, how to train it, and on what.

    Args:
        model: the module to train.
        optimizer: an optimizer over its parameters, or a function from the model to one. The function is the
            better choice: it runs after the model has moved to its device.
        loss_fn: `loss_fn(model, microbatch)`, as `TrainStep` takes it.
        train_data: a sequence of samples (`len` and indexing).
        eval_data: a sequence of held-out samples.
        collate: makes a micro-batch from a list of samples; `torch.utils.data.default_collate` without it.
        length: the length of a sample: batches are sorted by it, and `--microbatch 8192tokens` or `auto-tokens` counts
            by it.
        evaluate: `evaluate(model, eval_data)` gives held-out numbers by name, `"loss"` among them; without it
            the mean loss over `eval_data` is taken, exactly, whatever the pieces.
        sample: `sample(model)` gives a text that shows what the model can do, printed at the end.
        unit: what the loss's weight counts, in the plural.
        derived: numbers computed from a mean loss, by name: `{"bits_per_byte": lambda loss: loss / log(2)}`. They
            are recorded beside the loss, and the first one is shown in its place.

    Example:
        >>> import accumulus as acc, torch
        >>> def line() -> acc.Task:
        ...     inputs = torch.randn(64, 10)
        ...     return acc.Task(
        ...         model=torch.nn.Linear(10, 1),
        ...         optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        ...         loss_fn=lambda model, rows: torch.nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)),
        ...         train_data=list(inputs),
        ...     )
    """

    model: nn.Module
    optimizer: Any
    loss_fn: Callable[[Any, Any], Any]
    train_data: Sequence[Any]
    eval_data: Sequence[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    length: Callable[[Any], int] | None = None
    evaluate: Callable[[nn.Module, Sequence[Any]], Mapping[str, float]] | None = None
    sample: Callable[[nn.Module], str] | None = None
    unit: str = "samples"
    derived: Mapping[str, Callable[[float], float]] = field(default_factory=dict)


def load_task(spec: str, options: Mapping[str, Any] | None = None) -> Task:
    """Finds the function that makes a task, calls it and checks what it made.

    Args:
        spec: a built-in name, `path/to/file.py:function` or `package.module:function`.
        options: keyword arguments for the function, those the user gave; one it does not take is refused.

    Returns:
        The task.

    Raises:
        UsageError: nothing can be found under `spec`, it fails, or what it makes is not a usable `Task`. One line.
    """
    function = find_function(spec)
    task = call_function(spec, function, dict(options or {}))
    return check_task(spec, task)


def find_function(spec: str) -> Callable[..., Any]:
    """The function that a task's name stands for.

    Args:
        spec: as for `load_task`.

    Returns:
        The function, not yet called.

    Raises:
        UsageError: unknown name, file, module or function; or the file fails when it is run.
    """
    where, colon, name = BUILT_IN.get(spec, spec).rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"unknown task {spec!r}: give one of {', '.join(sorted(BUILT_IN))}, path/to/file.py:function "
            "or package.module:function"
        )
    try:
        module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except SyntaxError as error:
        raise UsageError(f"task {spec!r}: {where} line {error.lineno} does not parse: {error.msg}") from error
    except Exception as error:  # the user's file may raise anything at all
        raise UsageError(f"task {spec!r}: {where} cannot be imported: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        near = sorted(known for known, value in vars(module).items() if inspect.isfunction(value))
        raise UsageError(f"task {spec!r}: {where} has no function {name!r}; it has {', '.join(near) or 'none'}")
    return function  # type: ignore[no-any-return]  # callable() narrows to object


def load_file(path: Path) -> ModuleType:
    """Runs a Python file as a module; its folder is importable, as it is when Python runs the file itself."""
    if not path.is_file():
        raise UsageError(f"task file {path}: no such file; check the path")
    spec = importlib.util.spec_from_file_location(f"accumulus_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"task file {path}: Python cannot load it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def call_function(spec: str, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Calls a task's function with the options that the user gave.

    Args:
        spec: the task's name, for messages.
        function: what makes the task.
        options: keyword arguments.

    Returns:
        Whatever the function returns.

    Raises:
        UsageError: the function takes no such option, or it fails.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    refused = [] if takes_all else sorted(options.keys() - parameters.keys())
    if refused:
        flags = ", ".join("--" + name.replace("_", "-") for name in refused)
        raise UsageError(
            f"{flags} belongs to the built-in task, and the function of task {spec!r} has no such argument; its own "
            "arguments cannot be set from the command line yet, so give them defaults"
        )
    try:
        return function(**options)
    except UsageError:
        raise
    except Exception as error:  # as above
        raise UsageError(f"task {spec!r}: its function failed: {one_line(error)}") from error


def check_task(spec: str, task: Any) -> Task:
    """Refuses what cannot be trained, before anything is written.

    Args:
        spec: the task's name, for messages.
        task: what its function returned.

    Returns:
        The same.

    Raises:
        UsageError: it is not a `Task`, or a part of it cannot be used.
    """
    if not isinstance(task, Task):
        raise UsageError(f"task {spec!r}: its function must return an acc.Task, not {type(task).__name__}")
    if not isinstance(task.model, nn.Module):
        raise UsageError(f"task {spec!r}: model must be a torch.nn.Module, not {type(task.model).__name__}")
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise UsageError(f"task {spec!r}: the model has no parameter that requires a gradient")
    if not callable(task.loss_fn):
        raise UsageError(f"task {spec!r}: loss_fn must be a function, not {type(task.loss_fn).__name__}")
    for name in ("train_data", "eval_data"):
        data = getattr(task, name)
        if data is None and name == "eval_data":
            continue
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UsageError(f"task {spec!r}: {name} must be a sequence (len and []), not {type(data).__name__}")
        if len(data) == 0:
            raise UsageError(f"task {spec!r}: {name} is empty; give at least one sample")
    return task


def make_optimizer(spec: str, task: Task) -> Any:
    """The task's optimizer; made now where the task holds a function.

    Args:
        spec: the task's name, for messages.
        task: the task, its model already on its device.

    Returns:
        An optimizer.

    Raises:
        UsageError: there is none, or it cannot be made.
    """
    optimizer = task.optimizer
    if not hasattr(optimizer, "param_groups") and callable(optimizer):
        try:
            optimizer = optimizer(task.model)
        except Exception as error:  # the user's function
            raise UsageError(f"task {spec!r}: its optimizer cannot be made: {one_line(error)}") from error
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise UsageError(f"task {spec!r}: optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    return optimizer


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its text."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
