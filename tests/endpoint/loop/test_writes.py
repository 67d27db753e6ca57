"""What becomes of a source's writes: who makes them, and who hears how they ended."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint.jobs import SESSION, direct, write_action
from endpoint.puppet import LAYOUT, ME
from prometheus_client import CollectorRegistry

from kvferry.endpoint.jobs import AT_ONCE_BYTES, AT_ONCE_PIECES, WriteJob
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing
from kvferry.errors import InputError
from kvferry.ids import Op
from kvferry.memory.page_tables import PageTableValidator
from kvferry.plan.bind import Binding, BindingSize
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import contiguous_pools
from kvferry.protocol.events import Event, SendFailed, Sent, Write, WriteFate
from kvferry.telemetry.metrics import EndpointMetrics
from kvferry.transports.base import WriteEnded

OP = Op(1)


class Bench:
    """A source's writes, with a transport_thread that only writes down what it is given."""

    def __init__(self, problem: str = "") -> None:
        self.posted: list[WriteJob] = []
        self.heard: list[Event] = []
        # What its target was told of at once, when so much had been heard and counted.
        self.told: list[tuple[Op, int, int]] = []
        self._problem = problem
        meter = EndpointMetrics(str(ME), "shm", CollectorRegistry())
        rooms: RoomTable[Any] = RoomTable(ME, meter)
        validator = PageTableValidator(LAYOUT, 0, contiguous_pools(LAYOUT, 0, 4).map)
        self.handle = Outgoing("r", inf, validator, lambda *_: None, lambda _: None)
        rooms.add(self.handle)
        setup: Any = SimpleNamespace(member=SimpleNamespace(peer=ME))
        transport_thread: Any = SimpleNamespace(write=self.posted.append)
        links: Any = {SESSION: SimpleNamespace(at_once=None)}
        chooser: Any = SimpleNamespace(binding=self._bind)
        copier: Any = None
        self.writes = TransportWrites(
            setup=setup,
            rooms=rooms,
            transport_thread=transport_thread,
            copier=copier,
            links=links,
            chooser=chooser,
            observer=meter,
            answer=self.heard.append,
            tell=self._told,
        )

    def _told(self, op: Op) -> None:
        self.told.append((op, len(self.heard), self.handle.num_writes))

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
        self.writes.go_on(job)


def test_a_write_that_ended_well_is_told_and_counted() -> None:
    bench = Bench()
    bench.write()
    assert ([job.op for job in bench.posted], bench.heard) == ([OP], [])
    bench.end(TransferMode.RUNS)
    assert bench.heard == [Sent(OP)]
    assert (bench.handle.carried, bench.handle.num_writes) == ({TransferMode.RUNS: 10}, 1)


def test_a_target_that_is_to_empty_the_slot_hears_of_it_before_all_else() -> None:
    bench = Bench()
    bench.write()
    bench.end(TransferMode.STAGED)
    assert bench.told == [(OP, 0, 0)]
    assert (bench.heard, bench.handle.num_writes) == ([Sent(OP)], 1)


@pytest.mark.parametrize("fate", list(WriteFate))
def test_a_write_that_did_not_end_well_is_told_and_not_counted(fate: WriteFate) -> None:
    bench = Bench()
    bench.write()
    bench.end(TransferMode.RUNS, fate)
    assert (bench.heard, bench.told) == ([SendFailed(OP, fate)], [])
    assert (bench.handle.carried, bench.handle.num_writes) == ({}, 0)


def test_a_write_whose_pages_are_wrong_fails_and_goes_to_nobody() -> None:
    bench = Bench("no such page")
    bench.write()
    assert (bench.posted, bench.heard) == ([], [SendFailed(OP, WriteFate.FAILED)])


@pytest.mark.parametrize(
    ("num_bytes", "num_pieces", "small"),
    [
        (AT_ONCE_BYTES, AT_ONCE_PIECES, True),
        (AT_ONCE_BYTES + 1, 1, False),
        (1, AT_ONCE_PIECES + 1, False),
    ],
)
def test_an_owner_writes_what_is_short_and_in_few_pieces(
    num_bytes: int, num_pieces: int, small: bool
) -> None:
    binding: Any = SimpleNamespace(size=BindingSize(num_bytes, num_pieces))
    job = direct(1, binding)
    assert job.is_small() == small
    assert (job.num_bytes, job.num_pieces) == (num_bytes, num_pieces)
