"""Unix-socket lines of a channel (``endpoint/control/unix.py``), and who watches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.endpoint.control.unix import UnixChannel
from kvferry.endpoint.loop.poller import Poller
from kvferry.protocol.codec import MAX_FRAME_BYTES
from kvferry.telemetry.observer import Observer

# Peers of one host are few. Whoever gets no line uses the control channel.
MAX_LINES = 256
# Bytes that all lines together may hold of frames whose rest has not come.
MAX_UNFINISHED_BYTES = 4 * MAX_FRAME_BYTES


class UnixChannels:
    """Lines to processes of this host, watched while they last.

    A peer that was let in may still misbehave, so the number of lines and what they hold of
    unfinished frames are bounded. Frames that a closed line loses are repeated by the protocol.
    """

    def __init__(self, poller: Poller, observer: Observer) -> None:
        self._poller = poller
        self._observer = observer
        self._lines: dict[object, UnixChannel] = {}
        self._full: set[UnixChannel] = set()
        self._unfinished: dict[UnixChannel, int] = {}

    def add(self, line: UnixChannel) -> None:
        """Watch a line, or close it if there are too many."""
        if len(self._lines) >= MAX_LINES:
            self._observer.refused("too-many-lines")
            line.close()
            return
        self._lines[line.fileno()] = line
        self._poller.watch(line.fileno())

    def receive(self, ready: Iterable[object]) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """Lines that have something to say, or are over."""
        for line in [self._lines[one] for one in ready if one in self._lines]:
            if line in self._full:
                line.resume()
                self._watch_room(line)
            yield line, line.receive()
            yield from self._over_limit(line)

    def _over_limit(self, line: UnixChannel) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """End the lines with the longest unfinished frames until the rest is within the limit."""
        self._unfinished.pop(line, None)
        if line.num_unfinished and not line.over:
            self._unfinished[line] = line.num_unfinished
        while sum(self._unfinished.values()) > MAX_UNFINISHED_BYTES:
            longest = max(self._unfinished, key=lambda one: self._unfinished[one])
            del self._unfinished[longest]
            longest.over = True
            self._observer.refused("unfinished-frames")
            yield longest, []

    def send(self, line: UnixChannel, messages: Iterable[bytes]) -> None:
        """Now, or when there is room."""
        for message in messages:
            line.send(message)
        if line.has_unsent:
            self._watch_room(line)

    def _watch_room(self, line: UnixChannel) -> None:
        if line.has_unsent != (line in self._full) and line.fileno() in self._lines:
            self._full ^= {line}
            self._poller.watch_room(line.fileno(), wanted=line.has_unsent)

    def drop(self, line: UnixChannel) -> None:
        """Hang up."""
        if self._lines.pop(line.fileno(), None) is not None:
            self._poller.unwatch(line.fileno())
        self._full.discard(line)
        self._unfinished.pop(line, None)
        line.close()

    def sweep(self) -> None:
        """Hang up on those that are over."""
        for line in [line for line in self._lines.values() if line.over]:
            self.drop(line)

    def close(self) -> None:
        """Hang up on all."""
        for line in list(self._lines.values()):
            self.drop(line)
