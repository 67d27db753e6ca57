"""Traces of an endpoint's rooms: every step of those that are open and of the last that ended.

Steps are recorded for every frame, so recording one costs a look-up and four places of a list:
when, what, with which peer, and what else belongs to it. Nothing large is kept. Traces of ended
rooms are packed into bytes, because thousands of small objects that stay alive spoil the CPU's
caches. Beside the last rooms, the slowest of the last minutes and the last that failed are kept.
Belongs to the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from math import ceil, inf
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
from kvferry.telemetry.steps import MAX_TRACE_EVENTS, Moment, RoomTrace, TraceStep
from kvferry.telemetry.tags import RoomTag

# Values of moments, because members of an enumeration are slow to name and to pack.
MESSAGES: dict[type[RoomMessage], str] = {
    Offer: Moment.OFFERED.value,
    Accept: Moment.ACCEPTED.value,
    Want: Moment.WANTED.value,
    Grant: Moment.GRANTED.value,
    Arrived: Moment.ARRIVED.value,
    StatusPoll: Moment.STATUS_POLLED.value,
    Close: Moment.CLOSED.value,
    Complete: Moment.COMPLETED.value,
    Abort: Moment.ABORTED.value,
    Drained: Moment.DRAINED.value,
}
WRITTEN, DONE, FAILED = Moment.WRITTEN.value, Moment.DONE.value, Moment.FAILED.value
RELEASED = Moment.RELEASED
COPIES = {Moment.GATHERED: str(TransferMode.STAGED), Moment.SCATTERED: ""}
OVER = (DONE, FAILED, RELEASED)

MAX_FAILURES = 16
# Rooms that ended just now still get steps, so they are packed a little later.
NUM_UNPACKED = 16
# How far back the slowest rooms are looked for, in parts of so many seconds, so many of each.
SLOW_S, PART_S, MOST_OF_A_PART = 300.0, 30.0, 8

# Places of a step, and half of the steps that a trace shows.
WIDE = 4
HALF = MAX_TRACE_EVENTS // 2 * WIDE
# A trace that is longer loses its middle.
MOST_PLACES = 4 * HALF

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list).decode


class EndedRoom(msgspec.Struct, frozen=True):
    """An ended room: facts of its handle, and its outcome."""

    room: Room
    tag: RoomTag
    begun: float
    finished: float | None
    at: float
    failure: Failure | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.at - self.begun


class OpenTrace(list[Any]):
    """The steps of one attempt at a room, each in its places.

    ``about`` is its handle while it is open, and None before it was opened here: a peer's offer
    may come first. ``num_counted`` steps count towards the limit of ended rooms.
    """

    __slots__ = ("about", "num_counted", "packed")
    about: ObservedRoom | EndedRoom | None
    num_counted: int
    packed: bytes

    def pack(self) -> None:
        """Make one value of the steps so far."""
        self.packed = _pack(self)
        self.clear()

    def all_steps(self) -> list[Any]:
        """Packed or not."""
        return [*_unpack(self.packed), *self] if self.packed else [*self]

    def since_end(self) -> list[Any]:
        """Return the steps recorded after the room was over: they belong to the next attempt."""
        steps = self.all_steps()
        over = [i for i, moment in enumerate(steps[1::WIDE], 1) if moment in OVER]
        return steps[max(over, default=0) * WIDE :]


def _new_trace(about: ObservedRoom | None, steps: Iterable[Any] = ()) -> OpenTrace:
    trace = OpenTrace(steps)
    trace.about, trace.packed, trace.num_counted = about, b"", 0
    return trace


class SlowRooms:
    """The slowest rooms of each part of the last ``SLOW_S`` seconds.

    On a busy endpoint the last rooms are those of a second, and the one that somebody asks for is
    older. The slowest of all are among the slowest of their part.
    """

    def __init__(self) -> None:
        self._parts: deque[list[tuple[EndedRoom, OpenTrace]]] = deque(
            maxlen=ceil(SLOW_S / PART_S) + 1
        )
        # A room that is no slower than this, and ended before that, is not added.
        self.least_s, self.until = -inf, -inf

    def add(self, ended: EndedRoom, trace: OpenTrace) -> None:
        """A room has ended, later than those before it."""
        if ended.at >= self.until:
            self._parts.append([])
            self.until = (ended.at // PART_S + 1) * PART_S
        part = self._parts[-1]
        part.append((ended, trace))
        part.sort(key=lambda one: -one[0].seconds)
        del part[MOST_OF_A_PART:]
        self.least_s = part[-1][0].seconds if len(part) == MOST_OF_A_PART else -inf

    def __iter__(self) -> Iterator[tuple[EndedRoom, OpenTrace]]:
        return (one for part in self._parts for one in part)

    def slowest(self, now: float, most: int = MOST_OF_A_PART) -> list[EndedRoom]:
        """The slowest of the last ``SLOW_S`` seconds, the slowest first."""
        since = (now - SLOW_S) // PART_S * PART_S
        return nlargest(most, (one for one, _ in self if one.at >= since), lambda one: one.seconds)


class TraceBuffer(Observer):
    """Traces of open rooms, and of ended rooms as many as ``most_steps`` steps hold."""

    def __init__(
        self, endpoint: str, role: str, most_steps: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._endpoint = endpoint
        self._role = role
        self._most_steps = most_steps
        self._clock = clock
        # By room: unopened, open, and ended ones that are within the limit.
        self._traces: dict[Room, OpenTrace] = {}
        # Of rooms that only peers have named so far, the oldest first.
        self._unopened: dict[Room, OpenTrace] = {}
        self._ended: deque[tuple[Room, OpenTrace]] = deque()
        self._num_steps = 0
        self.slow = SlowRooms()
        self.failures: deque[tuple[EndedRoom, OpenTrace]] = deque(maxlen=MAX_FAILURES)

    # ------------------------------------------------------------ events

    def frame_in(self, envelope: Envelope) -> None:
        """Record what a peer says about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            trace = self._traces.get(body.room)
            if trace is None:
                trace = self._named_by_peer(body.room)
            trace += (self._clock(), MESSAGES[body.__class__], envelope.sender, True)
            if len(trace) > MOST_PLACES:
                shorten(trace)

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        """Record what is said to a peer about a room."""
        body = envelope.body
        if isinstance(body, RoomMessage):
            trace = self._traces.get(body.room)
            if trace is None:
                trace = self._named_by_peer(body.room)
            trace += (self._clock(), MESSAGES[body.__class__], peer, False)

    def step(self, room: Room, moment: Moment, tokens: Span | None = None) -> None:
        """Record a push or a release."""
        trace = self._traces.get(room)
        if trace is None:
            return
        trace += (self._clock(), moment, None, tokens)
        if len(trace) > MOST_PLACES:
            shorten(trace)
        if moment is RELEASED and not trace.num_counted:
            self._count(room, trace)

    def write(self, job: ObservedWrite, at: float) -> None:
        """Record a write that succeeded."""
        if job.fate is None:
            took = job.seconds, job.num_bytes, job.mode
            transfer = job.action.transfer
            self._add(transfer.room, at, WRITTEN, transfer.peer, took)

    def copy(
        self, room: Room, peer: Peer, moment: Moment, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Record a gather or a scatter."""
        self._add(room, at, moment, peer, (seconds, num_bytes, COPIES[moment]))

    def _add(self, room: Room, *step: Any) -> None:
        """Add a step of an open room."""
        trace = self._traces.get(room)
        if trace is not None:
            trace += step
            if len(trace) > MOST_PLACES:
                shorten(trace)

    def _named_by_peer(self, room: Room) -> OpenTrace:
        """Begin the trace of a room that was not opened here yet."""
        trace = self._traces[room] = self._unopened[room] = _new_trace(None)
        if len(self._unopened) > self._most_steps:
            oldest = next(iter(self._unopened))
            del self._unopened[oldest], self._traces[oldest]
        return trace

    def room_opened(self, room: ObservedRoom) -> None:
        """Begin a trace, with what peers have said about the room before."""
        trace = self._traces.get(room.room)
        if trace is None or trace.about is not None:
            # An id may be used again.
            trace = _new_trace(room, () if trace is None else trace.since_end())
            self._traces[room.room] = trace
        else:
            trace.about = room
            del self._unopened[room.room]

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Record the end. A failed room's trace counts as ended once its memory is released."""
        name, now = room.room, self._clock()
        trace = self._traces.get(name)
        if trace is None:
            return
        begun, failure = room.begun, outcome if isinstance(outcome, Failure) else None
        ended = trace.about = EndedRoom(name, room.tag, begun, room.finished, now, failure)
        if failure is not None:
            why = f"{failure.code}: {failure.message}"[:1000].encode(errors="replace").decode()
            trace += (now, FAILED, None, why)
            self.failures.append((ended, trace))
        else:
            trace += (now, DONE, None, None)
            self._count(name, trace)
        slow = self.slow
        if now - begun > slow.least_s or now >= slow.until:
            slow.add(ended, trace)

    def _count(self, room: Room, trace: OpenTrace) -> None:
        """Count an ended trace, and forget the oldest of those that are too many."""
        trace.num_counted = len(trace) // WIDE
        self._num_steps += trace.num_counted
        ended = self._ended
        ended.append((room, trace))
        if len(ended) > NUM_UNPACKED:
            ended[-1 - NUM_UNPACKED][1].pack()
        while self._num_steps > self._most_steps:
            oldest, trace = ended.popleft()
            self._num_steps -= trace.num_counted
            if self._traces.get(oldest) is trace:
                del self._traces[oldest]

    # ------------------------------------------------------------ reading

    def named(self, names: Iterable[str]) -> list[RoomTrace]:
        """The traces of rooms by their names: a text, and the number that it is."""
        return self.of([room for name in names for room in _meant(name)])

    def of(self, rooms: Iterable[Room]) -> list[RoomTrace]:
        """The traces of those rooms, without the ones that are forgotten or were not opened."""
        found = map(self._find, dict.fromkeys(rooms))
        return [self._told(trace) for trace in found if trace is not None]

    def _find(self, room: Room) -> OpenTrace | None:
        found = self._traces.get(room)
        if found is not None and found.about is not None:
            return found
        kept = [one for one in (*self.failures, *self.slow) if one[0].room == room]
        return max(kept, key=lambda one: one[0].at)[1] if kept else None

    def _told(self, trace: OpenTrace) -> RoomTrace:
        """As a value that can be shown and sent."""
        about = trace.about
        assert about is not None
        begins = Moment.OPENED if self._role == "source" else Moment.ASKED
        steps = [about.begun, begins, None, None, *trace.all_steps()]
        if about.finished is not None:
            # Among the last steps, of which none are left out.
            steps[-WIDE:-WIDE] = (about.finished, Moment.FINISHED, None, None)
        if len(steps) > 2 * HALF:
            shorten(steps)
        told = [_step(*step) for step in _each(steps) if step[1] is not None]
        return RoomTrace(
            endpoint=self._endpoint,
            role=self._role,
            room=str(about.room),
            steps=tuple(sorted(told, key=lambda step: step.at)),
            request=about.tag.request,
            traceparent=about.tag.traceparent,
            left_out=sum(step[3] for step in _each(steps) if step[1] is None),
        )


def _each(steps: list[Any]) -> Iterator[tuple[Any, ...]]:
    places = iter(steps)
    return zip(*[places] * WIDE, strict=True)


def shorten(steps: list[Any]) -> None:
    """Leave the beginning and the end, and between them a place that says how many are missing."""
    middle = steps[HALF:-HALF]
    missing = sum(1 if step[1] is not None else step[3] for step in _each(middle))
    steps[HALF:-HALF] = (middle[0], None, None, missing)


def _step(at: float, moment: str, who: Any, more: Any) -> TraceStep:
    """As a value: what stands behind the moment depends on it. Packed ones have lists."""
    kind = Moment(moment)
    if kind is Moment.PUSHED:
        first, end = more if isinstance(more, list) else (more.first, more.end)
        return TraceStep(kind, at, detail=f"tokens {first} to {end}")
    if who is None:
        return TraceStep(kind, at, detail=more or "")
    peer = str(Peer(*who) if isinstance(who, list) else who)
    if kind is Moment.WRITTEN or kind in COPIES:
        seconds, num_bytes, mode = more
        return TraceStep(kind, at, peer, False, seconds, num_bytes, str(mode))
    return TraceStep(kind, at, peer, more)


def _meant(name: str) -> tuple[Room, ...]:
    is_number = len(name) <= len(str(MAX_ID)) and name.isascii() and name.isdecimal()
    return (name, int(name)) if is_number and str(int(name)) == name else (name,)
