"""A poller that can wait for less than a millisecond.

``zmq_poll`` and ``poll(2)`` count in milliseconds, and rounding up turns a wait of 200 µs
for a GPU into five times that. ``select(2)`` counts in microseconds, so it takes the
short waits. Belongs to one thread.
"""

from __future__ import annotations

import select
from math import inf

import zmq

from kvferry.runtime.control import ZmqSocket, has_message

SHORT_S = 1e-3


class Poller:
    """Files and ZeroMQ sockets that may become readable."""

    def __init__(self) -> None:
        self._poller: zmq.Poller = zmq.Poller()
        self._sockets: dict[ZmqSocket, int] = {}
        self._files: set[int] = set()

    def watch(self, what: int | ZmqSocket) -> None:
        """A file number or a socket."""
        self._poller.register(what, zmq.POLLIN)
        if isinstance(what, int):
            self._files.add(what)
        else:
            self._sockets[what] = what.fileno()

    def unwatch(self, what: ZmqSocket) -> None:
        """No longer."""
        self._poller.unregister(what)
        del self._sockets[what]

    def wait(self, timeout_s: float) -> set[object]:
        """Who is readable, at the latest after so long or a millisecond less."""
        if timeout_s < SHORT_S:
            self._wait_briefly(timeout_s)
            timeout_s = 0.0
        milliseconds = None if timeout_s == inf else int(timeout_s * 1000)
        return {which for which, _ in self._poller.poll(milliseconds)}

    def _wait_briefly(self, timeout_s: float) -> None:
        # A ZeroMQ socket's file tells of changes only, so what is there already must be asked for.
        if timeout_s <= 0 or any(map(has_message, self._sockets)):
            return
        try:
            select.select([*self._files, *self._sockets.values()], (), (), timeout_s)
        except ValueError:
            # A file number above what select can take: a whole millisecond, then.
            self._poller.poll(1)
