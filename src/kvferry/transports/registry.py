"""Transports by name, found through entry points so that other packages can add theirs.

Nothing is imported before it is asked for by name: a machine without NIXL never
notices that there is a transport for it.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from kvferry.errors import TransportError
from kvferry.transports.base import Transport
from kvferry.transports.transport_set import AUTO, asked_for

GROUP = "kvferry.transports"


def transport_class(name: str) -> type[Transport]:
    """The transport of that name, ready to be used.

    Raises ``TransportError`` if there is none, or if something it needs is missing.
    """
    found = load(name)
    missing = found.missing()
    if missing is not None:
        raise TransportError(missing)
    return found


def ready_transports(name: str) -> tuple[type[Transport], ...]:
    """Those that ``name`` means and that can be used here, best first.

    Raises ``TransportError`` if there is none, or not one that was asked for by its own name.
    """
    names = asked_for(name)
    if name != AUTO:
        return tuple(transport_class(each) for each in names)
    problems = {each: _problem(each) for each in names}
    found = tuple(load(each) for each, problem in problems.items() if problem is None)
    if not found:
        whys = "; ".join(f"{each}: {problem}" for each, problem in problems.items())
        raise TransportError(f"no transport can be used here: {whys}")
    return found


def load(name: str) -> type[Transport]:
    """The transport of that name, which may still miss something that it needs."""
    entry = _entry(name)
    try:
        found = entry.load()
    except Exception as error:  # Whatever a foreign module may do while it is imported.
        raise TransportError(
            f"transport {entry.name!r} can't be loaded ({type(error).__name__}: {error}); "
            f"reinstall {_package(entry)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise TransportError(
            f"transport {entry.name!r} is {entry.value}, which is no Transport; "
            f"correct the entry point of {_package(entry)}"
        )
    return found


def available() -> dict[str, str | None]:
    """Every known transport, with what keeps it from being used; None if nothing does."""
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
            f"{' and '.join(_package(entry) for entry in entries)} both bring a transport "
            f"{name!r}; uninstall one of them"
        )
    return entries[0]


def _hint(name: str) -> str:
    names = ["auto", *_names()]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(names)}, or install the package that adds it"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
