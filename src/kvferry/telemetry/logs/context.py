"""The context of a log line: the request and the room, kept for whoever logs meanwhile.

A request's id comes from its caller (``X-Request-Id``) or is made here, and goes on
to every worker that is asked on its behalf. So does the trace that it belongs to
(``traceparent``, as W3C has it), where its caller names one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

REQUEST_HEADER, TRACE_HEADER = "X-Request-Id", "traceparent"
# What can stand in a log and in a header without being quoted.
_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}", re.ASCII)

_REQUEST: ContextVar[str] = ContextVar("kvferry_request", default="")
_TRACE: ContextVar[str] = ContextVar("kvferry_trace", default="")
_ROOM: ContextVar[str] = ContextVar("kvferry_room", default="")


def request_id(given: str | None) -> str:
    """The caller's id where it can be used, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else secrets.token_hex(8)


def checked_trace(given: str | None) -> str:
    """The caller's ``traceparent`` where it is one; all zeroes stand for none."""
    parts = _TRACEPARENT.fullmatch(given or "")
    if parts is None or not any(parts[1].strip("0")) or not any(parts[2].strip("0")):
        return ""
    return parts[0]


@contextlib.contextmanager
def about(request: str, traceparent: str = "") -> Iterator[None]:
    """What is logged in this block, and in tasks that it starts, is about that request."""
    before, room, trace = _REQUEST.set(request), _ROOM.set(""), _TRACE.set(traceparent)
    try:
        yield
    finally:
        _TRACE.reset(trace)
        _ROOM.reset(room)
        _REQUEST.reset(before)


def in_room(room: object) -> None:
    """What this task logs from now on is about that room; None for no room."""
    _ROOM.set("" if room is None else str(room))


def current() -> tuple[str, str]:
    """The request and the ``traceparent`` that this task is about; empty where there is none."""
    return _REQUEST.get(), _TRACE.get()


def named() -> dict[str, str]:
    """The header that tells a caller which request it was."""
    return {REQUEST_HEADER: _REQUEST.get()} if _REQUEST.get() else {}


def onward() -> dict[str, str]:
    """The headers that tell the next one which request this is about, and in which trace."""
    return named() | ({TRACE_HEADER: _TRACE.get()} if _TRACE.get() else {})


def annotated(line: str) -> str:
    """A line with the request and the room it is about, unless it names them itself."""
    trace = _TRACE.get().split("-")[1] if _TRACE.get() else ""
    about_it = (("room", _ROOM.get()), ("request", _REQUEST.get()), ("trace", trace))
    for name, value in about_it:
        if value and f" {name}=" not in line:
            line = f"{line} {name}={value}"
    return line
