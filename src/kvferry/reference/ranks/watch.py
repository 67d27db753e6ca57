"""The watch over the ranks of an instance: whether each is well, seen from the driver's process.

Each rank but the first gives a sign of life now and then, from a thread of its own.
A process that is stopped gives none. That thread does not prove that the rank gets
anywhere, so the length of a step is watched too: a step ends only when every rank
has done its part.

``Signs`` decides and knows no clock; ``RankWatch`` is the thread around it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait

# How often in ``lost_s`` a rank gives a sign of life, and the driver looks for them.
NUM_BEATS = 80
BEAT = b"."


class Signs:
    """What was seen of the ranks, and what follows from it."""

    def __init__(self, ranks: Mapping[int, object], lost_s: float, now: float) -> None:
        self.look_s = lost_s / NUM_BEATS
        self._lost_s = lost_s
        # A rank is given up in half the time, so that what it was asked for ends within all of it.
        self._silent_s = lost_s / 2
        self._late_s = lost_s / 4
        self._seen = dict.fromkeys(ranks, now)
        self._ended: set[int] = set()
        self._began: float | None = None
        self._looked = now
        # What was before is nobody's fault.
        self._not_before = now

    def beat(self, rank: int, now: float) -> None:
        """A rank has given a sign of life."""
        self._seen[rank] = now

    def gone(self, rank: int) -> None:
        """A rank's process has ended."""
        self._ended.add(rank)

    def began(self, now: float) -> None:
        """A step is under way."""
        self._began = now

    def ended(self) -> None:
        """It has ended, on every rank."""
        self._began = None

    def verdict(self, now: float) -> str | None:
        """Why the instance can't go on; None if it can, as far as is known."""
        began = self._began
        if now - self._looked > self._late_s:
            # Whoever looks this late did not run either, and has no right to blame others.
            self._not_before = now
        self._looked = now
        if self._ended and began is None:
            return f"the process of rank {min(self._ended)} has ended"
        silent = [rank for rank, seen in self._seen.items() if self._over(now, seen)]
        if silent:
            return f"rank {min(silent)} has shown no sign of life for {self._silent_s:g} s"
        if began is not None and now - max(began, self._not_before) > self._lost_s:
            return (
                f"a step has not ended for {self._lost_s:g} s (if steps may take so long, lower "
                f"step_tokens or raise lost_s)"
            )
        return None

    def _over(self, now: float, seen: float) -> bool:
        """Whether a rank has not run for ``_silent_s``: it may have stopped just before a beat."""
        return now - max(seen, self._not_before) > self._silent_s + self.look_s


class RankWatch:
    """Looks at the ranks until it is closed, or until one is lost, which it tells once."""

    def __init__(
        self, beats: Mapping[int, Connection], lost_s: float, lost: Callable[[str], None]
    ) -> None:
        self._signs = Signs(beats, lost_s, time.monotonic())
        self._lost = lost
        self._ranks = {pipe: rank for rank, pipe in beats.items()}
        self._end, self._ended = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="kvferry-ranks", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step. Called by the engine's thread."""
        self._signs.began(time.monotonic())
        try:
            yield
        finally:
            self._signs.ended()

    def close(self) -> None:
        """End the thread, unless it is the one that calls. Idempotent."""
        self._ended.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._end:
            while True:
                ready = wait([self._end, *self._ranks], self._signs.look_s)
                if self._end in ready:
                    return
                for pipe in ready:
                    self._hear(pipe)
                reason = self._signs.verdict(time.monotonic())
                if reason is not None:
                    self._lost(reason)
                    return

    def _hear(self, pipe: object) -> None:
        assert isinstance(pipe, Connection)
        try:
            pipe.recv_bytes()
            self._signs.beat(self._ranks[pipe], time.monotonic())
        except (EOFError, OSError):
            self._signs.gone(self._ranks.pop(pipe))


def give_signs(pipe: Connection, lost_s: float) -> None:
    """Begin to give signs of life, until this process or the driver ends."""
    threading.Thread(target=_beat, args=(pipe, lost_s / NUM_BEATS), daemon=True).start()


def _beat(pipe: Connection, every_s: float) -> None:
    with contextlib.suppress(OSError):
        while True:
            pipe.send_bytes(BEAT)
            time.sleep(every_s)
