"""Imports only go down. The table of docs/architecture.md as data; a violation names the offending import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "accumulus"

LAYERS = {
    "errors": 0,
    "host": 0,
    "types": 0,
    "pytree": 0,
    "units": 0,
    "dist": 1,
    "tally": 1,
    "terms": 1,
    "guard": 1,
    "norm": 1,
    "together": 1,
    "lengths": 1,
    "trim": 1,
    "precision": 2,
    "scaling": 2,
    "microbatch": 2,
    "grouping": 2,
    "window": 2,
    "lookahead": 2,
    "update": 2,
    "ledger": 3,
    "whereabouts": 3,
    "origin": 3,
    "collapse": 3,
    "rng": 3,
    "engine": 3,
    "step": 3,
    "stream": 3,
    "memory": 4,
    "equivalence": 4,
    "testing": 4,
    "numerics": 4,
    "run": 5,
    "cli": 6,
    "__main__": 7,
}

MAY_IMPORT_EACH_OTHER = {
    ("grouping", "microbatch"),  # a rule that groups hands over what micro-batches follow: docs/decisions/0008
    ("ledger", "scaling"),
    ("engine", "ledger"),  # engine.py puts the parts together, and both forms stand on it
    ("step", "engine"),
    ("step", "collapse"),
    ("step", "origin"),
    ("origin", "whereabouts"),
    ("stream", "engine"),
    ("stream", "rng"),
    ("equivalence", "memory"),  # a batch that does not fit is halved, and memory/failure.py tells what that looks like
    ("testing", "equivalence"),
}

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def place(module: str) -> str:
    return module.removeprefix("accumulus").lstrip(".").split(".")[0]


def imports(path: Path) -> list[str]:
    """Every module of ours that a file imports, inside functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} is a relative import"
            module = node.module or ""
            found += [f"{module}.{alias.name}" for alias in node.names] if module == "accumulus" else [module]
    return [module for module in found if module == "accumulus" or module.startswith("accumulus.")]


def test_every_file_has_a_layer():
    assert {place(f"accumulus.{'.'.join(path.relative_to(SOURCE).with_suffix('').parts)}") for path in FILES} == set(
        LAYERS
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    own = place("accumulus." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for module in imports(path):
        other = place(module)
        if other in ("", own):
            continue
        if other not in LAYERS:
            assert LAYERS[own] >= 5, f"{own} imports the public name {module}: only run/ and cli/ may"
            continue
        down = LAYERS[other] < LAYERS[own] or (LAYERS[own] <= 1 and LAYERS[other] <= LAYERS[own])
        assert down or (own, other) in MAY_IMPORT_EACH_OTHER, f"{path.name} (layer {LAYERS[own]}) imports {module}"


@pytest.mark.parametrize("path", [p for p in FILES if "run" in p.parts], ids=lambda path: path.name)
def test_run_uses_the_public_api_only(path):
    import accumulus

    for module in imports(path):
        other = place(module)
        public = other in accumulus.__all__ or other in ("", "__version__")
        # torchrun's environment has one reader, which the command line needs before torch is loaded.
        assert public or other in ("errors", "units", "run") or module == "accumulus.dist.process", (
            f"{path.name} imports {module}, which is not public"
        )


def test_no_cycle():
    graph = {}
    for path in FILES:
        name = "accumulus." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        graph[name.removesuffix(".__init__")] = [module for module in imports(path) if module != "accumulus"]
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in graph and name not in done:
            for module in graph[name]:
                visit(module, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
