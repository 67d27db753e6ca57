"""Copies of a runner with its machine, and keys of their state, by walking what they hold.

Two with equal keys answer every event alike, because the key is made of everything that
they have except what is never read again: counters, the cache of plans, the actions that
were handed out, the ports, and when the runner would tick, which the world decides here.
Objects that something refers to twice stay one object, in the copy as in the key. The
order of dicts is part of the key, since machines take turns in that order.

Frozen structs, plans and functions are shared and never copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from kvferry.endpoint.runner.runner import SourcePorts, TargetPorts
from kvferry.plan.plan import Plan

T = TypeVar("T")

_SHARED = (
    *(int, float, str, bytes, type(None), Enum, msgspec.Struct, Plan, FunctionType, type),
    *(SourcePorts, TargetPorts),
)
_UNREAD = frozenset(
    {"counts", "_plans", "actions", "ports", "_now", "_tick_at", "_shortest_timer_s"}
)
_shared_types: dict[type, bool] = {}


def copy_of(thing: T) -> T:
    """A runner or a machine in the same state that shares nothing mutable with it."""
    copied = _copy(thing, {})
    assert type(copied) is type(thing)
    return copied


def key_of(thing: object) -> Hashable:
    """What decides how it will answer. Equal keys, equal answers."""
    return _key(thing, {})


def _is_shared(kind: type) -> bool:
    known = _shared_types.get(kind)
    if known is None:
        known = _shared_types[kind] = issubclass(kind, _SHARED)
    return known


def _is_plain(kind: type) -> bool:
    return not issubclass(kind, dict | list | deque | set)


def _fields(value: object) -> list[str]:
    """Names of everything that an instance has, in the order its classes give them."""
    slots = [
        name
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    ]
    return [*slots, *getattr(value, "__dict__", ())]


def _copy(value: Any, done: dict[int, Any]) -> Any:
    kind = type(value)
    if _is_shared(kind):
        return value
    if id(value) in done:
        return done[id(value)]
    if kind is tuple:
        return tuple(_copy(part, done) for part in value)
    new: Any = object.__new__(kind) if _is_plain(kind) else kind()
    done[id(value)] = new
    if isinstance(value, dict):
        for name, part in value.items():
            new[_copy(name, done)] = _copy(part, done)
    elif isinstance(value, list | deque):
        new.extend(_copy(part, done) for part in value)
    elif isinstance(value, set):
        new.update(_copy(part, done) for part in value)
    else:
        for name in _fields(value):
            setattr(new, name, _copy(getattr(value, name), done))
    return new


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    kind = type(value)
    if _is_shared(kind):
        shared: Hashable = value
        return shared
    if kind is tuple:
        return tuple(_key(part, seen) for part in value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if _is_plain(kind):
        names = [name for name in _fields(value) if name not in _UNREAD]
        return (kind.__name__, *(_key(getattr(value, name), seen) for name in names))
    if isinstance(value, set):
        return tuple(sorted((_key(part, seen) for part in value), key=repr))
    parts = value.items() if isinstance(value, dict) else value
    return tuple(_key(part, seen) for part in parts)
