"""Options from a frozen dataclass, through tyro; its complaints as one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from accumulus.errors import UsageError

Config = TypeVar("Config")

BOX = re.compile(r"\x1b\[[0-9;]*m|[│╭╰╮╯]")
"""Colours and the sides of a box."""

SUGGESTION = re.compile(r"Perhaps you meant:\W*(--[\w-]+)")


def parse(
    kind: type[Config],
    words: Sequence[str],
    *,
    verb: str,
    description: str,
    default: Config | None = None,
) -> Config:
    """Reads options.

    Args:
        kind: the dataclass whose fields are the options.
        words: the command line after the verb.
        verb: its name, for the help.
        description: what it does, for the help.
        default: holds what the options are without a word; by default the dataclass's own defaults.

    Returns:
        The options, not validated.

    Raises:
        UsageError: an unknown option, a missing or an unreadable value. One line.
        SystemExit: after `--help`.
    """
    complaint = io.StringIO()
    settings: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            options: Config = tyro.cli(
                kind, args=list(words), prog=f"accumulus {verb}", description=description, **settings
            )
            return options
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(one_line(complaint.getvalue(), verb)) from None


def one_line(complaint: str, verb: str) -> str:
    """What a boxed complaint says, as one line, and where to look further.

    Args:
        complaint: a box whose first paragraph, up to an empty line or a rule, is what went wrong.
        verb: whose help to point to.

    Returns:
        One line.
    """
    inside = [BOX.sub("", line).strip() for line in complaint.splitlines() if "╭" not in line]
    said: list[str] = []
    for line in inside:
        if not line or line.startswith("─"):
            break
        said.append(line)
    near = SUGGESTION.search(" ".join(inside))
    advice = f"; did you mean {near[1]}?" if near else ""
    return f"{' '.join(said).rstrip('.') or 'unreadable options'}{advice or ';'} see accumulus {verb} --help"
