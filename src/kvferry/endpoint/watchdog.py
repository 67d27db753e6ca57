"""Watchdog for the threads of endpoints.

A hang in this process must not look like a slow peer. Each thread of an endpoint sends a
heartbeat that says when the next one is due. One watchdog thread per process compares these
times, and reports a thread that is overdue or does not touch its pending work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

log = logging.getLogger("kvferry.endpoint")

CHECK_INTERVAL_S = 0.5


class ThreadHeartbeat:
    """Heartbeat of one thread: written by that thread, read by the watchdog."""

    def __init__(self, thread: str, has_work: Callable[[], bool] = lambda: False) -> None:
        self.thread = thread
        self.has_work = has_work
        self._beats = 0
        self._due_at = inf
        # For the watchdog: the count of beats when it first saw the pending work, and that time.
        self._seen = (0, inf)

    def beat(self, due_at: float) -> None:
        """Promise another beat before the monotonic time ``due_at``. On the watched thread."""
        self._beats += 1
        self._due_at = due_at

    def overdue_s(self, now: float) -> float:
        """Return for how many seconds the thread is overdue, or 0. On the watchdog's thread."""
        if not self.has_work() or self._seen[0] != self._beats:
            self._seen = (self._beats, now)
        return max(0.0, now - min(self._due_at, self._seen[1]))


@dataclass(eq=False)
class WatchedThreads:
    """Threads of one endpoint. ``on_stall`` gets the name of a late thread and its seconds.

    It is called on the watchdog's thread, again at each check while the thread is late, and with
    0 when it has recovered. It must not wait.
    """

    heartbeats: list[ThreadHeartbeat]
    stalled_s: float
    on_stall: Callable[[str, float], None]
    _late: set[str] = field(default_factory=set)

    def check(self, now: float) -> None:
        """Report threads that are late by more than ``stalled_s``, and those that recovered."""
        for heartbeat in self.heartbeats:
            overdue_s = heartbeat.overdue_s(now)
            if overdue_s > self.stalled_s:
                self._late.add(heartbeat.thread)
                self.on_stall(heartbeat.thread, overdue_s)
            elif heartbeat.thread in self._late:
                self._late.discard(heartbeat.thread)
                self.on_stall(heartbeat.thread, 0.0)


class Watchdog:
    """Thread that checks all watched threads; it runs while there are any."""

    def __init__(self) -> None:
        self._watched: dict[WatchedThreads, None] = {}
        self._changed = threading.Condition()
        self._running = False

    def watch(self, group: WatchedThreads) -> None:
        """Start checking these threads."""
        with self._changed:
            self._watched[group] = None
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="kvferry-watchdog", daemon=True).start()

    def unwatch(self, group: WatchedThreads) -> None:
        """Stop checking these threads. A check in progress may still report."""
        with self._changed:
            self._watched.pop(group, None)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched:
                    self._running = False
                    return
                watched = list(self._watched)
            for group in watched:
                try:
                    group.check(time.monotonic())
                except Exception:
                    log.exception("watchdog-failed")
            with self._changed:
                self._changed.wait(CHECK_INTERVAL_S)


WATCHDOG = Watchdog()
