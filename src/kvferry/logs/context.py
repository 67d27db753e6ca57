"""The context of a log line: the request and the room, kept for whoever logs meanwhile.

A request's id comes from its caller (``X-Request-Id``) or is made here, and goes on
to every worker that is asked on its behalf.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

REQUEST_HEADER = "X-Request-Id"
# What can stand in a log and in a header without being quoted.
_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}", re.ASCII)

_REQUEST: ContextVar[str] = ContextVar("kvferry_request", default="")
_ROOM: ContextVar[str] = ContextVar("kvferry_room", default="")


def request_id(given: str | None) -> str:
    """The caller's id where it can be used, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else secrets.token_hex(8)


@contextlib.contextmanager
def about(request: str) -> Iterator[None]:
    """What is logged in this block, and in tasks that it starts, is about that request."""
    before, room = _REQUEST.set(request), _ROOM.set("")
    try:
        yield
    finally:
        _ROOM.reset(room)
        _REQUEST.reset(before)


def in_room(room: object) -> None:
    """What this task logs from now on is about that room; None for no room."""
    _ROOM.set("" if room is None else str(room))


def onward() -> dict[str, str]:
    """The headers that tell the next one which request this is about."""
    return {REQUEST_HEADER: _REQUEST.get()} if _REQUEST.get() else {}


def annotated(line: str) -> str:
    """A line with the request and the room it is about, unless it names them itself."""
    for name, value in (("room", _ROOM.get()), ("request", _REQUEST.get())):
        if value and f" {name}=" not in line:
            line = f"{line} {name}={value}"
    return line
