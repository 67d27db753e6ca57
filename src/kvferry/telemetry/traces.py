"""Bounded buffer of the steps of an endpoint's rooms.

Recording runs for every frame, so one step costs a dict look-up and an append. The buffer keeps
all steps of open rooms, a ring of the rooms that ended last, and beside the ring the rooms that
failed last and the slowest rooms of the last minutes. Frames about a room that the engine has not
opened here are in the peer's trace only. Belongs to the loop thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Any

from kvferry.ids import MAX_ID, Peer, Room
from kvferry.layout.intervals import Span
from kvferry.protocol import messages
from kvferry.protocol.messages import Envelope, RoomMessage
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.telemetry.observer import ObservedRoom, ObservedWrite, Observer
from kvferry.telemetry.status import MAX_FAILURES_SHOWN
from kvferry.telemetry.steps import (
    MAX_TRACE_EVENTS,
    NO_TAG,
    RoomTag,
    RoomTrace,
    StepKind,
    TraceStep,
)

# Strings, because enum members are slower to look up and to encode.
MESSAGES: dict[type[RoomMessage], str] = {
    messages.Ask: StepKind.CHAIN_SENT.value,
    messages.Holding: StepKind.ANSWERED.value,
    messages.Offer: StepKind.OFFERED.value,
    messages.Accept: StepKind.ACCEPTED.value,
    messages.Want: StepKind.WANTED.value,
    messages.Grant: StepKind.GRANTED.value,
    messages.Arrived: StepKind.ARRIVED.value,
    messages.StatusPoll: StepKind.STATUS_POLLED.value,
    messages.Close: StepKind.CLOSED.value,
    messages.Complete: StepKind.COMPLETED.value,
    messages.Abort: StepKind.ABORTED.value,
    messages.Drained: StepKind.DRAINED.value,
}
WRITTEN, DONE, FAILED = StepKind.WRITTEN.value, StepKind.DONE.value, StepKind.FAILED.value
RELEASED = StepKind.RELEASED
SECONDS = attrgetter("seconds")

# Slow rooms that are kept, and for how long.
MAX_SLOW, SLOW_S = 64, 300.0
# Entries of a step in a room's list: time, kind, peer, and the rest by kind.
WIDTH = 4
# A room's record leaves space in its trace for the first step and for ``FINISHED``.
HALF = (MAX_TRACE_EVENTS // 2 - 1) * WIDTH


@dataclass(slots=True, eq=False)
class RoomRecord:
    """Steps of one attempt at a room, flat: ``WIDTH`` entries per step.

    ``handle`` is set while the room is open. The end copies its facts, so that the record does
    not keep the room's pages.
    """

    room: Room
    handle: ObservedRoom | None
    steps: list[Any] = field(default_factory=list)
    tag: RoomTag = NO_TAG
    begun: float = 0.0
    finished: float | None = None
    # When the room ended.
    at: float = inf
    failure: Failure | None = None
    left_out: int = 0
    # Steps that count towards the limit of ended rooms.
    num_counted: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from opening to the end."""
        return self.at - self.begun


class TraceBuffer(Observer):
    """Steps of all open rooms, and of the last ended rooms up to ``max_steps`` steps in all."""

    def __init__(
        self, endpoint: str, role: str, max_steps: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._endpoint = endpoint
        self._role = role
        self._max_steps = max_steps
        self._clock = clock
        # Open rooms, and the ended rooms of the ring.
        self._records: dict[Room, RoomRecord] = {}
        self._ring: deque[RoomRecord] = deque()
        self._num_steps = 0
        # The slowest rooms, the slowest last.
        self._slow: list[RoomRecord] = []
        # A room as fast as this that ends before that time is not among the slowest.
        self._slow_limit_s, self._slow_until = -inf, -inf
        # The last failed rooms, the latest last.
        self.failed: deque[RoomRecord] = deque(maxlen=MAX_FAILURES_SHOWN)

    # ------------------------------------------------------------ events

    def frame_in(self, envelope: Envelope) -> None:
        """Record a peer's message about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            self._record(body.room, self._clock(), MESSAGES[type(body)], envelope.sender, None)

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        """Record a message to a peer about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            self._record(body.room, self._clock(), MESSAGES[type(body)], peer, None)

    def step(self, room: Room, kind: StepKind, tokens: Span | None = None) -> None:
        """Record a push or a release."""
        record = self._record(room, self._clock(), kind, None, tokens)
        if kind is RELEASED and record is not None and not record.num_counted:
            self._add_to_ring(record)

    def write(self, job: ObservedWrite, at: float) -> None:
        """Record a write that succeeded."""
        if job.fate is None:
            transfer = job.action.transfer
            details = job.seconds, job.num_bytes, job.mode
            self._record(transfer.room, at, WRITTEN, transfer.peer, details)

    def copy(
        self, room: Room, peer: Peer, kind: StepKind, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Record a gather or a scatter."""
        self._record(room, at, kind, peer, (seconds, num_bytes, ""))

    def _record(self, room: Room, *step: Any) -> RoomRecord | None:
        record = self._records.get(room)
        if record is not None:
            record.steps += step
            if len(record.steps) > 2 * HALF:
                # The step in the middle, so that a long room keeps its first and its last steps.
                del record.steps[HALF : HALF + WIDTH]
                record.left_out += 1
        return record

    def room_opened(self, room: ObservedRoom) -> None:
        """Start a record."""
        self._records[room.room] = RoomRecord(room.room, room)

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Record the end. A failed room joins the ring when its memory is released."""
        now, record = self._clock(), self._records.get(room.room)
        if record is None:
            return
        record.handle, record.tag, record.finished = None, room.tag, room.finished
        record.begun, record.at = room.begun, now
        if isinstance(outcome, Failure):
            record.failure = outcome
            reason = f"{outcome.code}: {outcome.message}"[:1000].encode(errors="replace").decode()
            self._record(room.room, now, FAILED, None, reason)
            self.failed.append(record)
        else:
            self._record(room.room, now, DONE, None, None)
            self._add_to_ring(record)
        if record.seconds > self._slow_limit_s or now > self._slow_until:
            self._add_slow(record, now)

    def _add_to_ring(self, record: RoomRecord) -> None:
        """Count an ended room's steps, and drop the oldest rooms beyond the limit."""
        record.num_counted = len(record.steps) // WIDTH
        self._num_steps += record.num_counted
        self._ring.append(record)
        while self._num_steps > self._max_steps:
            oldest = self._ring.popleft()
            self._num_steps -= oldest.num_counted
            if self._records.get(oldest.room) is oldest:
                del self._records[oldest.room]

    def _add_slow(self, record: RoomRecord, now: float) -> None:
        """Add a room to the slowest, and drop those that ended long ago."""
        if now > self._slow_until:
            self._slow = [one for one in self._slow if one.at >= now - SLOW_S]
            self._slow_until = min((one.at for one in self._slow), default=now) + SLOW_S
        insort(self._slow, record, key=SECONDS)
        del self._slow[:-MAX_SLOW]
        self._slow_limit_s = self._slow[0].seconds if len(self._slow) == MAX_SLOW else -inf

    # ------------------------------------------------------------ reading

    def slowest(self, now: float, num: int) -> list[RoomRecord]:
        """Return the slowest rooms of the last ``SLOW_S`` seconds, the slowest first."""
        return [one for one in reversed(self._slow) if one.at >= now - SLOW_S][:num]

    def named(self, names: Iterable[str]) -> list[RoomTrace]:
        """Return the traces of rooms by name. "7" means the room 7 as well as the room "7"."""
        return self.traces(room for name in names for room in _rooms_named(name))

    def traces(self, rooms: Iterable[Room]) -> list[RoomTrace]:
        """Return the traces of those rooms that the buffer still has."""
        found = map(self._find, dict.fromkeys(rooms))
        return [self._trace(record) for record in found if record is not None]

    def _find(self, room: Room) -> RoomRecord | None:
        kept = (one for one in (*self.failed, *self._slow) if one.room == room)
        return self._records.get(room) or max(kept, key=attrgetter("at"), default=None)

    def _trace(self, record: RoomRecord) -> RoomTrace:
        facts = record.handle or record
        first = StepKind.OPENED if self._role == "source" else StepKind.ASKED
        steps: list[Any] = [facts.begun, first, None, None]
        if facts.finished is not None:
            steps += (facts.finished, StepKind.FINISHED, None, None)
        places = iter(steps + record.steps)
        shown = [_step(*step) for step in zip(*[places] * WIDTH, strict=True)]
        return RoomTrace(
            endpoint=self._endpoint,
            role=self._role,
            room=str(record.room),
            steps=tuple(sorted(shown, key=lambda step: step.at)),
            request=facts.tag.request,
            traceparent=facts.tag.traceparent,
            left_out=record.left_out,
        )


def _step(at: float, kind: str, peer: Any, detail: Any) -> TraceStep:
    """Return a step as a value. The type of ``detail`` depends on the kind."""
    kind = StepKind(kind)
    if kind is StepKind.PUSHED:
        return TraceStep(kind, at, detail=f"tokens {detail.first} to {detail.end}")
    if isinstance(detail, tuple):
        seconds, num_bytes, mode = detail
        return TraceStep(kind, at, str(peer), seconds, num_bytes, str(mode))
    return TraceStep(kind, at, str(peer or ""), detail=detail or "")


def _rooms_named(name: str) -> tuple[Room, ...]:
    is_number = len(name) <= len(str(MAX_ID)) and name.isascii() and name.isdecimal()
    return (name, int(name)) if is_number and str(int(name)) == name else (name,)
