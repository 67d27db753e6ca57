"""One simulated world: a clock with a queue of events, the network, and the faults drawn for it.

Single-threaded and seeded: the same seed gives the same world, step by step. The network delays,
drops, duplicates and reorders frames, which pass through the real codec. Faults happen until
``calm_at``; after that nothing goes wrong and the cluster must make progress.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvferry.ids import Peer, Room
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.messages import Arrived, Envelope

if TYPE_CHECKING:
    from kvferry.testing.sim.nodes import Node

MAX_HISTORY = 20_000
MAX_PAST_FRAMES = 200

# Gives the delay of each copy of a frame, or None to draw them as usual.
Interceptor = Callable[[Peer, Peer, Envelope], list[float] | None]


class Violation(Exception):
    """A broken promise. The text has the seed, the promise and the room's history."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probability of each fault per message or write, and counts of the rarer events."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    lose_note: float = 0.0
    duplicate_note: float = 0.0
    busy: float = 0.0
    write_failed: float = 0.0
    write_unknown: float = 0.0
    slow_write: float = 0.0
    torn_write: float = 0.0
    cancel_source: float = 0.0
    cancel_target: float = 0.0
    short_deadline: float = 0.0
    slow_prefill: float = 0.0
    late_decode: float = 0.0
    one_sided: float = 0.0
    mixed_up: float = 0.0
    stalls: int = 0
    kills: int = 0
    cuts: int = 0
    foreign: int = 0
    replays: int = 0
    strangers: int = 0
    tight_pools: int = 0
    leaves: int = 0
    unreached: float = 0.0
    late_choice: float = 0.0
    flip: float = 0.0

    @staticmethod
    def draw(rng: random.Random) -> Faults:
        """Draw a few kinds of fault, each with a strength.

        Most kinds are left out: a world in which everything fails at once hides the bugs
        that need most things to work.
        """
        chosen: dict[str, float] = {}
        for one in fields(Faults):
            if rng.random() < 0.3:
                is_count = one.type == "int"
                chosen[one.name] = rng.randint(1, 2) if is_count else rng.choice([0.03, 0.1, 0.3])
        return Faults(**chosen)  # type: ignore[arg-type]


class World:
    """The clock, the network and the nodes of one simulation."""

    def __init__(self, seed: int, faults: Faults, *, calm_at: float) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.calm_at = calm_at
        self.now = 0.0
        self.steps = 0
        self.nodes: dict[Peer, Node] = {}
        self.counts: Counter[str] = Counter()
        self.history: deque[tuple[float, Peer, str, object]] = deque(maxlen=MAX_HISTORY)
        self.intercept: Interceptor | None = None
        # Rooms of which a write landed with a wrong byte.
        self.flipped: set[Room] = set()
        # Targets that have offered pages for each room.
        self.offered: defaultdict[Room, set[Peer]] = defaultdict(set)
        self.past_frames: list[tuple[Peer, bytes]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    # ------------------------------------------------------------ time

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Run the action after ``delay`` seconds of simulated time."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, action))

    def run(self, until: float) -> None:
        """Run everything that is due up to that time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    @property
    def calm(self) -> bool:
        """Whether faults have stopped."""
        return self.now >= self.calm_at

    def inject(self, kind: str) -> bool:
        """Draw whether a fault of that kind happens now, and count it."""
        chance = getattr(self.faults, kind)
        if not chance or self.calm or self.rng.random() >= chance:
            return False
        self.counts[kind] += 1
        return True

    # ------------------------------------------------------------ network

    def send(self, sender: Peer, to: Peer, envelope: Envelope) -> None:
        """Put a frame on the wire. It may arrive late, twice or never."""
        frame = encode(envelope)
        if not self.calm and len(self.past_frames) < MAX_PAST_FRAMES:
            self.past_frames.append((to, frame))
        for delay in self._delays(sender, to, envelope):
            self.at(delay, lambda: self.arrive(to, frame))

    def _delays(self, sender: Peer, to: Peer, envelope: Envelope) -> list[float]:
        """Return the delay of each copy of a frame that arrives."""
        delays = self.intercept(sender, to, envelope) if self.intercept else None
        if delays is not None:
            return delays
        is_note = isinstance(envelope.body, Arrived)
        if self.inject("lose_note" if is_note else "drop"):
            return []
        copies = 2 if self.inject("duplicate_note" if is_note else "duplicate") else 1
        return [self._draw_delay() for _ in range(copies)]

    def _draw_delay(self) -> float:
        quick = 0.001 + self.rng.random() * 0.004
        return quick + self.rng.random() * 0.8 if self.inject("delay") else quick

    def arrive(self, to: Peer, frame: bytes) -> None:
        """Deliver a frame if its receiver is alive."""
        node = self.nodes.get(to)
        if node is not None and node.process.alive:
            node.arrive(decode(frame))

    # ------------------------------------------------------------ history

    def record(self, who: Peer, direction: str, thing: object) -> None:
        """Add a line to the history that a violation prints."""
        self.history.append((self.now, who, direction, thing))

    def violate(self, promise: str, text: str, room: object = None) -> None:
        """Raise a ``Violation`` with the history of the room."""
        lines = [f"seed {self.seed}, t={self.now:.3f}: {promise}: {text}", f"faults: {self.faults}"]
        story = [line for line in self.history if room is None or _room_of(line[3]) == room]
        lines += [f"  {t:8.3f} {who!r:10} {sign} {thing!r}" for t, who, sign, thing in story[-80:]]
        raise Violation("\n".join(lines))


def _room_of(thing: object) -> object:
    body = getattr(getattr(thing, "envelope", None), "body", thing)
    return getattr(body, "room", None)
