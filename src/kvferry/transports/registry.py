"""Transports by name, found through entry points so that other packages can add their own.

A transport is imported only when it is requested by name, so a machine without NIXL never
imports NIXL's transport.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from kvferry.errors import TransportError
from kvferry.transports.base import Transport
from kvferry.transports.transport_set import AUTO, transport_names

GROUP = "kvferry.transports"


def transport_class(name: str) -> type[Transport]:
    """Return the transport of that name, with everything it needs installed.

    Raises ``TransportError`` if it does not exist or if something that it needs is missing.
    """
    found = load(name)
    missing = found.missing()
    if missing is not None:
        raise TransportError(missing)
    return found


def ready_transports(setting: str) -> tuple[type[Transport], ...]:
    """Return the usable transports of ``setting``, best first.

    Raises ``TransportError`` if there is none, or if one that was requested by name is not usable.
    """
    names = transport_names(setting)
    if setting != AUTO:
        return tuple(transport_class(name) for name in names)
    problems = {name: _problem(name) for name in names}
    found = tuple(load(name) for name, problem in problems.items() if problem is None)
    if not found:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise TransportError(f"no transport works here: {reasons}")
    return found


def load(name: str) -> type[Transport]:
    """Import the transport of that name. Something that it needs may still be missing."""
    entry = _entry(name)
    try:
        found = entry.load()
    except Exception as error:  # A foreign module may raise anything on import.
        raise TransportError(
            f"cannot load the transport {entry.name!r} ({type(error).__name__}: {error}); "
            f"reinstall {_package(entry)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise TransportError(
            f"transport {entry.name!r} is {entry.value}, which is not a Transport class; "
            f"correct the entry point of {_package(entry)}"
        )
    return found


def available() -> dict[str, str | None]:
    """Return every known transport with the reason why it is not usable; None if it is."""
    return {name: _problem(name) for name in _names()}


def _problem(name: str) -> str | None:
    try:
        transport_class(name)
    except TransportError as error:
        return str(error)
    return None


def _names() -> list[str]:
    return sorted(entry_points(group=GROUP).names)


def _entry(name: str) -> EntryPoint:
    entries = list(entry_points(group=GROUP, name=name))
    if not entries:
        raise TransportError(f"there is no transport {name!r:.80}; {_hint(name)}")
    if len({entry.value for entry in entries}) > 1:
        raise TransportError(
            f"{' and '.join(_package(entry) for entry in entries)} both provide a transport "
            f"{name!r}; uninstall one of them"
        )
    return entries[0]


def _hint(name: str) -> str:
    names = ["auto", *_names()]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(names)}, or install the package that provides it"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
