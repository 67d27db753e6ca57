"""One simulated world: a clock, a queue of things to come, a network and its faults.

Single-threaded and seeded: the same seed plays the same world, step by step.
The network delays, drops, duplicates and reorders frames; frames go through the
real codec. Until ``calm_at`` faults happen, after it nothing goes wrong any
more, and progress is demanded.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.ids import Peer
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.messages import Arrived, Envelope
from kvferry.testing.sim.faults import Faults

if TYPE_CHECKING:
    from kvferry.testing.sim.nodes import Node

MAX_HISTORY = 20_000

# What a scenario may decide about a frame: a delay for each copy, or None for the dice.
Interceptor = Callable[[Peer, Peer, Envelope], list[float] | None]


class Violation(Exception):
    """A promise was broken. The text has the seed, the promise and the room's history."""


class World:
    """Time, the network, and everyone in it."""

    def __init__(self, seed: int, faults: Faults, *, calm_at: float) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.calm_at = calm_at
        self.now = 0.0
        self.steps = 0
        self.nodes: dict[Peer, Node] = {}
        self.happened: Counter[str] = Counter()
        self.history: deque[tuple[float, Peer, str, object]] = deque(maxlen=MAX_HISTORY)
        self.intercept: Interceptor | None = None
        self.past_frames: list[tuple[Peer, bytes]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    # ------------------------------------------------------------ time

    def at(self, delay: float, then: Callable[[], None]) -> None:
        """Do something after ``delay`` seconds of simulated time."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, then))

    def run(self, until: float) -> None:
        """Play everything up to that time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, then = heapq.heappop(self._queue)
            then()
        self.now = until

    @property
    def calm(self) -> bool:
        """Whether faults have stopped."""
        return self.now >= self.calm_at

    def strikes(self, kind: str) -> bool:
        """Whether a fault of that kind happens now."""
        chance = getattr(self.faults, kind)
        if not chance or self.calm or self.rng.random() >= chance:
            return False
        self.happened[kind] += 1
        return True

    # ------------------------------------------------------------ network

    def send(self, sender: Peer, to: Peer, envelope: Envelope) -> None:
        """Put a frame on the wire; it may come late, twice, or never."""
        frame = encode(envelope)
        if not self.calm and len(self.past_frames) < 200:
            self.past_frames.append((to, frame))
        for delay in self._copies(sender, to, envelope):
            self.at(delay, lambda: self.arrive(to, frame))

    def _copies(self, sender: Peer, to: Peer, envelope: Envelope) -> list[float]:
        delays = self.intercept(sender, to, envelope) if self.intercept else None
        if delays is not None:
            return delays
        is_note = isinstance(envelope.body, Arrived)
        if self.strikes("lose_note" if is_note else "drop"):
            return []
        copies = 2 if self.strikes("duplicate_note" if is_note else "duplicate") else 1
        return [self._delay() for _ in range(copies)]

    def _delay(self) -> float:
        quick = 0.001 + self.rng.random() * 0.004
        return quick + self.rng.random() * 0.8 if self.strikes("delay") else quick

    def arrive(self, to: Peer, frame: bytes) -> None:
        """A frame reaches its receiver, if there is one."""
        node = self.nodes.get(to)
        if node is None or not node.process.alive:
            return
        node.arrive(decode(frame))

    # ------------------------------------------------------------ judgement

    def remember(self, who: Peer, what: str, thing: object) -> None:
        """Keep a line for the history that a violation prints."""
        self.history.append((self.now, who, what, thing))

    def violate(self, promise: str, text: str, room: object = None) -> None:
        """A promise is broken: stop here, with the room's story."""
        lines = [f"seed {self.seed}, t={self.now:.3f}: {promise}: {text}", f"faults: {self.faults}"]
        story = [line for line in self.history if room is None or _about(line[3], room)]
        lines += [f"  {t:8.3f} {who!r:10} {what} {thing!r}" for t, who, what, thing in story[-80:]]
        raise Violation("\n".join(lines))


def _about(thing: object, room: object) -> bool:
    body = getattr(getattr(thing, "envelope", None), "body", thing)
    named = getattr(body, "room", None)
    return named == room
