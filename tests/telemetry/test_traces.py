"""Trace buffers: steps of rooms, their bounds, and the status that endpoints report."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import get_args

import msgspec
import pytest
from endpoint.jobs import over as ended_write
from endpoint.jobs import write_action
from endpoint.test_pair_in_process import AT_ONCE, WAIT_S, pair_by

from kvferry.endpoint.handles import Handle
from kvferry.ids import Generation, Peer, Room, Session
from kvferry.layout.intervals import Span
from kvferry.plan.choose import TransferMode
from kvferry.plan.plan import Request
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.messages import (
    Accept,
    Body,
    Envelope,
    Heartbeat,
    Offer,
    PageTableMessage,
    RoomMessage,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome
from kvferry.telemetry.steps import (
    MAX_TRACE_EVENTS,
    NO_TAG,
    RoomTag,
    RoomTrace,
    StepKind,
    TraceStep,
)
from kvferry.telemetry.traces import (
    HALF,
    MAX_SLOW,
    MESSAGES,
    SLOW_S,
    TraceBuffer,
)
from kvferry.telemetry.waterfall import build_waterfall

PEER = Peer("d", 3)


def accept(room: Room) -> Envelope:
    return Envelope(PEER, 1, Session(1, 1), 1, Accept(room, Generation(1)))


def offer(room: Room, num_pages: int = 0) -> Envelope:
    tables = (PageTableMessage("kv", (7,) * num_pages),) if num_pages else ()
    body = Offer(room, Generation(1), Request(4), tables, 1.0)
    return Envelope(PEER, 1, Session(1, 1), 1, body)


class ClockedBuffer:
    """A trace buffer with a manual clock."""

    def __init__(self, most_steps: int, role: str = "source") -> None:
        self.now = 30_000.0
        self.traces = TraceBuffer("p/0", role, most_steps, lambda: self.now)

    def opened(self, room: Room, tag: RoomTag = NO_TAG) -> Handle:
        """A room that begins now."""
        handle = Handle(room)
        handle.begun, handle.tag = self.now, tag
        self.traces.room_opened(handle)
        return handle

    def pushed(self, room: Room, first: int, end: int) -> None:
        self.traces.step(room, StepKind.PUSHED, Span(first, end))

    def ended(self, handle: Handle, outcome: Outcome = Done()) -> None:  # noqa: B008 - frozen
        self.traces.room_ended(handle, outcome)

    def over(self, room: Room, seconds: float = 0.0) -> None:
        """A room that took so long, and has ended."""
        self.now += 1e-6
        handle = self.opened(room)
        handle.begun = self.now - seconds
        self.ended(handle)

    def told(self, name: str) -> RoomTrace | None:
        return next(iter(self.traces.named([name])), None)

    def knows(self, *rooms: Room) -> list[Room]:
        return [room for room in rooms if self.told(str(room))]


def told_steps(buffer: ClockedBuffer, name: str) -> tuple[TraceStep, ...]:
    trace = buffer.told(name)
    assert trace is not None
    return trace.steps


def kinds(trace: RoomTrace | None) -> list[str]:
    assert trace is not None
    return [str(step.step) for step in trace.steps]


def test_oldest_rooms_are_dropped() -> None:
    buffer = ClockedBuffer(40)
    for room in range(200):
        buffer.over(room)
    known = buffer.knows(*range(200))
    assert 40 <= len(known) <= 40 + MAX_SLOW
    assert known[-40:] == list(range(160, 200))
    assert kinds(buffer.told("199")) == ["opened", "done"]


def test_open_rooms_keep_their_steps() -> None:
    buffer = ClockedBuffer(16)
    handle = buffer.opened("long", RoomTag("req"))
    buffer.pushed("long", 0, 4)
    for room in range(100):
        if room == 50:
            buffer.pushed("long", 4, 8)
        buffer.over(room)
        assert "pushed" in kinds(buffer.told("long"))
    buffer.ended(handle)
    trace = buffer.told("long")
    assert kinds(trace) == ["opened", "pushed", "pushed", "done"]
    assert trace is not None
    assert trace.request == "req"


@pytest.mark.parametrize(("role", "first"), [("source", "opened"), ("target", "asked")])
def test_a_new_room_has_a_trace(role: str, first: str) -> None:
    buffer = ClockedBuffer(16, role)
    buffer.opened(7, RoomTag("req"))
    trace = buffer.told("7")
    assert (kinds(trace), trace and trace.request) == ([first], "req")


def test_frames_about_unopened_rooms_are_not_kept() -> None:
    buffer = ClockedBuffer(16)
    for room in range(100):
        buffer.traces.frame_in(offer(room))
    assert len(buffer.traces._records) == 0
    buffer.opened(99)
    assert kinds(buffer.told("99")) == ["opened"]


def test_a_reused_id_shows_its_last_use() -> None:
    buffer = ClockedBuffer(1000)
    handle = buffer.opened(1, RoomTag("first"))
    buffer.ended(handle, Failure.of(FailureCode.DEADLINE, "late"))
    buffer.traces.step(1, StepKind.RELEASED)
    buffer.now += 1.0
    again = buffer.opened(1, RoomTag("second"))
    trace = buffer.told("1")
    assert (kinds(trace), trace and trace.request) == (["opened"], "second")
    buffer.ended(again)
    assert kinds(buffer.told("1")) == ["opened", "done"]


def test_a_string_and_a_number_may_share_a_name() -> None:
    buffer = ClockedBuffer(1000)
    for room in (7, "7", "07"):
        buffer.over(room)
    named = buffer.traces.named
    assert len(named(["7"])) == 2
    assert len(named(["07"])) == 1
    assert named(["\u0667", "-7", "7.0", ""]) == []


def test_a_long_room_keeps_its_first_and_last_steps() -> None:
    buffer = ClockedBuffer(100)
    handle = buffer.opened("r", RoomTag("req", "00-1-2-01"))
    for i in range(3000):
        buffer.now += 1.0
        buffer.pushed("r", i, i + 1)
    assert len(told_steps(buffer, "r")) <= MAX_TRACE_EVENTS
    buffer.now += 1.0
    buffer.ended(handle)
    trace = buffer.told("r")
    assert trace is not None
    assert MAX_TRACE_EVENTS - 1 <= len(trace.steps) <= MAX_TRACE_EVENTS
    assert len(trace.steps) + trace.left_out == 3002
    assert (trace.steps[0].step, trace.steps[-1].step) == (StepKind.OPENED, StepKind.DONE)
    assert [trace.steps[i].detail for i in (1, -2)] == ["tokens 0 to 1", "tokens 2999 to 3000"]
    assert (trace.request, trace.traceparent) == ("req", "00-1-2-01")


def test_frames_about_one_room_are_bounded() -> None:
    buffer = ClockedBuffer(100)
    buffer.opened(1)
    for _ in range(3000):
        buffer.traces.frame_in(accept(1))
    assert len(buffer.traces._records[1].steps) <= 2 * HALF


class History:
    """A buffer under random events, with the full history of each room."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.buffer = ClockedBuffer(24)
        self.held: dict[Room, Handle] = {}
        self.happened: dict[Room, list[str]] = defaultdict(list)
        self.ended: dict[Room, list[str]] = {}

    def step(self, fresh: Room) -> None:
        """Something happens, most often to a new room that is soon over."""
        self.buffer.now += self.random.choice([1e-6, 0.001, 0.5])
        match self.random.randrange(6):
            case 0 | 1:
                self._begin(fresh)
            case 2 if self.held:
                self._offer(self.random.choice(sorted(self.held, key=str)))
            case 3 | 4 if self.held:
                self._push(self.random.choice(sorted(self.held, key=str)))
            case _ if self.held:
                self._end(self.random.choice(sorted(self.held, key=str)))

    def _offer(self, room: Room) -> None:
        self.buffer.traces.frame_in(offer(room))
        self.buffer.traces.frame_out(PEER, accept(room))
        self.happened[room] += ["offered", "accepted"]

    def _begin(self, room: Room) -> None:
        self.held[room] = self.buffer.opened(room)
        self.happened[room] += ["opened"]

    def _push(self, room: Room) -> None:
        self.buffer.pushed(room, 0, 1)
        self.happened[room] += ["pushed"]

    def _end(self, room: Room) -> None:
        handle = self.held.pop(room)
        if self.random.random() < 0.1:
            self.buffer.ended(handle, Failure.of(FailureCode.ABORTED, "given up"))
            self.buffer.traces.step(room, StepKind.RELEASED)
            self.happened[room] += ["failed", "released"]
        else:
            self.buffer.ended(handle)
            self.happened[room] += ["done"]
        self.ended[room] = self.happened.pop(room)

    def check(self) -> None:
        """Open rooms are shown in full, ended ones in full or not at all."""
        for room in self.held:
            assert sorted(kinds(self.buffer.told(str(room)))) == sorted(self.happened[room])
        for room, steps in self.ended.items():
            trace = self.buffer.told(str(room))
            assert trace is None or sorted(kinds(trace)) == sorted(steps)
        traces = self.buffer.traces
        slow = traces.slowest(self.buffer.now, 1000)
        lasting = [one.room for one in (*traces.failed, *slow)]
        assert self.buffer.knows(*lasting) == lasting


@pytest.mark.parametrize("seed", range(20))
def test_random_events_leave_whole_traces_in_a_bounded_buffer(seed: int) -> None:
    history = History(seed)
    for number in range(1, 401):
        history.step(number)
        if number % 20 == 0:
            history.check()
    buffer = history.buffer
    for handle in history.held.values():
        buffer.ended(handle)
    for number in range(1000, 1100):
        buffer.now += 1.0
        buffer.over(number, seconds=1000.0)
    assert len(buffer.traces._records) == 24
    assert buffer.knows(*range(1076, 1100)) == list(range(1076, 1100))


def test_large_messages_are_not_kept() -> None:
    """Offers have thousands of pages, and closes a megabyte of metadata."""
    buffer = ClockedBuffer(100)
    handle = buffer.opened("r", RoomTag("req", ""))
    buffer.traces.frame_in(offer("r", num_pages=5000))
    buffer.traces.frame_out(PEER, accept("r"))
    buffer.pushed("r", 0, 4)
    buffer.traces.write(ended_write(TransferMode.RUNS), buffer.now)
    buffer.ended(handle, Done(b"x" * 1000))
    assert len(msgspec.msgpack.encode(buffer.traces._records["r"].steps)) < 500
    trace = buffer.told("r")
    assert kinds(trace) == ["opened", "offered", "accepted", "pushed", "written", "done"]
    assert trace is not None
    peers = {str(step.step): step.peer for step in trace.steps if step.peer}
    assert peers["offered"] == peers["accepted"] == "d/3"
    assert peers["written"] == str(write_action().transfer.peer)


def test_every_message_about_a_room_is_a_step() -> None:
    assert set(MESSAGES) == {kind for kind in get_args(Body) if issubclass(kind, RoomMessage)}
    assert len(set(MESSAGES.values())) == len(MESSAGES)


def test_heartbeats_are_not_steps() -> None:
    buffer = ClockedBuffer(16)
    buffer.traces.frame_in(Envelope(PEER, 1, Session(1, 1), 1, Heartbeat()))
    assert len(buffer.traces._records) == 0


def test_a_trace_shows_every_kind_of_step_and_later_ones() -> None:
    buffer = ClockedBuffer(10_000)
    handle = buffer.opened("r", RoomTag("req", "00-1-2-01"))
    buffer.traces.frame_in(offer("r"))
    buffer.pushed("r", 0, 1)
    handle.finished = buffer.now
    buffer.traces.copy("r", PEER, StepKind.GATHERED, buffer.now, 0.5, 9)
    buffer.traces.write(ended_write(TransferMode.RUNS), buffer.now)
    buffer.ended(handle)
    trace = buffer.told("r")
    assert trace is not None
    assert {"offered", "pushed", "gathered", "written", "finished"} <= set(kinds(trace))
    assert (trace.request, trace.traceparent) == ("req", "00-1-2-01")
    buffer.traces.frame_out(PEER, accept("r"))
    assert kinds(buffer.told("r"))[-1] == "accepted"


def test_a_failed_rooms_release_is_recorded_after_many_others() -> None:
    buffer = ClockedBuffer(16)
    handle = buffer.opened(1)
    buffer.ended(handle, Failure.of(FailureCode.DEADLINE, "late \udc80"))
    for number in range(2, 50):
        buffer.over(number)
    buffer.now += 1.0
    buffer.traces.step(1, StepKind.RELEASED)
    for number in range(50, 100):
        trace = buffer.told("1")
        assert kinds(trace) == ["opened", "failed", "released"]
        buffer.now += 1.0
        buffer.over(number)
    assert trace is not None
    assert trace.steps[1].detail == "deadline: late ?"


def test_slowest_rooms_survive_many_faster_ones() -> None:
    """With their steps: what took long has to be explained."""
    buffer = ClockedBuffer(64)
    start = buffer.now
    for number in range(24_000):
        buffer.now = start + number * 0.01
        buffer.over(number, seconds=5.0 if number % 2400 == 7 else 0.001 * (number % 90))
    slowest = [one.room for one in buffer.traces.slowest(buffer.now, 10)]
    assert sorted(map(int, slowest)) == [7 + 2400 * i for i in range(10)]
    assert kinds(buffer.told("7")) == ["opened", "done"]


def test_old_slow_rooms_are_dropped() -> None:
    buffer = ClockedBuffer(16)
    buffer.over("slow", seconds=9.0)
    buffer.now += SLOW_S + 1.0
    assert buffer.traces.slowest(buffer.now, 8) == []
    for number in range(200):
        buffer.over(number)
    assert buffer.told("slow") is None
    assert len(buffer.traces.slowest(buffer.now, 1000)) == MAX_SLOW


@pytest.mark.parametrize("seconds", [range(50), range(50, 0, -1)], ids=["rising", "falling"])
def test_the_slowest_come_first(seconds: range) -> None:
    buffer = ClockedBuffer(1000)
    for took in seconds:
        buffer.over(f"{took}", seconds=float(took))
    longest = sorted(seconds, reverse=True)[:3]
    slowest = buffer.traces.slowest(buffer.now, 3)
    assert [one.room for one in slowest] == [str(s) for s in longest]


def test_equally_slow_rooms_need_no_order() -> None:
    """A room's id is a number or a text."""
    buffer = ClockedBuffer(100)
    for room in (1, "one", 2, "two", *range(3, 20)):
        buffer.over(room)
    assert len(buffer.traces.slowest(buffer.now, 8)) == 8


def test_heartbeats_without_clock_fields_decode() -> None:
    """Its fields may be left out: who lacks them is understood."""
    frame = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat(1.5, 2.5, 3.5))
    assert decode(encode(frame)) == frame
    bare = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat())
    old = encode(bare).replace(b"\x94\xa9heartbeat\xc0\xc0\xc0", b"\x91\xa9heartbeat")
    assert len(old) == len(encode(bare)) - 3
    assert decode(old) == bare


def test_two_endpoints_traces_join_to_one_waterfall() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open(7, request="req-7")
        into = pair.target.receive(7, prefill=pair.view, tokens=8, pages=[1, 2])
        out.push((0, 8), [3, 4])
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
        out.wait_released(WAIT_S)
        traces = [pair.source.trace(7), pair.target.trace(7)]
        views = [each.view().result(WAIT_S) for each in pair[:2]]
        assert pair.source.trace(8) is None
    known = [trace for trace in traces if trace is not None]
    assert {"opened", "offered", "pushed", "written", "finished", "closed", "done"} <= set(
        kinds(known[0])
    )
    assert {"asked", "offered", "closed", "done"} <= set(kinds(known[1]))
    at = {step.step: step.at for step in known[0].steps}
    assert at[StepKind.WRITTEN] <= at[StepKind.CLOSED]
    whole = build_waterfall(known)
    assert (whole.outcome, whole.request, whole.room) == ("done", "req-7", "7")
    assert sum(bar.num_bytes for bar in whole.bars) == sum(
        link.num_bytes for link in views[0].links
    )
    assert [(view.role, view.num_done, view.num_open) for view in views] == [
        ("source", 1, 0),
        ("target", 1, 0),
    ]
    assert views[0].layout == views[1].layout
    assert views[0].slow[0].request == "req-7"


def test_a_failure_is_reported_with_its_reason() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open("gone", request="req-8")
        out.abort()
        out.wait_released(WAIT_S)
        view = pair.source.view().result(WAIT_S)
        trace = pair.source.trace("gone")
    (failure,) = view.failures
    assert (failure.room, failure.code, failure.request) == ("gone", "aborted", "req-8")
    assert kinds(trace)[-2:] == ["failed", "released"]


def test_a_cancelled_status_request_is_ignored() -> None:
    with pair_by(AT_ONCE) as pair:
        held, going = threading.Event(), threading.Event()

        def hold() -> None:
            going.set()
            held.wait(WAIT_S)

        pair.source._loop.submit(hold)
        assert going.wait(WAIT_S)
        given_up = pair.source.view()
        assert given_up.cancel()
        held.set()
        assert pair.source.view().result(WAIT_S).role == "source"
