"""Every error is caught by its type, and by the builtin that it is a kind of."""

from __future__ import annotations

import pytest

from accumulus import errors

BUILTINS = {"ValueError": ValueError, "RuntimeError": RuntimeError, "NotImplementedError": NotImplementedError}


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "AccumulusError"])
def test_the_tree_is_as_drawn(name):
    kind = getattr(errors, name)
    line = next(line for line in errors.__doc__.splitlines() if f" {name} (" in line)
    builtin = line.split("(")[1].split(")")[0]
    assert issubclass(kind, BUILTINS[builtin])
    assert issubclass(kind, errors.AccumulusError)
