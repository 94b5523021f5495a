"""How long things may be: the tail is what makes code unreadable, so the tail is capped."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted(SOURCE.rglob("*.py"))


def functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def body_length(node):
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    lengths = sorted((body_length(node), f"{path.name}:{node.name}") for path, node in functions())
    assert lengths[-1][0] <= 45, lengths[-1]
    assert lengths[int(0.9 * len(lengths))][0] <= 30


def test_files_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 400, max(lengths, key=lengths.get)


def test_positional_parameters_are_few():
    for path, node in functions():
        positional = [a.arg for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls")]
        assert len(positional) <= 5, f"{path.name}:{node.lineno} {node.name}({', '.join(positional)})"


def test_classes_are_small():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                docs = [
                    n for n in ast.walk(node) if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(n)
                ]
                length = node.end_lineno - node.lineno + 1
                length -= sum(n.body[0].end_lineno - n.body[0].lineno + 1 for n in docs)
                assert length <= 200, f"{path.name}: {node.name} has {length} lines without docstrings"
                public = [m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
                assert len(public) <= 8, f"{path.name}: {node.name} has {public}"


def nesting(node, depth=0):
    """How deep blocks lie in blocks; an elif is no deeper than its if, and a function of its own starts anew."""
    deepest = depth
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and isinstance(child, ast.If) and len(value) == 1
            deeper = isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)) and not is_elif
            deepest = max(deepest, nesting(child, depth + deeper))
    return deepest


def test_nesting_is_shallow():
    for path, node in functions():
        assert nesting(node) <= 3, f"{path.name}:{node.lineno} {node.name}"
