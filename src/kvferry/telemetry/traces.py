"""Bounded buffer of the steps of an endpoint's rooms.

Recording runs for every frame, so one step costs a dict look-up and an append. The buffer keeps
all steps of open rooms, a ring of the rooms that ended last, and beside the ring the rooms that
failed last and the slowest rooms of the last minutes. Belongs to the loop thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from math import inf
from time import monotonic
from typing import Any

import msgspec

from kvferry.ids import MAX_ID, Peer, Room
from kvferry.layout.intervals import Span
from kvferry.plan.choose import TransferMode
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Arrived,
    Close,
    Complete,
    Drained,
    Envelope,
    Grant,
    Offer,
    RoomMessage,
    StatusPoll,
    Want,
)
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.telemetry.observer import ObservedRoom, ObservedWrite, Observer
from kvferry.telemetry.steps import MAX_TRACE_EVENTS, RoomTrace, StepKind, TraceStep
from kvferry.telemetry.tags import RoomTag

# Strings, because enum members are slower to look up and to encode.
MESSAGES: dict[type[RoomMessage], str] = {
    Offer: StepKind.OFFERED.value,
    Accept: StepKind.ACCEPTED.value,
    Want: StepKind.WANTED.value,
    Grant: StepKind.GRANTED.value,
    Arrived: StepKind.ARRIVED.value,
    StatusPoll: StepKind.STATUS_POLLED.value,
    Close: StepKind.CLOSED.value,
    Complete: StepKind.COMPLETED.value,
    Abort: StepKind.ABORTED.value,
    Drained: StepKind.DRAINED.value,
}
WRITTEN, DONE, FAILED = StepKind.WRITTEN.value, StepKind.DONE.value, StepKind.FAILED.value
RELEASED = StepKind.RELEASED
COPY_MODES = {StepKind.GATHERED: str(TransferMode.STAGED), StepKind.SCATTERED: ""}
LAST_STEPS = (DONE, FAILED, RELEASED)

MAX_FAILURES = 16
# The slowest rooms are kept per period, so that one busy second cannot displace all others.
SLOW_S, PERIOD_S, SLOW_PER_PERIOD = 300.0, 30.0, 8
# Entries of a step in a room's list: time, kind, peer, and the rest by kind.
WIDTH = 4
HALF = MAX_TRACE_EVENTS // 2 * WIDTH


class EndedRoom(msgspec.Struct, frozen=True):
    """Facts of an ended room's handle, and its outcome."""

    room: Room
    tag: RoomTag
    begun: float
    finished: float | None
    at: float
    failure: Failure | None

    @property
    def seconds(self) -> float:
        """Seconds from opening to the end."""
        return self.at - self.begun


@dataclass(slots=True, eq=False)
class RoomRecord:
    """Steps of one attempt at a room, flat: ``WIDTH`` entries per step.

    ``facts`` is the room's handle while it is open, and None before the engine opens it here: a
    peer's offer may come first.
    """

    facts: ObservedRoom | EndedRoom | None
    steps: list[Any]
    left_out: int = 0
    # Steps that count towards the limit of ended rooms.
    num_counted: int = 0

    def steps_after_end(self) -> list[Any]:
        """Return the steps after the room's end; they belong to the next use of its id."""
        last = [i for i, kind in enumerate(self.steps[1::WIDTH], 1) if kind in LAST_STEPS]
        return self.steps[max(last, default=0) * WIDTH :]


class TraceBuffer(Observer):
    """Steps of all open rooms, and of the last ended rooms up to ``max_steps`` steps in all."""

    def __init__(
        self, endpoint: str, role: str, max_steps: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._endpoint = endpoint
        self._role = role
        self._max_steps = max_steps
        self._clock = clock
        # Unopened rooms, open rooms, and the ended rooms of the ring.
        self._records: dict[Room, RoomRecord] = {}
        # Rooms that only peers have named so far, oldest first.
        self._unopened: dict[Room, RoomRecord] = {}
        self._ring: deque[tuple[Room, RoomRecord]] = deque()
        self._num_steps = 0
        # The slowest rooms by the period in which they ended, the slowest last.
        self._slow: dict[float, list[tuple[EndedRoom, RoomRecord]]] = {}
        # A room as fast as this that ends before that time is not among the slowest.
        self._slow_limit_s, self._period_end = -inf, -inf
        self._failed: deque[tuple[EndedRoom, RoomRecord]] = deque(maxlen=MAX_FAILURES)

    # ------------------------------------------------------------ events

    def frame_in(self, envelope: Envelope) -> None:
        """Record a peer's message about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            record = self._records.get(body.room) or self._add_unopened(body.room)
            steps = record.steps
            steps += (self._clock(), MESSAGES[body.__class__], envelope.sender, True)
            if len(steps) > 2 * HALF:
                _drop_middle(record)

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        """Record a message to a peer about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            record = self._records.get(body.room) or self._add_unopened(body.room)
            steps = record.steps
            steps += (self._clock(), MESSAGES[body.__class__], peer, False)
            if len(steps) > 2 * HALF:
                _drop_middle(record)

    def step(self, room: Room, kind: StepKind, tokens: Span | None = None) -> None:
        """Record a push or a release."""
        record = self._record(room, self._clock(), kind, None, tokens)
        if kind is RELEASED and record is not None and not record.num_counted:
            self._add_to_ring(room, record)

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
        self._record(room, at, kind, peer, (seconds, num_bytes, COPY_MODES[kind]))

    def _record(self, room: Room, *step: Any) -> RoomRecord | None:
        record = self._records.get(room)
        if record is not None:
            record.steps += step
            if len(record.steps) > 2 * HALF:
                _drop_middle(record)
        return record

    def _add_unopened(self, room: Room) -> RoomRecord:
        """Start the record of a room that a peer names before the engine opens it here."""
        record = self._records[room] = self._unopened[room] = RoomRecord(None, [])
        if len(self._unopened) > self._max_steps:
            oldest = next(iter(self._unopened))
            del self._unopened[oldest], self._records[oldest]
        return record

    def room_opened(self, room: ObservedRoom) -> None:
        """Start a record, with the steps that peers have caused before."""
        record = self._records.get(room.room)
        if record is None or record.facts is not None:
            # Ids may be used again.
            steps = [] if record is None else record.steps_after_end()
            self._records[room.room] = RoomRecord(room, steps)
        else:
            record.facts = room
            del self._unopened[room.room]

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Record the end. A failed room joins the ring when its memory is released."""
        name, now = room.room, self._clock()
        record = self._records.get(name)
        if record is None:
            return
        begun, failure = room.begun, outcome if isinstance(outcome, Failure) else None
        ended = record.facts = EndedRoom(name, room.tag, begun, room.finished, now, failure)
        if failure is not None:
            reason = f"{failure.code}: {failure.message}"[:1000].encode(errors="replace").decode()
            record.steps += (now, FAILED, None, reason)
            self._failed.append((ended, record))
        else:
            record.steps += (now, DONE, None, None)
            self._add_to_ring(name, record)
        if now - begun > self._slow_limit_s or now >= self._period_end:
            self._add_slow(ended, record)

    def _add_to_ring(self, room: Room, record: RoomRecord) -> None:
        """Count an ended room's steps, and drop the oldest rooms beyond the limit."""
        record.num_counted = len(record.steps) // WIDTH
        self._num_steps += record.num_counted
        ring = self._ring
        ring.append((room, record))
        while self._num_steps > self._max_steps:
            oldest, record = ring.popleft()
            self._num_steps -= record.num_counted
            if self._records.get(oldest) is record:
                del self._records[oldest]

    def _add_slow(self, ended: EndedRoom, record: RoomRecord) -> None:
        """Add a room to the slowest of its period, and drop old periods."""
        period = ended.at // PERIOD_S
        if ended.at >= self._period_end:
            since = period - SLOW_S // PERIOD_S
            self._slow = {each: rooms for each, rooms in self._slow.items() if each >= since}
            self._slow[period], self._period_end = [], (period + 1) * PERIOD_S
        rooms = self._slow[period]
        insort(rooms, (ended, record), key=_seconds)
        del rooms[:-SLOW_PER_PERIOD]
        self._slow_limit_s = rooms[0][0].seconds if len(rooms) == SLOW_PER_PERIOD else -inf

    # ------------------------------------------------------------ reading

    def slowest(self, now: float, num: int) -> list[EndedRoom]:
        """Return the slowest rooms of the last ``SLOW_S`` seconds, the slowest first."""
        since = (now - SLOW_S) // PERIOD_S
        recent = (rooms for period, rooms in self._slow.items() if period >= since)
        return [one for one, _ in nlargest(num, chain.from_iterable(recent), key=_seconds)]

    def failures(self) -> list[EndedRoom]:
        """Return the last failed rooms, the latest last."""
        return [ended for ended, _ in self._failed]

    def named(self, names: Iterable[str]) -> list[RoomTrace]:
        """Return the traces of rooms by name. "7" means the room 7 as well as the room "7"."""
        return self.traces(room for name in names for room in _rooms_named(name))

    def traces(self, rooms: Iterable[Room]) -> list[RoomTrace]:
        """Return the traces of those rooms that the buffer still has."""
        found = map(self._find, dict.fromkeys(rooms))
        return [self._trace(record) for record in found if record is not None]

    def __len__(self) -> int:
        """Number of rooms in the buffer, without those kept only for being slow or failed."""
        return len(self._records)

    def _find(self, room: Room) -> RoomRecord | None:
        found = self._records.get(room)
        if found is not None and found.facts is not None:
            return found
        kept = chain(self._failed, *self._slow.values())
        ended = [one for one in kept if one[0].room == room]
        return max(ended, key=lambda one: one[0].at)[1] if ended else None

    def _trace(self, record: RoomRecord) -> RoomTrace:
        facts = record.facts
        assert facts is not None
        first = StepKind.OPENED if self._role == "source" else StepKind.ASKED
        steps = [facts.begun, first, None, None, *record.steps]
        if facts.finished is not None:
            # Among the last steps, which are never dropped.
            steps[-WIDTH:-WIDTH] = (facts.finished, StepKind.FINISHED, None, None)
        excess = max(0, len(steps) // WIDTH - MAX_TRACE_EVENTS)
        del steps[HALF : HALF + excess * WIDTH]
        places = iter(steps)
        shown = [_step(*step) for step in zip(*[places] * WIDTH, strict=True)]
        return RoomTrace(
            endpoint=self._endpoint,
            role=self._role,
            room=str(facts.room),
            steps=tuple(sorted(shown, key=lambda step: step.at)),
            request=facts.tag.request,
            traceparent=facts.tag.traceparent,
            left_out=record.left_out + excess,
        )


def _seconds(ended: tuple[EndedRoom, RoomRecord]) -> float:
    return ended[0].seconds


def _drop_middle(record: RoomRecord) -> None:
    """Drop the step in the middle, so that a long room keeps its first and its last steps."""
    del record.steps[HALF : HALF + WIDTH]
    record.left_out += 1


def _step(at: float, kind: str, peer: Any, detail: Any) -> TraceStep:
    """Return a step as a value. The type of ``detail`` depends on the kind."""
    kind = StepKind(kind)
    if kind is StepKind.PUSHED:
        return TraceStep(kind, at, detail=f"tokens {detail.first} to {detail.end}")
    if peer is None:
        return TraceStep(kind, at, detail=detail or "")
    if kind is StepKind.WRITTEN or kind in COPY_MODES:
        seconds, num_bytes, mode = detail
        return TraceStep(kind, at, str(peer), False, seconds, num_bytes, str(mode))
    return TraceStep(kind, at, str(peer), detail)


def _rooms_named(name: str) -> tuple[Room, ...]:
    is_number = len(name) <= len(str(MAX_ID)) and name.isascii() and name.isdecimal()
    return (name, int(name)) if is_number and str(int(name)) == name else (name,)
