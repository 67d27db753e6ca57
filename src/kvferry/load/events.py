"""Server-sent events out of bytes that arrive in any portions. Pure."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Takes bytes as they come, gives the data of every event that is complete.

    An event ends at an empty line and may have several ``data`` lines. Comments and other fields
    are passed over.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line: list[bytes] = []
        self._data: list[str] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """The events that these bytes complete; ``ValueError`` if one has no end."""
        self._num_bytes += len(data)
        first, *others = data.split(b"\n")
        self._line.append(first)
        for other in others:
            yield from self._take(b"".join(self._line).removesuffix(b"\r"))
            self._line = [other]
        if self._num_bytes > self._most_bytes:
            raise ValueError(f"an event of the stream is above {self._most_bytes} bytes")

    def end(self) -> Iterator[str]:
        """Nothing more comes; many servers leave out the last empty line."""
        yield from self.feed(b"\n\n")

    def _take(self, line: bytes) -> Iterator[str]:
        if line:
            name, _, value = line.decode(errors="replace").partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return
        if self._data:
            yield "\n".join(self._data)
        self._data = []
        self._num_bytes = 0
