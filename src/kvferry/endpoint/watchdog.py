"""Signs of life of our own threads, and the watchdog who looks at them.

A hang of ours must never look like a slow peer. So every thread of an endpoint says
when it will look around again, and one thread a process compares: who is late by
a limit, or has had work for so long without touching it, is told of.

A thread beats its own heartbeat; the watchdog only reads. What it finds it says on its own
thread, so whoever listens must not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from math import inf

log = logging.getLogger("kvferry.endpoint")

LOOK_S = 0.5


class ThreadHeartbeat:
    """One thread's signs of life."""

    def __init__(self, thread: str, has_work: Callable[[], bool] = lambda: False) -> None:
        self.thread = thread
        self.has_work = has_work
        self._beats = 0
        self._due_at = inf
        # The watchdog's: since when it has seen work wait, and the beats at that time.
        self._seen = (0, inf)

    def beat(self, due_at: float) -> None:
        """On its own thread: alive now, and again before ``due_at``."""
        self._beats += 1
        self._due_at = due_at

    def silent_s(self, now: float) -> float:
        """How long the thread is overdue; 0 if it is not."""
        if not self.has_work() or self._seen[0] != self._beats:
            self._seen = (self._beats, now)
        return max(0.0, now - min(self._due_at, self._seen[1]))


# Told of a thread that is late, and of its being alive again with 0.
Told = Callable[[str, float], None]


class WatchedThreads:
    """The threads of one endpoint, how late one may be, and who is told of it."""

    def __init__(self, heartbeats: list[ThreadHeartbeat], stalled_s: float, told: Told) -> None:
        self._heartbeats = heartbeats
        self._stalled_s = stalled_s
        self._told = told
        self._late: set[str] = set()

    def look(self, now: float) -> None:
        """Tell of what has changed, and again of whoever is still late."""
        for heartbeat in self._heartbeats:
            silent_s = heartbeat.silent_s(now)
            if silent_s > self._stalled_s:
                self._late.add(heartbeat.thread)
                self._told(heartbeat.thread, silent_s)
            elif heartbeat.thread in self._late:
                self._late.discard(heartbeat.thread)
                self._told(heartbeat.thread, 0.0)


class Watchdog:
    """The thread that looks, while there is somebody to look at."""

    def __init__(self) -> None:
        self._watched: dict[WatchedThreads, None] = {}
        self._changed = threading.Condition()
        self._running = False

    def watch(self, watched: WatchedThreads) -> None:
        """From now on."""
        with self._changed:
            self._watched[watched] = None
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="kvferry-watchdog", daemon=True).start()

    def leave(self, watched: WatchedThreads) -> None:
        """No longer. A look that has begun may still be told of."""
        with self._changed:
            self._watched.pop(watched, None)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched:
                    self._running = False
                    return
                watched = list(self._watched)
            for threads in watched:
                self._look(threads)
            with self._changed:
                self._changed.wait(LOOK_S)

    def _look(self, watched: WatchedThreads) -> None:
        try:
            watched.look(time.monotonic())
        except Exception:
            log.exception("watchdog-failed")


WATCHDOG = Watchdog()
