"""The data of the built-in task `bytes`: functions of the running Python's standard library, or the user's own text."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from accumulus.errors import UsageError

NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
)
NUM_HASH_BUCKETS = 1 << 32
MIN_PIECE_BYTES = 16
"""Shorter paragraphs are joined to the next one: a heading alone is hardly a sample."""


def load_texts(paths: Sequence[str | Path], *, max_length: int) -> list[bytes]:
    """Reads the samples.

    Args:
        paths: text files, or folders of them, that are cut into pieces (`.py` files into functions); none means
            the standard library's source.
        max_length: a sample is cut after so many bytes.

    Returns:
        Distinct non-empty samples, in an order that depends on the files' names and contents only.

    Raises:
        UsageError: a path is missing, cannot be read, holds no text, or is not UTF-8.

    Cost:
        About 2.5 seconds for the standard library.
    """
    if paths:
        pieces = (piece for path in paths for file in find_files(Path(path)) for piece in read_pieces(file, max_length))
    else:
        pieces = (function for file in library_files() for function in library_functions(file))
    samples = list(dict.fromkeys(sample for piece in pieces if (sample := piece[:max_length]).strip()))
    if not samples:
        where = ", ".join(map(str, paths)) if paths else sysconfig.get_path("stdlib")
        raise UsageError(f"no text found in {where}; give --data a file or a folder that holds some")
    return samples


def split_texts(samples: Iterable[bytes], *, heldout_ratio: float = 0.05) -> tuple[list[bytes], list[bytes]]:
    """Divides samples into training and held-out by a hash of each text.

    Equal texts fall on the same side, on every machine and in every order, and adding texts moves none.

    Args:
        samples: the texts.
        heldout_ratio: share of held-out samples, 0 to 1.

    Returns:
        Training samples and held-out samples. Where chance would leave one side of at least two samples empty,
        the sample nearest the border goes there.
    """
    ranked = [(stable_hash(sample), sample) for sample in samples]
    border = heldout_ratio * NUM_HASH_BUCKETS
    train = [sample for rank, sample in ranked if rank >= border]
    heldout = [sample for rank, sample in ranked if rank < border]
    if len(ranked) >= 2 and not heldout:
        nearest = min(ranked)[1]
        return [sample for sample in train if sample != nearest], [nearest]
    if len(ranked) >= 2 and not train:
        nearest = max(ranked)[1]
        return [nearest], [sample for sample in heldout if sample != nearest]
    return train, heldout


def stable_hash(text: bytes) -> int:
    """A number in [0, 2**32) that depends on the text only, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")


def library_files() -> list[Path]:
    """The standard library's own source files, without tests and without packages installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - NOT_LIBRARY)  # pruned here: site-packages can hold 100,000 files
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def library_functions(file: Path) -> list[bytes]:
    """The functions of one library file; none where it does not parse (some are written for another version)."""
    try:
        return list(functions_of(file.read_text("utf-8")))
    except (SyntaxError, ValueError, OSError):
        return []


def functions_of(source: str) -> Iterator[bytes]:
    """The source of every function and method that is not inside another function, without its indentation.

    Args:
        source: Python source.

    Yields:
        UTF-8 bytes of one function, decorators included.

    Raises:
        SyntaxError: it does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings are none of our business
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in outermost_functions(tree):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        yield textwrap.dedent("".join(lines[first : node.end_lineno])).encode()


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Walks statements only: expressions hold no `def`, and walking them would take most of the time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        elif isinstance(child, ast.stmt):
            yield from outermost_functions(child)


def find_files(path: Path) -> list[Path]:
    """The files that a `--data` path names.

    Args:
        path: a file or a folder.

    Returns:
        The file; or the folder's files that are not hidden, sorted by name.

    Raises:
        UsageError: nothing is there, or the folder holds no file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"--data {path}: no such file or folder; check the spelling")
    inside = sorted(found for found in path.rglob("*") if found.is_file())
    files = [file for file in inside if not is_hidden(file.relative_to(path))]
    if not files:
        raise UsageError(f"--data {path}: the folder holds no files; give a folder with text in it")
    return files


def is_hidden(path: Path) -> bool:
    """Whether a name on the way starts with a dot, or is Python's cache of compiled code."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def read_pieces(file: Path, max_length: int) -> list[bytes]:
    """Reads one of the user's files and cuts it.

    Args:
        file: a UTF-8 text file.
        max_length: a paragraph longer than this many bytes becomes several pieces.

    Returns:
        Functions of a `.py` file that has some; else paragraphs.

    Raises:
        UsageError: it cannot be read or is not text.
    """
    try:
        content = file.read_bytes()
        if b"\0" in content:
            raise UsageError(f"--data {file}: a binary file (byte 0 inside); give UTF-8 text")
        text = content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--data {file}: cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {file}: not UTF-8 text (byte {error.start}); convert it first") from None
    if file.suffix == ".py" and (functions := python_pieces(text)):
        return functions
    return [piece for paragraph in paragraphs(text) for piece in fixed_pieces(paragraph, max_length)]


def python_pieces(text: str) -> list[bytes]:
    """The functions of a `.py` file; none where it does not parse, so that it is then cut as text."""
    try:
        return list(functions_of(text))
    except (SyntaxError, ValueError):
        return []


def paragraphs(text: str) -> Iterator[bytes]:
    """Runs of lines between empty lines; very short ones together with what follows."""
    waiting = ""
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        waiting = f"{waiting}\n\n{paragraph}" if waiting else paragraph
        if len(waiting) >= MIN_PIECE_BYTES:
            yield waiting.encode()
            waiting = ""
    if waiting:
        yield waiting.encode()


def fixed_pieces(content: bytes, max_length: int) -> list[bytes]:
    """Cuts bytes into pieces of `max_length`; the last may be shorter."""
    return [content[start : start + max_length] for start in range(0, len(content), max_length)]
