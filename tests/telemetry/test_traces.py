"""Traces and views: what two endpoints tell of their rooms, and that it stays bounded."""

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
from kvferry.telemetry.reports import ReportRequest
from kvferry.telemetry.steps import MAX_TRACE_EVENTS, Moment, RoomTrace
from kvferry.telemetry.tags import NOBODYS, RoomTag
from kvferry.telemetry.traces import (
    MESSAGES,
    MOST_OF_A_PART,
    MOST_PLACES,
    NUM_UNPACKED,
    PART_S,
    SLOW_S,
    TraceBuffer,
)
from kvferry.telemetry.waterfall import join

PEER = Peer("d", 3)


def accept(room: Room) -> Envelope:
    return Envelope(PEER, 1, Session(1, 1), 1, Accept(room, Generation(1)))


def offer(room: Room, num_pages: int = 0) -> Envelope:
    tables = (PageTableMessage("kv", (7,) * num_pages),) if num_pages else ()
    body = Offer(room, Generation(1), Request(4), tables, 1.0)
    return Envelope(PEER, 1, Session(1, 1), 1, body)


class Book:
    """A buffer with a clock that stands still until it is set."""

    def __init__(self, most_steps: int, role: str = "source") -> None:
        self.now = 1000 * PART_S
        self.traces = TraceBuffer("p/0", role, most_steps, lambda: self.now)

    def opened(self, room: Room, tag: RoomTag = NOBODYS) -> Handle:
        """A room that begins now."""
        handle = Handle(room)
        handle.begun, handle.tag = self.now, tag
        self.traces.room_opened(handle)
        return handle

    def pushed(self, room: Room, first: int, end: int) -> None:
        self.traces.step(room, Moment.PUSHED, Span(first, end))

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


def moments(trace: RoomTrace | None) -> list[str]:
    assert trace is not None
    return [str(step.step) for step in trace.steps]


def test_the_oldest_rooms_are_forgotten() -> None:
    book = Book(40)
    for room in range(100):
        book.over(room)
    known = book.knows(*range(100))
    assert 40 <= len(known) <= 40 + MOST_OF_A_PART
    assert known[-40:] == list(range(60, 100))
    assert moments(book.told("99")) == ["opened", "done"]


def test_a_room_that_goes_on_keeps_its_steps() -> None:
    book = Book(16)
    handle = book.opened("long", RoomTag("req"))
    book.pushed("long", 0, 4)
    for room in range(100):
        if room == 50:
            book.pushed("long", 4, 8)
        book.over(room)
        assert "pushed" in moments(book.told("long"))
    book.ended(handle)
    trace = book.told("long")
    assert moments(trace) == ["opened", "pushed", "pushed", "done"]
    assert trace is not None
    assert trace.request == "req"


@pytest.mark.parametrize(("role", "first"), [("source", "opened"), ("target", "asked")])
def test_a_room_that_has_just_begun_has_a_trace(role: str, first: str) -> None:
    book = Book(16, role)
    book.opened(7, RoomTag("req"))
    trace = book.told("7")
    assert (moments(trace), trace and trace.request) == ([first], "req")


def test_an_offer_that_came_before_its_room_is_part_of_its_trace() -> None:
    book = Book(16)
    book.traces.frame_in(offer(7))
    assert book.told("7") is None
    for room in range(100, 200):
        book.over(room)
    handle = book.opened(7)
    assert set(moments(book.told("7"))) == {"opened", "offered"}
    for room in range(200, 300):
        book.over(room)
    book.ended(handle)
    assert set(moments(book.told("7"))) == {"opened", "offered", "done"}


def test_offers_for_rooms_that_nobody_opens_are_bounded() -> None:
    book = Book(16)
    for room in range(100):
        book.traces.frame_in(offer(room))
    assert len(book.traces._traces) == 16
    book.opened(0)
    book.opened(99)
    assert [moments(book.told(name)) for name in ("0", "99")] == [
        ["opened"],
        ["opened", "offered"],
    ]


def test_an_id_that_is_used_again_tells_of_its_last_use() -> None:
    book = Book(1000)
    handle = book.opened(1, RoomTag("first"))
    book.ended(handle, Failure.of(FailureCode.DEADLINE, "late"))
    book.traces.step(1, Moment.RELEASED)
    book.traces.frame_in(offer(1))
    book.now += 1.0
    again = book.opened(1, RoomTag("second"))
    trace = book.told("1")
    assert (moments(trace), trace and trace.request) == (["offered", "opened"], "second")
    book.ended(again)
    assert moments(book.told("1")) == ["offered", "opened", "done"]


def test_a_text_and_a_number_may_have_one_name() -> None:
    book = Book(1000)
    for room in (7, "7", "07"):
        book.over(room)
    named = book.traces.named
    assert len(named(["7"])) == 2
    assert len(named(["07"])) == 1
    assert named(["\u0667", "-7", "7.0", ""]) == []


def test_of_a_long_room_its_beginning_and_its_end_are_told() -> None:
    book = Book(100)
    handle = book.opened("r", RoomTag("req", "00-1-2-01"))
    for i in range(3000):
        book.now += 1.0
        book.pushed("r", i, i + 1)
    assert len(book.traces._traces["r"]) <= MOST_PLACES
    book.now += 1.0
    book.ended(handle)
    trace = book.told("r")
    assert trace is not None
    assert (len(trace.steps), trace.left_out) == (MAX_TRACE_EVENTS, 3002 - MAX_TRACE_EVENTS)
    assert (trace.steps[0].step, trace.steps[-1].step) == (Moment.OPENED, Moment.DONE)
    assert [trace.steps[i].detail for i in (1, -2)] == ["tokens 0 to 1", "tokens 2999 to 3000"]
    assert (trace.request, trace.traceparent) == ("req", "00-1-2-01")


def test_a_room_of_which_a_peer_never_stops_talking_is_bounded() -> None:
    book = Book(100)
    for _ in range(3000):
        book.traces.frame_in(accept(1))
    assert len(book.traces._traces[1]) <= MOST_PLACES


class Chronicle:
    """A buffer, and beside it everything that ever happened to each room."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.book = Book(24)
        self.held: dict[Room, Handle] = {}
        self.early: set[Room] = set()
        self.happened: dict[Room, list[str]] = defaultdict(list)
        self.ended: dict[Room, list[str]] = {}

    def step(self, fresh: Room) -> None:
        """Something happens, most often to a new room that is soon over."""
        self.book.now += self.random.choice([1e-6, 0.001, 0.5])
        match self.random.randrange(6):
            case 0 if len(self.early) < 24:
                self._offer(fresh)
            case 1 if self.early:
                self._begin(self.random.choice(sorted(self.early, key=str)))
            case 2:
                self._begin(fresh)
            case 3 | 4 if self.held:
                self._push(self.random.choice(sorted(self.held, key=str)))
            case _ if self.held:
                self._end(self.random.choice(sorted(self.held, key=str)))

    def _offer(self, room: Room) -> None:
        self.book.traces.frame_in(offer(room))
        self.book.traces.frame_out(PEER, accept(room))
        self.early.add(room)
        self.happened[room] += ["offered", "accepted"]

    def _begin(self, room: Room) -> None:
        self.early.discard(room)
        self.held[room] = self.book.opened(room)
        self.happened[room] += ["opened"]

    def _push(self, room: Room) -> None:
        self.book.pushed(room, 0, 1)
        self.happened[room] += ["pushed"]

    def _end(self, room: Room) -> None:
        handle = self.held.pop(room)
        if self.random.random() < 0.1:
            self.book.ended(handle, Failure.of(FailureCode.ABORTED, "given up"))
            self.book.traces.step(room, Moment.RELEASED)
            self.happened[room] += ["failed", "released"]
        else:
            self.book.ended(handle)
            self.happened[room] += ["done"]
        self.ended[room] = self.happened.pop(room)

    def demand_true(self) -> None:
        """Open rooms are shown in full, ended ones in full or not at all."""
        for room in self.held:
            assert sorted(moments(self.book.told(str(room)))) == sorted(self.happened[room])
        for room, steps in self.ended.items():
            trace = self.book.told(str(room))
            assert trace is None or sorted(moments(trace)) == sorted(steps)
        traces = self.book.traces
        lasting = [one.room for one, _ in (*traces.failures, *traces.slow)]
        assert self.book.knows(*lasting) == lasting


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_traces_are_whole_and_the_buffer_is_bounded(seed: int) -> None:
    chronicle = Chronicle(seed)
    for number in range(1, 401):
        chronicle.step(number)
        if number % 20 == 0:
            chronicle.demand_true()
    book = chronicle.book
    for handle in chronicle.held.values():
        book.ended(handle)
    for number in range(1000, 1100):
        book.now += 1.0
        book.over(number, seconds=1000.0)
    assert set(book.traces._traces) == chronicle.early | set(range(1076, 1100))


def test_nothing_large_is_kept() -> None:
    """Offers have thousands of pages, and closes a megabyte of metadata."""
    book = Book(100)
    handle = book.opened("r", RoomTag("req", ""))
    book.traces.frame_in(offer("r", num_pages=5000))
    book.traces.frame_out(PEER, accept("r"))
    book.pushed("r", 0, 4)
    book.traces.write(ended_write(TransferMode.RUNS), book.now)
    book.ended(handle, Done(b"x" * 1000))
    assert len(msgspec.msgpack.encode(book.traces._traces["r"])) < 500
    trace = book.told("r")
    assert moments(trace) == ["opened", "offered", "accepted", "pushed", "written", "done"]
    assert trace is not None
    heard = {str(step.step): (step.peer, step.heard) for step in trace.steps if step.peer}
    assert heard["offered"] == ("d/3", True)
    assert heard["accepted"] == ("d/3", False)
    assert heard["written"] == (str(write_action().transfer.peer), False)


def test_every_message_about_a_room_is_a_step() -> None:
    assert set(MESSAGES) == {kind for kind in get_args(Body) if issubclass(kind, RoomMessage)}
    assert len(set(MESSAGES.values())) == len(MESSAGES)


def test_heartbeats_are_no_steps() -> None:
    book = Book(16)
    book.traces.frame_in(Envelope(PEER, 1, Session(1, 1), 1, Heartbeat()))
    assert book.traces._traces == {}


@pytest.mark.parametrize("num_pushes", [2, 3000], ids=["short", "with steps left out"])
def test_a_trace_stays_the_same_when_it_is_packed(num_pushes: int) -> None:
    book = Book(10_000)
    handle = book.opened("r", RoomTag("req", "00-1-2-01"))
    book.traces.frame_in(offer("r"))
    for i in range(num_pushes):
        book.pushed("r", i, i + 1)
    handle.finished = book.now
    book.traces.copy("r", PEER, Moment.GATHERED, book.now, 0.5, 9)
    book.traces.write(ended_write(TransferMode.RUNS), book.now)
    book.ended(handle)
    book.traces.frame_out(PEER, accept("r"))
    before = book.told("r")
    for number in range(NUM_UNPACKED):
        book.over(number)
    assert book.traces._traces["r"].packed
    assert before is not None
    assert {"offered", "pushed", "gathered", "written", "finished", "accepted"} <= set(
        moments(before)
    )
    assert (before.request, before.traceparent) == ("req", "00-1-2-01")
    assert book.told("r") == before
    book.traces.frame_out(PEER, accept("r"))
    assert moments(book.told("r"))[-1] == "accepted"


def test_when_a_failed_room_was_released_is_told_however_many_ended_meanwhile() -> None:
    book = Book(16)
    handle = book.opened(1)
    book.ended(handle, Failure.of(FailureCode.DEADLINE, "late \udc80"))
    for number in range(2, 50):
        book.over(number)
    book.now += 1.0
    book.traces.step(1, Moment.RELEASED)
    for number in range(50, 100):
        trace = book.told("1")
        assert moments(trace) == ["opened", "failed", "released"]
        book.now += 1.0
        book.over(number)
    assert trace is not None
    assert trace.steps[1].detail == "deadline: late ?"


def test_the_slowest_of_the_last_minutes_are_known_however_many_came_after() -> None:
    """With their steps: what took long has to be explained."""
    book = Book(64)
    start = book.now
    for number in range(24_000):
        book.now = start + number * 0.01
        book.over(number, seconds=5.0 if number % 2400 == 7 else 0.001 * (number % 90))
    slowest = [one.room for one in book.traces.slow.slowest(book.now, 10)]
    assert sorted(map(int, slowest)) == [7 + 2400 * i for i in range(10)]
    assert moments(book.told("7")) == ["opened", "done"]


def test_what_was_slow_long_ago_is_forgotten() -> None:
    book = Book(16)
    book.over("slow", seconds=9.0)
    book.now += SLOW_S + 2 * PART_S
    assert book.traces.slow.slowest(book.now) == []
    for number in range(20):
        book.now += PART_S
        book.over(number)
    assert book.told("slow") is None
    assert len(list(book.traces.slow)) <= SLOW_S / PART_S + 1


@pytest.mark.parametrize("seconds", [range(50), range(50, 0, -1)], ids=["rising", "falling"])
def test_the_slowest_come_first(seconds: range) -> None:
    book = Book(1000)
    for took in seconds:
        book.over(f"{took}", seconds=float(took))
    longest = sorted(seconds, reverse=True)[:3]
    slowest = book.traces.slow.slowest(book.now, 3)
    assert [one.room for one in slowest] == [str(s) for s in longest]


def test_rooms_that_took_as_long_need_no_order() -> None:
    """A room's id is a number or a text."""
    book = Book(100)
    for room in (1, "one", 2, "two", *range(3, 20)):
        book.over(room)
    assert len(book.traces.slow.slowest(book.now)) == MOST_OF_A_PART


def test_a_heartbeat_of_an_earlier_peer_is_still_one() -> None:
    """Its fields may be left out: who lacks them is understood."""
    frame = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat(1.5, 2.5, 3.5))
    assert decode(encode(frame)) == frame
    bare = Envelope(PEER, 1, Session(1, 1), 1, Heartbeat())
    old = encode(bare).replace(b"\x94\xa9heartbeat\xc0\xc0\xc0", b"\x91\xa9heartbeat")
    assert len(old) == len(encode(bare)) - 3
    assert decode(old) == bare


def test_two_endpoints_tell_one_story() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open(7, request="req-7")
        into = pair.target.receive(7, prefill=pair.view, tokens=8, pages=[1, 2])
        out.push((0, 8), [3, 4])
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
        out.wait_released(WAIT_S)
        traces = [pair.source.trace(7), pair.target.trace(7)]
        views = [each.view(ReportRequest(layout=True)).result(WAIT_S) for each in pair[:2]]
        assert pair.source.trace(8) is None
    known = [trace for trace in traces if trace is not None]
    assert {"opened", "offered", "pushed", "written", "finished", "closed", "done"} <= set(
        moments(known[0])
    )
    assert {"asked", "offered", "closed", "done"} <= set(moments(known[1]))
    assert known[0].when(Moment.WRITTEN)[-1] <= known[0].when(Moment.CLOSED)[0]
    whole = join(known, {})
    assert (whole.outcome, whole.request, whole.room) == ("done", "req-7", "7")
    assert sum(bar.num_bytes for bar in whole.bars) == sum(
        sent.num_bytes for link in views[0].links for sent in link.sent
    )
    assert [(view.role, view.num_done, view.num_open) for view in views] == [
        ("source", 1, 0),
        ("target", 1, 0),
    ]
    assert views[0].layout == views[1].layout
    assert views[0].slow[0].request == "req-7"


def test_a_failure_is_told_in_words() -> None:
    with pair_by(AT_ONCE) as pair:
        out = pair.source.open("gone", request="req-8")
        out.abort()
        out.wait_released(WAIT_S)
        view = pair.source.view().result(WAIT_S)
        trace = pair.source.trace("gone")
    (failure,) = view.failures
    assert (failure.room, failure.code, failure.request) == ("gone", "aborted", "req-8")
    assert moments(trace)[-2:] == ["failed", "released"]


def test_who_no_longer_waits_for_a_view_disturbs_nobody() -> None:
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
