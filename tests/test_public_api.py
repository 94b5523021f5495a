"""`__all__` is what is exposed, every public name is documented, and importing does nothing."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import accumulus as acc


def public_values():
    """The public names, and those of public modules."""
    for name in acc.__all__:
        value = getattr(acc, name)
        yield name, value
        if inspect.ismodule(value):
            yield from ((f"{name}.{inner}", getattr(value, inner)) for inner in value.__all__)


def public_functions():
    for name, value in public_values():
        if inspect.ismodule(value):
            continue
        if not inspect.isclass(value):
            yield name, value
            continue
        if issubclass(value, Exception):
            continue
        yield name, value
        for attribute, member in vars(value).items():
            if attribute == "__call__" or not attribute.startswith("_"):
                function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                if inspect.isfunction(function):
                    yield f"{name}.{attribute}", function


def test_all_is_sorted_and_exposed():
    assert acc.__all__ == sorted(acc.__all__)
    assert dir(acc) == sorted([*acc.__all__, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        acc.nothing  # noqa: B018


def test_every_error_is_exposed():
    from accumulus import errors

    assert set(errors.__all__) <= set(acc.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(acc, name), acc.AccumulusError)
        assert name in (errors.__doc__ or ""), f"{name} is not drawn in the tree"


@pytest.mark.parametrize(("name", "value"), list(public_values()), ids=lambda v: v if isinstance(v, str) else "")
def test_every_public_name_has_a_docstring(name, value):
    assert (value.__doc__ or "").strip()


def test_public_modules_expose_what_they_list():
    modules = [value for _, value in public_values() if inspect.ismodule(value)]
    assert modules == [acc.memory, acc.testing]
    for module in modules:
        assert module.__all__ == sorted(module.__all__)
        assert not any(inspect.ismodule(getattr(module, name)) for name in module.__all__)


@pytest.mark.parametrize(("name", "value"), list(public_functions()), ids=lambda v: v if isinstance(v, str) else "")
def test_docstrings_are_contracts(name, value):
    doc = inspect.getdoc(value) or ""
    signature = inspect.signature(value)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    for parameter in parameters:
        assert re.search(rf"^\s+{parameter.name}: ", doc, re.M), (
            f"{name} does not describe {parameter.name!r} under Args"
        )
    if inspect.isfunction(value) and signature.return_annotation not in (None, "None", inspect.Signature.empty):
        assert "Returns:" in doc, f"{name} does not say what it returns"
    raised = re.findall(r"raise (\w+Error)", inspect.getsource(value)) if inspect.isfunction(value) else []
    for error in raised:
        assert error in doc, f"{name} raises {error} and does not say so"


@pytest.mark.parametrize(("name", "value"), list(public_functions()), ids=lambda v: v if isinstance(v, str) else "")
def test_everything_public_is_annotated(name, value):
    function = value.__init__ if inspect.isclass(value) else value
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.name in ("self", "cls") or parameter.annotation is not inspect.Parameter.empty, (
            f"{name}({parameter})"
        )


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_does_nothing():
    heavy = "[m for m in ('torch', 'numpy', 'rich', 'tyro') if m in sys.modules]"
    assert run(f"import sys, accumulus; print({heavy})") == "[]"
    assert run("import accumulus.step, accumulus.window") == ""
