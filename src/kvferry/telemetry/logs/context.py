"""Context of log lines: the current request, trace and room, held in context variables.

A request's id comes from its caller (``X-Request-Id``) or is generated, and is passed on to every
worker that is called on the request's behalf. So is the W3C ``traceparent`` of the caller.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

REQUEST_HEADER, TRACE_HEADER = "X-Request-Id", "traceparent"
# Characters that need no quoting in a log line or a header.
_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}", re.ASCII)

_REQUEST: ContextVar[str] = ContextVar("kvferry_request", default="")
_TRACE: ContextVar[str] = ContextVar("kvferry_trace", default="")
_ROOM: ContextVar[str] = ContextVar("kvferry_room", default="")


def request_id(given: str | None) -> str:
    """Return the caller's id if it is valid, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else secrets.token_hex(8)


def checked_trace(given: str | None) -> str:
    """Return the caller's ``traceparent`` if it is valid, else an empty string."""
    parts = _TRACEPARENT.fullmatch(given or "")
    if parts is None or not any(parts[1].strip("0")) or not any(parts[2].strip("0")):
        return ""
    return parts[0]


@contextlib.contextmanager
def about(request: str, traceparent: str = "") -> Iterator[None]:
    """Set the request for this block and for the tasks that it starts."""
    before, room, trace = _REQUEST.set(request), _ROOM.set(""), _TRACE.set(traceparent)
    try:
        yield
    finally:
        _TRACE.reset(trace)
        _ROOM.reset(room)
        _REQUEST.reset(before)


def in_room(room: object) -> None:
    """Set the room of this task from now on; None for no room."""
    _ROOM.set("" if room is None else str(room))


def current() -> tuple[str, str]:
    """Return this task's request id and ``traceparent``, empty if unset."""
    return _REQUEST.get(), _TRACE.get()


def named() -> dict[str, str]:
    """Return the response header that names the request."""
    return {REQUEST_HEADER: _REQUEST.get()} if _REQUEST.get() else {}


def onward() -> dict[str, str]:
    """Return the request headers that pass the request id and the trace on to a worker."""
    return named() | ({TRACE_HEADER: _TRACE.get()} if _TRACE.get() else {})


def annotated(line: str) -> str:
    """Return the line with room, request and trace appended, unless it has them already."""
    trace = _TRACE.get().split("-")[1] if _TRACE.get() else ""
    for name, value in (("room", _ROOM.get()), ("request", _REQUEST.get()), ("trace", trace)):
        if value and f" {name}=" not in line:
            line = f"{line} {name}={value}"
    return line
