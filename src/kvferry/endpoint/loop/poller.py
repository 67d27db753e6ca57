"""A poller for file descriptors and ZeroMQ sockets that can wait for less than a millisecond.

``zmq_poll`` asks each socket before and after each wait, with two system calls every time, which
costs more than the messages when there are many sources. This poller waits for the sockets' file
descriptors, and asks only sockets whose descriptor has signalled or that were used since: the
descriptor of a ZeroMQ socket is edge-triggered, and sending may consume its signal (``mark_used``).

On Linux it uses ``epoll(7)``, whose wait costs the same for any number of peers: with ``poll(2)``,
each frame of a peer looks at all others. Both count in milliseconds, and rounding up makes a wait
of 200 µs five times as long. ``select(2)`` counts in microseconds, so it does the short waits, for
the descriptor of the epoll alone. For one thread.
"""

from __future__ import annotations

import select
from typing import Any

from kvferry.endpoint.control.sockets import ZmqSocket, has_message

SHORT_S = 1e-3
# Longest single wait: its milliseconds must fit 32 bits.
MAX_WAIT_S = 3600.0


class Poller:
    """Waits until one of the watched file descriptors and ZeroMQ sockets is readable."""

    def __init__(self) -> None:
        self._is_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._is_epoll else select.poll()
        self._watched: dict[int, int | ZmqSocket] = {}
        # Sockets that may have a message of which their file descriptor gives no signal.
        self._used: dict[ZmqSocket, None] = {}

    def watch(self, source: int | ZmqSocket) -> None:
        """Watch a file descriptor or a socket."""
        fd = source if isinstance(source, int) else source.fileno()
        self._watched[fd] = source
        self._poll.register(fd, select.POLLIN)
        if not isinstance(source, int):
            self._used[source] = None

    def unwatch(self, source: int | ZmqSocket) -> None:
        """Stop watching a file descriptor or a socket."""
        fd = source if isinstance(source, int) else source.fileno()
        self._poll.unregister(fd)
        del self._watched[fd]
        if not isinstance(source, int):
            self._used.pop(source, None)

    def watch_writable(self, fd: int, *, wanted: bool) -> None:
        """Set whether a watched file descriptor also ends a wait by becoming writable."""
        self._poll.modify(fd, select.POLLIN | select.POLLOUT if wanted else select.POLLIN)

    def mark_used(self, socket: ZmqSocket) -> None:
        """Ask this socket before the next wait, because something was sent on it."""
        self._used[socket] = None

    def wait(self, timeout_s: float) -> set[object]:
        """Return the readable sources, after at most ``timeout_s`` seconds or 1 ms less."""
        # A socket stays marked while it has messages: its user does not have to take all at once.
        self._used = {one: None for one in self._used if has_message(one)}
        if self._used:
            timeout_s = 0.0
        elif timeout_s < SHORT_S:
            self._wait_briefly(timeout_s)
            timeout_s = 0.0
        ready: set[object] = set()
        for fd, _ in self._ready_within(int(min(timeout_s, MAX_WAIT_S) * 1000)):
            source = self._watched[fd]
            if isinstance(source, int):
                ready.add(source)
            elif has_message(source):
                self._used[source] = None
        return ready.union(self._used)

    def _ready_within(self, timeout_ms: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]]
        found = self._poll.poll(timeout_ms / 1000 if self._is_epoll else timeout_ms)
        return found

    def _wait_briefly(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            return
        watched = [self._poll.fileno()] if self._is_epoll else [*self._watched]
        try:
            select.select(watched, (), (), timeout_s)
        except ValueError:
            # A file descriptor is too large for select: wait for a whole millisecond.
            self._ready_within(1)
