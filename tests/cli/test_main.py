import subprocess
import sys
import time

import pytest

import accumulus
from accumulus.cli.main import VERBS, main
from accumulus.errors import UsageError

from .test_train import TASK


def run(*words, **options):
    return subprocess.run([sys.executable, "-m", "accumulus", *words], capture_output=True, text=True, **options)


def test_help_is_fast_and_needs_no_torch():
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        shown = run("--help")
        seconds.append(time.perf_counter() - started)
        assert shown.returncode == 0
        assert all(verb in shown.stdout for verb in VERBS)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_needs_no_torch(verb):
    code = f"""
import sys
from accumulus.cli.main import main
try:
    main([{verb!r}, "--help"])
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert f"usage: accumulus {verb}" in shown.stdout
    assert "--microbatch" in shown.stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert accumulus.__version__ in capsys.readouterr().out


def test_no_words_show_the_help(capsys):
    assert main([]) == 0
    assert "usage" in capsys.readouterr().out


def make_bad_paths(folder):
    (folder / "empty").mkdir()
    (folder / "binary.bin").write_bytes(b"\x7fELF\0\0")
    (folder / "blank.txt").write_text("\n\n")
    (folder / "file").write_text("text")
    (folder / "earlier").mkdir()
    (folder / "earlier" / "config.toml").write_text("")
    (folder / "mine.py").write_text(TASK)
    (folder / "broken.py").write_text("def task(:\n")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tarin", "did you mean train?"),
        ("fly", "use one of train, plan, "),
        ("train --data missing.txt", "missing.txt: no such file or folder"),
        ("train --data empty", "holds no files"),
        ("train --data binary.bin", "binary"),
        ("train --data blank.txt", "no text found"),
        ("train --precision fp12", "use one of auto, fp32, tf32, bf16, fp16"),
        ("train --batch-size 0", "--batch-size 0 must be larger than 0"),
        ("train --microbatch -4", "--microbatch -4 must be larger than 0"),
        ("train --microbatch 0tokens", "--microbatch 0tokens must be larger than 0"),
        ("train --microbatch half", "--microbatch 'half' must be a number of samples, such as 32, a number of tokens"),
        ("train --memory-limit lots", "--memory-limit lots: an amount of memory is a number and a unit"),
        ("train --microbatch 8 --memory-limit 1GiB", "--memory-limit 1GiB is for --microbatch auto"),
        ("train mine.py:task --microbatch 512tokens", "task 'mine.py:task' does not say how long a sample is"),
        ("train mine.py:task --microbatch auto-tokens", "give its acc.Task a length="),
        ("bench --microbatch auto", "--microbatch 'auto' must be a number of samples"),
        ("bench --microbatch 512tokens", "--microbatch '512tokens' must be a number of samples"),
        ("plan --microbatch 512tokens", "--microbatch '512tokens' must be a number of samples"),
        ("train --d-model -1", "--d-model -1 must be larger than 0"),
        ("train --data file --d-model 10", "must be a multiple of twice"),
        ("train --steps 0", "--steps 0 must be larger than 0"),
        ("train --steps many", "--steps"),
        ("train --out file/run --data file", "cannot be written"),
        ("train --out file", "is a file"),
        ("train --out earlier", "holds another run"),
        ("train --resume nowhere", "give the folder of a run"),
        ("train --precison bf16", "did you mean --precision?"),
        ("train --nothing-like-it", "Unrecognized options: --nothing-like-it"),
        ("train --batch-size", "Missing value for argument '--batch-size'"),
        ("train bites", "unknown task 'bites'"),
        ("train broken.py:task", "does not parse"),
        ("train missing.py:task", "no such file"),
        ("train --device toaster", "--device toaster cannot be used"),
        ("bench --microbatch 0", "--microbatch 0 must be larger than 0"),
        ("bench --precisions fp12", "'fp12' is unknown"),
        ("bench --json nowhere/x.json", "its folder does not exist"),
        ("bench --steps 0", "--steps 0"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(line, told, tmp_path, monkeypatch, capsys):
    make_bad_paths(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accumulus: ")
    assert shown.err.count("\n") == 1
    assert told in shown.err
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def test_exit_code_and_stderr_of_the_process():
    shown = run("tarin")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("one\n  line"), 2, "accumulus: one line\n"),
        (accumulus.ScaleCollapseError("it\nfell"), 1, "accumulus: it fell\n"),
        (ValueError("bad"), 1, "accumulus: ValueError: bad (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "accumulus: stopped at once; nothing was saved since the last state.pt\n"),
    ],
)
def test_errors_become_exit_codes(monkeypatch, capsys, error, code, told):
    def fail(words):
        raise error

    monkeypatch.setattr("accumulus.cli.bench.run", fail)
    assert main(["bench"]) == code
    assert capsys.readouterr().err == told


def test_debug_shows_the_traceback(monkeypatch, capsys):
    assert main(["--debug", "tarin"]) == 2
    assert "Traceback" in capsys.readouterr().err
