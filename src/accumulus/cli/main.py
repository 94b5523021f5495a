"""`accumulus VERB [TASK] [options]`: finds the verb, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

import accumulus
from accumulus.errors import AccumulusError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

VERBS = {
    "train": "trains a task: progress, records, held-out measurements, Ctrl-C saves and --resume goes on",
    "plan": "peak memory by precision and micro-batch before anything runs; what fits, and what to choose",
    "check": "proves that accumulation gives the whole batch's update on this task, or names what is in the way",
    "doctor": "what low precision does to the numbers: ranges, loss scale, first bad operator, dtypes, advice",
    "bench": "the same task in fp32, bf16 and fp16, accumulated and whole, beside a plain loop",
}

HELP = """\
accumulus {version}: ask for the batch you want; get exactly its gradient.

usage: accumulus VERB [TASK] [options]

verbs:
{verbs}

TASK is a built-in name (bytes: the default), path/to/file.py:function or package.module:function.
--debug shows tracebacks; accumulus VERB --help lists a verb's options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the words after `accumulus`; by default those of this process.

    Returns:
        The exit code: 0 done, 1 the work failed, 2 bad input, 128 plus the number of the signal that stopped it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(version=accumulus.__version__, verbs=verb_lines()), end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"accumulus {accumulus.__version__}")
        return 0
    return guarded(lambda: find_verb(words[0])(words[1:]), debug=debug)


def verb_lines() -> str:
    """The verbs as the help shows them."""
    return "\n".join(f"  {name:<8}{text}" for name, text in VERBS.items())


def find_verb(name: str) -> Callable[[list[str]], int]:
    """The function that runs a verb.

    Args:
        name: the first word.

    Returns:
        It takes the other words and returns the exit code.

    Raises:
        UsageError: there is no such verb.
    """
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(VERBS)}"
        raise UsageError(f"unknown verb {name!r}; {advice}")
    run: Callable[[list[str]], int] = import_module(f"accumulus.cli.{name}").run
    return run


def guarded(work: Callable[[], int], *, debug: bool) -> int:
    """Runs a verb; what it raises becomes one line on standard error.

    Args:
        work: the verb.
        debug: show the traceback first.

    Returns:
        The exit code.
    """
    try:
        return work()
    except KeyboardInterrupt:
        print("accumulus: stopped at once; nothing was saved since the last state.pt", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # the one place where everything that went wrong becomes a sentence
        if debug:
            traceback.print_exc()
        print(f"accumulus: {sentence(error, debug=debug)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def sentence(error: Exception, *, debug: bool) -> str:
    """An error as one line: ours as they are, others with their type and how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, AccumulusError):
        return text
    more = "" if debug else " (--debug shows where)"
    return f"{type(error).__name__}: {text}{more}"
