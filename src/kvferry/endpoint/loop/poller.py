"""A poller of files and ZeroMQ sockets that can wait for less than a millisecond.

``zmq_poll`` asks every socket before and after each wait, at two system calls a time, which
with a connection to each of many sources costs more than what comes. So this one waits for
the files behind the sockets, and asks only the sockets whose file has told of a change, or
which were used since: a ZeroMQ socket's file is quiet about what was there before, and
sending may swallow the sign of what has come (``used``).

``poll(2)`` counts in milliseconds, and rounding up turns a wait of 200 µs for a GPU into
five times that. ``select(2)`` counts in microseconds, so it takes the short waits. Belongs
to one thread.
"""

from __future__ import annotations

import select

from kvferry.endpoint.control.sockets import ZmqSocket, has_message

SHORT_S = 1e-3
# Longer than this nobody waits at a time: milliseconds must fit 32 bits.
MOST_S = 3600.0


class Poller:
    """Files and ZeroMQ sockets that may become readable."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, int | ZmqSocket] = {}
        # Sockets that may have something which their file does not tell of.
        self._used: dict[ZmqSocket, None] = {}

    def watch(self, what: int | ZmqSocket) -> None:
        """A file number or a socket."""
        fd = what if isinstance(what, int) else what.fileno()
        self._watched[fd] = what
        self._poll.register(fd, select.POLLIN)
        if not isinstance(what, int):
            self._used[what] = None

    def unwatch(self, what: int | ZmqSocket) -> None:
        """No longer."""
        fd = what if isinstance(what, int) else what.fileno()
        self._poll.unregister(fd)
        del self._watched[fd]
        if not isinstance(what, int):
            self._used.pop(what, None)

    def watch_room(self, fd: int, *, wanted: bool) -> None:
        """Whether to be woken also when a watched file can be written."""
        self._poll.modify(fd, select.POLLIN | select.POLLOUT if wanted else select.POLLIN)

    def used(self, what: ZmqSocket) -> None:
        """Something was sent on a socket: ask it whether something has come, before sleeping."""
        self._used[what] = None

    def wait(self, timeout_s: float) -> set[object]:
        """Who is readable, at the latest after so long or a millisecond less."""
        # They stay: not all of what one has need be taken at once.
        self._used = {one: None for one in self._used if has_message(one)}
        if self._used:
            timeout_s = 0.0
        elif timeout_s < SHORT_S:
            self._wait_briefly(timeout_s)
            timeout_s = 0.0
        ready: set[object] = set()
        for fd, _ in self._poll.poll(int(min(timeout_s, MOST_S) * 1000)):
            what = self._watched[fd]
            if isinstance(what, int):
                ready.add(what)
            elif has_message(what):
                self._used[what] = None
        return ready.union(self._used)

    def _wait_briefly(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            return
        try:
            select.select([*self._watched], (), (), timeout_s)
        except ValueError:
            # A file number above what select can take: a whole millisecond, then.
            self._poll.poll(1)
