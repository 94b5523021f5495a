"""What a run is asked to do: frozen dataclasses that the command line is made from. No torch in here."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import tomli_w
import tyro

from accumulus.errors import UsageError
from accumulus.run.cut import AUTO, Cut

CONFIG_FILE = "config.toml"
DEFAULT_MINUTES = 1.2
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
TASK_OPTIONS = ("data", "max_length", "d_model", "num_layers", "num_heads")
NEEDS_LARGER_THAN_ZERO = ("batch_size", "steps", "minutes", "lr", "max_grad_norm", *TASK_OPTIONS[1:])
MAY_CHANGE_ON_RESUME = frozenset(
    {"steps", "minutes", "microbatch", "memory_limit", "num_evals", "plain", "compile", "device"}
)
"""What leaves the run's mathematics as it was: the law of the split is why `microbatch` is among them."""

# Options without a value of their own: the help shows their type alone, and their text says what holds instead.
Count: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Number: TypeAlias = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Name: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What training and benchmarking share.

    Sizes that are not given are the task's own.

    Raises:
        UsageError: from `validate`.
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = "bytes"
    """A built-in task (bytes), path/to/file.py:function or package.module:function."""

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH ...", help_behavior_hint="")] = ()
    """Text files or folders to learn from, in place of the standard library's source."""

    batch_size: int = 256
    """Samples that one optimizer step learns from; the last step of an epoch takes what is left."""

    microbatch: Annotated[str, tyro.conf.arg(metavar="INT")] = "32"
    """Samples that go through the model at a time. Changes memory and speed, never the result."""

    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer; inf never clips."""

    lr: Number = None
    """Peak learning rate. Default: the task's own."""

    seed: int = 0
    """Of the first parameters and of the order of the data."""

    device: str = "auto"
    """Where to train: auto (an accelerator where there is one), cpu, cuda, cuda:1, mps, ..."""

    max_length: Count = None
    """Samples are cut after so many bytes. Default: the task's own (bytes: 128)."""

    d_model: Count = None
    """Width of the model. Default: the task's own (bytes: 128)."""

    num_layers: Count = None
    """Blocks of the model. Default: the task's own (bytes: 2)."""

    num_heads: Count = None
    """Attention heads of a block. Default: the task's own (bytes: 2)."""

    def validate(self) -> None:
        """Refuses what cannot work, before anything is loaded.

        Raises:
            UsageError: a value is out of its bounds. The text names the flag, the value, the bound and the remedy.
        """
        for name in NEEDS_LARGER_THAN_ZERO:
            value = getattr(self, name, None)
            if value is not None and not value > 0:
                raise UsageError(f"{flag(name)} {value} must be larger than 0")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed} must fit 64 bits")
        if self.lr is not None and not math.isfinite(self.lr):
            raise UsageError(f"--lr {self.lr} must be a finite number; 0.005 is a start")

    def task_options(self) -> dict[str, Any]:
        """Those options of the task itself that were given."""
        given = {name: getattr(self, name) for name in TASK_OPTIONS}
        return {name: value for name, value in given.items() if value not in (None, ())}

    def given_words(self, names: Iterable[str]) -> list[str]:
        """What to write on the command line for options that are not as they are without a word.

        Args:
            names: of the options to write.

        Returns:
            The words, the task first.
        """
        defaults = {field.name: field.default for field in fields(self)}
        words = [] if self.task == TaskConfig.task else [self.task]
        for name in names:
            value = getattr(self, name)
            if name != "task" and value != defaults[name]:
                shown = value if isinstance(value, tuple) else () if value is True else (str(value),)
                words += [flag(name), *shown]
        return words

    def to_toml(self) -> str:
        """The configuration as TOML; what is None is left out and is None again when read."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return tomli_w.dumps({key: value for key, value in plain.items() if value is not None})

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Reads what `to_toml` wrote.

        Args:
            text: TOML.

        Returns:
            An equal configuration.

        Raises:
            UsageError: it is not TOML, or holds a name that no option has.
        """
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"not a configuration: {error}") from None
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise UsageError(f"unknown options in the configuration: {', '.join(unknown)}; remove them")
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TaskConfig):
    """Options of `accumulus train`.

    Example:
        >>> config = TrainConfig(steps=10, lr=0.01)
        >>> TrainConfig.from_toml(config.to_toml()) == config
        True
    """

    microbatch: Annotated[str, tyro.conf.arg(metavar="auto|INT|INTtokens|auto-tokens")] = AUTO
    """What goes through the model at a time: so many samples, or so many tokens, samples of similar length together;
    auto and auto-tokens find in the first steps what fits and is fast, and survive running out of memory. Memory and
    speed depend on it, and of the result only the last bits; auto depends on timing, so give a number, as the run
    shows at its end, to repeat a run exactly."""

    memory_limit: Annotated[str, tyro.conf.arg(metavar="8GiB|auto")] = AUTO
    """With --microbatch auto: what training may take. auto: nine tenths of what is there."""

    precision: str = "auto"
    """auto (what this device does fast), fp32, tf32, bf16 or fp16."""

    warmup: int = 10
    """Steps over which the learning rate rises from zero."""

    steps: Count = None
    """Steps to train. The learning rate then depends on the step alone, so that with a number for --microbatch the
    run can be repeated exactly."""

    minutes: Number = None
    """Time to train, held-out measurements included; with --steps, whichever ends first. Default: 1.2 where
    --steps is not given."""

    num_evals: int = 10
    """Held-out measurements, evenly spread over the run, besides the one before the first step."""

    out: Name = None
    """The run folder. Default: runs/TASK-DATE-TIME."""

    resume: Name = None
    """A run folder to go on with; its options hold, and only --steps, --minutes, --microbatch, --memory-limit,
    --num-evals, --device, --compile and --plain may be changed."""

    compile: Switch = False
    """Compile the model with torch.compile: a slow start, then faster steps."""

    plain: Switch = False
    """Plain lines instead of a progress bar; always so where the output is not a terminal."""

    def validate(self) -> None:
        """As `TaskConfig.validate`."""
        super().validate()
        self.cut()
        if self.precision not in PRECISIONS:
            raise UsageError(f"--precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        if self.warmup < 0 or self.num_evals < 0:
            name = "warmup" if self.warmup < 0 else "num_evals"
            raise UsageError(f"{flag(name)} {getattr(self, name)} must be at least 0")
        if self.minutes is not None and not math.isfinite(self.minutes):
            raise UsageError(f"--minutes {self.minutes} must be finite; leave it out and give --steps instead")
        if self.memory_limit != AUTO and self.cut().size is not None:
            raise UsageError(
                f"--memory-limit {self.memory_limit} is for --microbatch auto, and --microbatch {self.microbatch} is "
                "used as it is; leave one of them at auto"
            )

    def cut(self) -> Cut:
        """How batches are cut.

        Returns:
            What `--microbatch` asks for, of at most as many samples as a batch has.

        Raises:
            UsageError: it cannot be read.
        """
        return Cut.parse(self.microbatch).within(self.batch_size)

    def limits(self) -> tuple[int | None, float | None]:
        """Steps and seconds after which the run ends; at least one of them is a number."""
        if self.steps is None and self.minutes is None:
            return None, DEFAULT_MINUTES * 60
        return self.steps, None if self.minutes is None else self.minutes * 60

    def repeat_words(self, *, microbatch: str, num_steps: int) -> list[str]:
        """What to write after `accumulus train` for a run like this one that comes out the same every time.

        Args:
            microbatch: a size, as `--microbatch` takes it.
            num_steps: the steps of this run, where time limited it.

        Returns:
            The task and the options that were given, without the folder.
        """
        steps = self.steps if self.limits()[1] is None else num_steps
        config = replace(self, microbatch=microbatch, memory_limit=AUTO, steps=steps, minutes=None)
        leave_out = {"resume", "out", "plain"}
        return config.given_words(field.name for field in fields(self) if field.name not in leave_out)

    def stored(self) -> TrainConfig:
        """The configuration as it goes into the run folder: it does not name itself, and can be used from anywhere."""
        where, colon, function = self.task.rpartition(":")
        task = f"{Path(where).absolute()}:{function}" if colon and where.endswith(".py") else self.task
        data = tuple(str(Path(path).absolute()) for path in self.data)
        return replace(self, resume=None, out=None, task=task, data=data)


def read_config(run_folder: str | Path) -> TrainConfig:
    """The configuration of an earlier run.

    Args:
        run_folder: what that run wrote to.

    Returns:
        Its options.

    Raises:
        UsageError: no run is there, or its configuration cannot be read.
    """
    path = Path(run_folder) / CONFIG_FILE
    try:
        return TrainConfig.from_toml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"--resume {run_folder}: no {CONFIG_FILE} there; give the folder of a run") from None
    except UsageError as error:
        raise UsageError(f"--resume {run_folder}: {error}") from None


def check_resumed(before: TrainConfig, now: TrainConfig) -> None:
    """Refuses to go on with a run as if it had been another.

    Args:
        before: what the run was started with.
        now: what it is to go on with.

    Raises:
        UsageError: an option differs that the steps already made depend on.
    """
    for name, value in changed_options(before.stored(), now.stored()).items():
        if name not in MAY_CHANGE_ON_RESUME | {"resume", "out"}:
            was = getattr(before, name)
            raise UsageError(
                f"--resume goes on with the run as it was: {flag(name)} was {was} and cannot become {value}; "
                "leave it out, or start a new run"
            )


def changed_options(before: TrainConfig, now: TrainConfig) -> Mapping[str, Any]:
    """Options that differ, by name, with their new values."""
    names = [field.name for field in fields(before)]
    return {name: getattr(now, name) for name in names if getattr(before, name) != getattr(now, name)}


def check_precisions(names: Sequence[str], option: str = "precisions") -> None:
    """Refuses precisions that are unknown, and none at all.

    Args:
        names: what the option gave.
        option: its name.

    Raises:
        UsageError: see above.
    """
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or not names:
        shown = ", ".join(map(repr, unknown)) or "nothing"
        raise UsageError(f"{flag(option)}: {shown} is unknown; use some of {', '.join(PRECISIONS)}")


def check_file(name: str, path: str | None) -> None:
    """Refuses a file that cannot be made, before the work whose outcome it is to hold.

    Args:
        name: the option.
        path: its value; None where it was not given.

    Raises:
        UsageError: there is no such folder, or the file is itself a folder.
    """
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{flag(name)} {path}: its folder does not exist; make it first")
    if Path(path).is_dir():
        raise UsageError(f"{flag(name)} {path} is a folder; give a file in it")


def flag(name: str) -> str:
    """A field's name as the command line writes it."""
    return "--" + name.replace("_", "-")
