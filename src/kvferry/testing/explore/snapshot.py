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


@cache
def _is_container(kind: Any) -> bool:
    return issubclass(kind, dict | list | deque | set)


@cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class."""
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


def _attributes(value: Any) -> dict[str, Any]:
    """Return an instance's attributes by name, slots first."""
    others: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slots_of(value.__class__)
    if not slots:
        return others
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | others


def _copy(value: Any, done: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if _is_shared(kind):
        return value
    if id(value) in done:
        return done[id(value)]
    if kind is tuple:
        return tuple([_copy(part, done) for part in value])
    new: Any = kind() if _is_container(kind) else object.__new__(kind)
    done[id(value)] = new
    if not _is_container(kind):
        # Most attributes are shared, and calling this function for each would take longer.
        for name, part in _attributes(value).items():
            setattr(new, name, part if _is_shared(part.__class__) else _copy(part, done))
    elif isinstance(value, dict):
        for name, part in value.items():
            new[_copy(name, done)] = _copy(part, done)
    elif isinstance(value, set):
        new.update([_copy(part, done) for part in value])
    else:
        new.extend([_copy(part, done) for part in value])
    return new


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    kind: Any = type(value)
    if _is_shared(kind):
        shared: Hashable = value
        return shared
    if kind is tuple:
        return tuple([_key(part, seen) for part in value])
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if not _is_container(kind):
        keys = [
            part if _is_shared(part.__class__) else _key(part, seen)
            for name, part in _attributes(value).items()
            if name not in _IRRELEVANT
        ]
        return (kind.__name__, *keys)
    if isinstance(value, set):
        return tuple(sorted((_key(part, seen) for part in value), key=repr))
    parts = value.items() if isinstance(value, dict) else value
    return tuple([_key(part, seen) for part in parts])
