"""The lines of a channel to processes of this host (``runtime/local.py``), and who watches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.runtime.bundles import Bundle
from kvferry.runtime.local import LocalLine
from kvferry.runtime.owner.poller import Poller


class LocalLines:
    """Lines to processes of this host, watched while they last."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._lines: dict[object, LocalLine] = {}
        self._full: set[LocalLine] = set()

    def add(self, line: LocalLine) -> None:
        """Watch one."""
        self._lines[line.fileno()] = line
        self._poller.watch(line.fileno())

    def receive(self, ready: Iterable[object]) -> Iterator[tuple[LocalLine, Bundle]]:
        """Lines that have something to say, or are over."""
        for line in [self._lines[one] for one in ready if one in self._lines]:
            if line in self._full:
                line.resume()
                self._watch_room(line)
            yield line, line.receive()

    def send(self, line: LocalLine, messages: Iterable[Bundle]) -> None:
        """Now, or when there is room."""
        for message in messages:
            line.send(message.data)
        if line.has_unsent:
            self._watch_room(line)

    def _watch_room(self, line: LocalLine) -> None:
        if line.has_unsent != (line in self._full) and line.fileno() in self._lines:
            self._full ^= {line}
            self._poller.watch_room(line.fileno(), wanted=line.has_unsent)

    def drop(self, line: LocalLine) -> None:
        """Hang up."""
        if self._lines.pop(line.fileno(), None) is not None:
            self._poller.unwatch(line.fileno())
        self._full.discard(line)
        line.close()

    def sweep(self) -> None:
        """Hang up on those that are over."""
        for line in [line for line in self._lines.values() if line.over]:
            self.drop(line)

    def close(self) -> None:
        """Hang up on all."""
        for line in list(self._lines.values()):
            self.drop(line)
