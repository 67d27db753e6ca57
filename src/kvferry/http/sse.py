"""Server-sent events, cut out of bytes that arrive in any portions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class ServerEvent(NamedTuple):
    """One event: its bytes as they came, its end included, and its ``data`` lines joined.

    ``data`` is None where there is no such line, as in a comment that keeps a connection open.
    """

    raw: bytes
    data: str | None = None


class EventReader:
    """Takes bytes as they come, gives every event that is complete.

    An event ends at an empty line and may have several ``data`` lines. Other fields are
    passed over.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line: list[bytes] = []
        self._lines: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """The events that these bytes complete; ``ValueError`` if one has no end."""
        self._num_bytes += len(data)
        first, *others = data.split(b"\n")
        self._line.append(first)
        for other in others:
            yield from self._take(b"".join(self._line))
            self._line = [other]
        if self._num_bytes > self._most_bytes:
            raise ValueError(f"an event of the stream is above {self._most_bytes} bytes")

    def end(self) -> Iterator[ServerEvent]:
        """Nothing more comes; many servers leave out the last empty line."""
        yield from self.feed(b"\n\n")

    def _take(self, line: bytes) -> Iterator[ServerEvent]:
        self._lines.append(line)
        if line.removesuffix(b"\r"):
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        yield ServerEvent(b"\n".join(lines) + b"\n", _data(lines))


def _data(lines: list[bytes]) -> str | None:
    parts = (line.removesuffix(b"\r").decode(errors="replace").partition(":") for line in lines)
    found = [value.removeprefix(" ") for name, _, value in parts if name == "data"]
    return "\n".join(found) if found else None
