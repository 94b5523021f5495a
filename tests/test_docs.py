"""The code on the first page and in docs/ runs as printed, and says what it claims."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block):
    exec(compile(block, "block", "exec"), {})


def test_code_comes_before_line_30():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert next(i for i, line in enumerate(lines) if line.startswith("```")) < 30


def test_the_two_commands_come_first():
    text = (ROOT / "README.md").read_text()
    consoles = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    assert re.findall(r"^\$ (make \w+)", consoles[0], re.M) == ["make train", "make test"]


@pytest.mark.parametrize(
    "name",
    [
        "equivalence.proof",
        "equivalence.report",
        "grouping",
        "memory.capacity",
        "memory.estimate",
        "memory.live",
        "memory.recover",
        "memory.tune",
        "microbatch",
        "numerics.diagnosis",
        "numerics.ranges",
        "precision",
        "scaling",
        "step",
        "testing",
        "types",
    ],
)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"accumulus.{name}")
    with torch.random.fork_rng():
        failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert tried > 0
    assert failed == 0


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_is_what_was_measured():
    """The README's figures come out of the last `make bench`."""
    done = subprocess.run(
        [sys.executable, "-c", "import json, run_all; print(run_all.table(json.loads(run_all.RESULTS.read_text())))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "benchmarks",
    )
    assert done.stdout.strip() in (ROOT / "README.md").read_text()


def test_the_plain_loops_error_in_the_readme():
    sys.path.insert(0, str(ROOT / "examples"))
    import plain_loop

    claimed = re.search(r"off by (\d+) %", (ROOT / "README.md").read_text())
    assert claimed
    assert round(100 * plain_loop.compare((7, 5, 3, 1))["plain"]) == int(claimed[1])


def test_every_verb_of_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    for verb in set(re.findall(r"^\$ accumulus (\w+)", text, re.M)):
        assert (ROOT / "src" / "accumulus" / "cli" / f"{verb}.py").exists()


def test_the_layer_table_names_every_layer():
    from .test_layers import LAYERS

    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in LAYERS:
        assert name == "__main__" or f"`{name}" in text, name
