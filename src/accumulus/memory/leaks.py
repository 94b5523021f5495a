"""Fake tensors that outlived the run they were made for, in a cache of the user's: found, and taken out of it.

A function under `functools.lru_cache`, or a dict beside a model, that is first filled in a run on fake tensors would
hand these to the training that follows, which cannot compute with them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

__all__ = ["take_out_leaked"]

CACHED = type(functools.lru_cache(lambda: None))

DEPTH = 3
"""Of tuples, lists and dicts in a cache, as a function that returns cosines and sines makes them."""


def take_out_leaked(modes: Sequence[Any]) -> int:
    """Clears the caches and deletes the entries of dicts that hold fake tensors, after runs on such.

    Args:
        modes: those that the fake tensors were made by; others are not ours.

    Returns:
        How many fake tensors are held elsewhere, as in a variable, and stay.

    Cost:
        Two garbage collections and a walk over all objects: about a tenth of a second.
    """
    leaked = _left_of(modes)
    if not leaked:
        return 0
    while leaked:
        _take_out(leaked.pop(), DEPTH)
    return len(_left_of(modes))


def _left_of(modes: Sequence[Any]) -> list[Any]:
    from torch._subclasses import FakeTensor

    gc.collect()
    fakes = [thing for thing in gc.get_objects() if type(thing) is FakeTensor]
    return [fake for fake in fakes if any(fake.fake_mode is mode for mode in modes)]


def _take_out(value: Any, depth: int) -> None:
    for holder in gc.get_referrers(value):
        if isinstance(holder, CACHED):
            holder.cache_clear()
        elif isinstance(holder, dict):
            if "__builtins__" in holder:  # a module's variables: without them its code would fail
                continue
            for key in [key for key, held in holder.items() if held is value]:
                del holder[key]
        elif type(holder) in (tuple, list) and depth:
            _take_out(holder, depth - 1)
