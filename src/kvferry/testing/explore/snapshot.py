"""Copies of a runner with its machine, and keys of their state, made by walking their attributes.

Two runners with equal keys answer every event alike. The key has every attribute except those that
never influence an answer: counters, actions already returned, the ports, and when the runner would
tick, which the explorer decides. An object that is referenced twice stays one object, in the copy
and in the key. The order of dicts is part of the key, because machines take turns in that order.
Frozen structs, plans and functions are shared, not copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from kvferry.endpoint.runner.runner import Ports
from kvferry.plan.plan import Plan

T = TypeVar("T")

_SHARED = (
    *(int, float, str, bytes, type(None), Enum, msgspec.Struct, Plan, FunctionType, type),
    Ports,
)
_IRRELEVANT = frozenset({"counts", "actions", "ports", "_now", "_tick_at", "_shortest_timer_s"})


def copy_of(thing: T) -> T:
    """Return a runner or machine in the same state that shares nothing mutable with it."""
    copied = _copy(thing, {})
    assert type(copied) is type(thing)
    return copied


def key_of(thing: object) -> Hashable:
    """Return a key of the state that decides how a runner or machine answers."""
    return _key(thing, {})


@cache
def _is_shared(kind: Any) -> bool:
    return issubclass(kind, _SHARED)


def _is_container(kind: type) -> bool:
    return issubclass(kind, dict | list | deque | set)


def _attributes(value: object) -> list[str]:
    """Return the names of an instance's attributes, slots first."""
    slots = [
        name
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    ]
    return [*slots, *getattr(value, "__dict__", ())]


def _copy(value: Any, done: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if _is_shared(kind):
        return value
    if id(value) in done:
        return done[id(value)]
    if kind is tuple:
        return tuple(_copy(part, done) for part in value)
    new: Any = kind() if _is_container(kind) else object.__new__(kind)
    done[id(value)] = new
    if isinstance(value, dict):
        for name, part in value.items():
            new[_copy(name, done)] = _copy(part, done)
    elif isinstance(value, list | deque):
        new.extend(_copy(part, done) for part in value)
    elif isinstance(value, set):
        new.update(_copy(part, done) for part in value)
    else:
        for name in _attributes(value):
            setattr(new, name, _copy(getattr(value, name), done))
    return new


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    kind: Any = type(value)
    if _is_shared(kind):
        shared: Hashable = value
        return shared
    if kind is tuple:
        return tuple(_key(part, seen) for part in value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if not _is_container(kind):
        names = [name for name in _attributes(value) if name not in _IRRELEVANT]
        return (kind.__name__, *(_key(getattr(value, name), seen) for name in names))
    if isinstance(value, set):
        return tuple(sorted((_key(part, seen) for part in value), key=repr))
    parts = value.items() if isinstance(value, dict) else value
    return tuple(_key(part, seen) for part in parts)
