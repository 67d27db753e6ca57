"""A parser of server-sent events, for bytes that arrive in arbitrary chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class ServerEvent(NamedTuple):
    """One event: its bytes including the terminator, and its ``data`` lines joined.

    ``data`` is None if there is no such line, as in a keep-alive comment.
    """

    raw: bytes
    data: str | None = None


class EventReader:
    """Splits a stream of bytes into events.

    An event ends at an empty line and may have several ``data`` lines. Other fields are ignored.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line: list[bytes] = []
        self._lines: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that these bytes complete. Raises ``ValueError`` if one is too long."""
        self._num_bytes += len(data)
        first, *others = data.split(b"\n")
        self._line.append(first)
        for other in others:
            yield from self._end_line(b"".join(self._line))
            self._line = [other]
        if self._num_bytes > self._most_bytes:
            raise ValueError(f"an event of the stream exceeds {self._most_bytes} bytes")

    def end(self) -> Iterator[ServerEvent]:
        """Yield the last event at the end of the stream; many servers omit its empty line."""
        yield from self.feed(b"\n\n")

    def _end_line(self, line: bytes) -> Iterator[ServerEvent]:
        self._lines.append(line)
        if line.removesuffix(b"\r"):
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        yield ServerEvent(b"\n".join(lines) + b"\n", _data(lines))


def _data(lines: list[bytes]) -> str | None:
    parts = (line.removesuffix(b"\r").decode(errors="replace").partition(":") for line in lines)
    found = [value.removeprefix(" ") for name, _, value in parts if name == "data"]
    return "\n".join(found) if found else None
