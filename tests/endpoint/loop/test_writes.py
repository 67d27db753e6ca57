"""A source's writes: which thread makes them, and what follows when they end."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint.jobs import SESSION, direct, write_action
from endpoint.scripted_machine import LAYOUT, ME
from prometheus_client import CollectorRegistry

from kvferry.endpoint.jobs import INLINE_BYTES, INLINE_PIECES, WriteJob
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.writes import RECENT_S, InlineWrites, TransportWrites
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.poll_backoff import FRACTION, MAX_SLEEP_S, MIN_SLEEP_S
from kvferry.errors import InputError
from kvferry.ids import Op
from kvferry.memory.page_tables import PageTableValidator
from kvferry.plan.bind import Binding, BindingSize
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import contiguous_pools
from kvferry.protocol.events import Event, Write, WriteEnded, WriteFate
from kvferry.telemetry.metrics import EndpointMetrics

OP = Op(1)


class Bench:
    """A source's writes with a transport thread that records its jobs."""

    def __init__(self, problem: str = "") -> None:
        self.posted: list[WriteJob] = []
        self.heard: list[Event] = []
        # Notes, each with the number of answers and of counted writes before it.
        self.notes: list[tuple[Op, int, int]] = []
        self._problem = problem
        meter = EndpointMetrics(str(ME), "shm", "source", CollectorRegistry())
        rooms: RoomTable[Any] = RoomTable(ME, meter)
        validator = PageTableValidator(LAYOUT, 0, contiguous_pools(LAYOUT, 0, 4).map)
        self.handle = Outgoing("r", inf, validator, lambda *_: None, lambda _: None)
        rooms.add(self.handle)
        setup: Any = SimpleNamespace(me=ME)
        transport_thread: Any = SimpleNamespace(write=self.posted.append)
        links: Any = {SESSION: SimpleNamespace(inline=None)}
        chooser: Any = SimpleNamespace(binding=self._bind)
        copier: Any = None
        proofs: Any = None
        self.writes = TransportWrites(
            setup=setup,
            rooms=rooms,
            transport_thread=transport_thread,
            copier=copier,
            links=links,
            chooser=chooser,
            observer=meter,
            answer=self.heard.append,
            send_note=self._note,
            proofs=proofs,
        )

    def _note(self, op: Op) -> None:
        self.notes.append((op, len(self.heard), self.handle.num_writes))

    def _bind(self, action: Write) -> Binding:
        if self._problem:
            raise InputError(self._problem)
        return Binding(())

    def write(self) -> None:
        self.writes.write(write_action())

    def end(self, mode: TransferMode, fate: WriteFate | None = None) -> None:
        (job,) = self.posted
        job.mode, job.num_bytes = mode, 10
        job.end(WriteEnded(OP, fate, "a reason"))
        self.writes.resume(job)


def test_a_successful_write_is_answered_and_counted() -> None:
    bench = Bench()
    bench.write()
    assert ([job.op for job in bench.posted], bench.heard) == ([OP], [])
    bench.end(TransferMode.RUNS)
    assert bench.heard == [WriteEnded(OP)]
    assert (bench.handle.carried, bench.handle.num_writes) == ({TransferMode.RUNS: 10}, 1)


def test_the_note_of_a_write_is_sent_before_its_answer() -> None:
    bench = Bench()
    bench.write()
    bench.end(TransferMode.STAGED)
    assert bench.notes == [(OP, 0, 0)]
    assert (bench.heard, bench.handle.num_writes) == ([WriteEnded(OP)], 1)


@pytest.mark.parametrize("fate", list(WriteFate))
def test_a_failed_write_is_answered_and_not_counted(fate: WriteFate) -> None:
    bench = Bench()
    bench.write()
    bench.end(TransferMode.RUNS, fate)
    assert (bench.heard, bench.notes) == ([WriteEnded(OP, fate)], [])
    assert (bench.handle.carried, bench.handle.num_writes) == ({}, 0)


def test_a_write_with_wrong_pages_fails_without_being_started() -> None:
    bench = Bench("no such page")
    bench.write()
    assert (bench.posted, bench.heard) == ([], [WriteEnded(OP, WriteFate.FAILED)])


@pytest.mark.parametrize(
    ("num_bytes", "num_pieces", "small"),
    [
        (INLINE_BYTES, INLINE_PIECES, True),
        (INLINE_BYTES + 1, 1, False),
        (1, INLINE_PIECES + 1, False),
    ],
)
def test_the_loop_makes_small_writes_of_few_pieces(
    num_bytes: int, num_pieces: int, small: bool
) -> None:
    binding: Any = SimpleNamespace(size=BindingSize(num_bytes, num_pieces))
    job = direct(1, binding)
    assert job.is_small() == small
    assert (job.num_bytes, job.num_pieces) == (num_bytes, num_pieces)


# ---------------------------------------------------------------- writes of the loop itself


class SlowTransport:
    """A transport whose writes end when a test says so."""

    def __init__(self) -> None:
        self.polled: list[Op] = []
        self.ends: dict[Op, WriteEnded] = {}

    def check_write(self, op: Op) -> WriteEnded | None:
        self.polled.append(op)
        return self.ends.pop(op, None)


def started_job(op: int, started: float) -> WriteJob:
    job = direct(op, Binding(()))
    job.started = started
    return job


def inline_with(transport: Any, *started: float) -> InlineWrites:
    inline = InlineWrites()
    for number, at in enumerate(started):
        inline.add(started_job(number, at), transport)
    return inline


def test_without_writes_there_is_no_wakeup() -> None:
    assert InlineWrites().wakeup() == inf
    assert not list(InlineWrites().ended(1.0))


@pytest.mark.parametrize("fate", [None, WriteFate.FAILED, WriteFate.UNKNOWN])
def test_an_end_is_reported_once_with_its_result(fate: WriteFate | None) -> None:
    transport = SlowTransport()
    inline = inline_with(transport, 10.0)
    transport.ends[Op(0)] = WriteEnded(Op(0), fate, "why")
    (end,) = inline.ended(11.0)
    assert (end.op, end.is_over, end.fate, end.detail) == (0, True, fate, "why")
    assert not list(inline.ended(12.0))
    assert inline.wakeup() == inf


def test_polls_back_off_and_come_no_earlier_than_announced() -> None:
    transport = SlowTransport()
    inline = inline_with(transport, 10.0)
    now, times = 10.0, list[float]()
    while now < 10.2:
        wakeup = inline.wakeup()
        assert wakeup > now
        assert not list(inline.ended(now + (wakeup - now) / 2))
        assert len(transport.polled) == len(times)
        now = wakeup
        assert not list(inline.ended(now))
        times.append(now)
        assert len(transport.polled) == len(times)
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] == pytest.approx(MIN_SLEEP_S, abs=1e-6)
    assert all(
        pause <= max(MIN_SLEEP_S, FRACTION * (at - 10.0)) + 1e-9
        for pause, at in zip(pauses, times, strict=False)
    )
    assert pauses[-1] == pytest.approx(MAX_SLEEP_S)
    # Polling in every turn would poll thousands of times.
    assert len(times) < 200


def test_each_write_has_its_own_backoff() -> None:
    transport = SlowTransport()
    inline = inline_with(transport, 10.0, 10.5)
    assert not list(inline.ended(10.5))
    assert transport.polled == [0]
    assert inline.wakeup() == pytest.approx(10.5 + MIN_SLEEP_S)
    transport.ends[Op(1)] = WriteEnded(Op(1), None)
    assert [end.op for end in inline.ended(10.5 + MIN_SLEEP_S)] == [1]
    assert transport.polled == [0, 1]
    assert inline.wakeup() == pytest.approx(10.5 + MAX_SLEEP_S)


def test_a_write_is_recent_for_a_while() -> None:
    inline = inline_with(SlowTransport(), 10.0)
    assert inline.has_recent(10.0 + RECENT_S / 2)
    assert not inline.has_recent(10.0 + 2 * RECENT_S)
    inline.add(started_job(1, 11.0), SlowTransport())  # type: ignore[arg-type]
    assert inline.has_recent(11.0 + RECENT_S / 2)
    assert not InlineWrites().has_recent(10.0)
