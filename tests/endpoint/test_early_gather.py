"""Early gathers, which start before their credit: the data port alone, and endpoints over NIXL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from endpoint.fleets import HEADS, QUICK, eventually, layout, view_of
from endpoint.jobs import gather
from endpoint.scripted_machine import LAYOUT as ONE_TOKEN
from endpoint.scripted_machine import ME, PLAN
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.copy_thread import CopyResult, CopyThread
from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import StagingMemory
from kvferry.endpoint.source import GPU_EARLY_SLOTS, SourceEndpoint, _protocol_config
from kvferry.endpoint.target import TargetEndpoint
from kvferry.ids import Generation, Op, Peer, Session, SlotIndex
from kvferry.layout.intervals import Span
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.page_tables import PageTableValidator
from kvferry.memory.pools import Memory
from kvferry.memory.staging import SlotPool
from kvferry.plan import Block, Request
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.plan.cost import PRESETS, LinkCostTable
from kvferry.plan.places import Base, contiguous_pools
from kvferry.protocol.events import (
    Connect,
    Event,
    Gather,
    Post,
    TransferRequest,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.messages import Arrived, Envelope, Staging
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.source import SourceMachine
from kvferry.regions import Device
from kvferry.telemetry.metrics import EndpointMetrics
from kvferry.transports.base import RemoteMemory, TransportSetup
from kvferry.transports.mailbox import Mailbox
from kvferry.transports.nixl import NixlTransport

PEER, SESSION, OP = Peer("d", 0), Session(1, 1), Op(1)
BLOCKS = (Block("kv", Span(0, 1), Span(0, 1)),)
POOL = SlotPool(4096, 4)
STAGING_REGION = 3
WAIT_S = 15.0


# ---------------------------------------------------------------- the port


class Bench:
    """A source's writes, with a copier and a transport thread that record their jobs."""

    def __init__(self, staging_region: int | None = STAGING_REGION) -> None:
        self.jobs: list[WriteJob] = []
        self.posted: list[WriteJob] = []
        self.heard: list[Event] = []
        self.registry = CollectorRegistry()
        meter = EndpointMetrics(str(ME), "nixl", "source", self.registry)
        rooms: RoomTable[Any] = RoomTable(ME, meter)
        validator = PageTableValidator(ONE_TOKEN, 0, contiguous_pools(ONE_TOKEN, 0, 4).map)
        rooms.add(Outgoing("r", inf, validator, lambda *_: None, lambda _: None))
        region: Any = SimpleNamespace(address=1 << 20, num_bytes=POOL.num_bytes, device=Device())
        pools = contiguous_pools(ONE_TOKEN, 0, 4).map
        setup: Any = SimpleNamespace(
            me=ME,
            memory=SimpleNamespace(map=pools, regions=[None, None]),
            slots=StagingMemory(region, POOL, None),
            addresses=(0, 0),
        )
        transport_thread: Any = SimpleNamespace(write=self.posted.append, reach=lambda *_: None)
        copier: Any = SimpleNamespace(submit=self.jobs.append)
        costs = LinkCostTable({"nixl": PRESETS["nixl-host"]})
        links = TargetLinkTable(
            setup, transport_thread, meter, costs, self.heard.append, measures=False
        )
        proofs: Any = None
        self.writes = TransportWrites(
            setup=setup,
            rooms=rooms,
            transport_thread=transport_thread,
            copier=copier,
            links=links,
            chooser=Chooser(pools, rooms, links, costs),
            observer=meter,
            answer=self.heard.append,
            send_note=lambda _: None,
            proofs=proofs,
        )
        hello: Any = SimpleNamespace(staging=Staging(8192, 4))
        card = PeerMetadata(("127.0.0.1", 1), staging_region).encode()
        self.writes.connect(Connect(PEER, 1, SESSION, card, hello=hello))

    def gather(self) -> None:
        where = "r", SESSION, Generation(1), 0, PEER, PLAN, Request(1), ()
        self.writes.gather(Gather(OP, TransferRequest(*where), BLOCKS, SlotIndex(1)))

    def post(self) -> None:
        note = Envelope(ME, 1, SESSION, 0, Arrived("r", Generation(1), BLOCKS))
        self.writes.post_gathered(Post(OP, SlotIndex(2), note))

    def fill(self) -> None:
        (job,) = self.jobs
        job.slot_filled(Binding.bulk(Base(0, 0, 0), Base(0, 0, 0), 100))
        self.writes.resume(job)

    def fail(self) -> None:
        (job,) = self.jobs
        job.fail("no such page")
        self.writes.resume(job)

    @property
    def num_gathers(self) -> float | None:
        labels = {"endpoint": str(ME), "transport": "nixl", "stage": "gather"}
        return self.registry.get_sample_value("kvferry_stage_seconds_count", labels)


def test_an_early_gather_fills_its_slot_and_is_not_written() -> None:
    bench = Bench()
    bench.gather()
    (job,) = bench.jobs
    assert (job.op, job.targets) == (OP, ((1 << 20) + POOL.offset(1),))
    assert (job.session, job.local, job.remote) == (SESSION, Base(0, 2, POOL.offset(1)), None)
    bench.fill()
    assert (bench.posted, bench.heard) == ([], [])
    assert bench.num_gathers == 1


@pytest.mark.parametrize("order", ["fill post", "post fill"])
def test_an_early_gather_is_written_once_filled_and_posted(order: str) -> None:
    bench = Bench()
    bench.gather()
    first, second = order.split()
    getattr(bench, first)()
    assert not bench.posted
    getattr(bench, second)()
    local, remote = Base(0, 2, POOL.offset(1)), Base(0, STAGING_REGION, 2 * 8192)
    (job,) = bench.posted
    assert (job.binding, job.mode) == (Binding.bulk(local, remote, 100), TransferMode.STAGED)
    job.end(WriteEnded(OP, None))
    bench.writes.resume(job)
    assert bench.heard == [WriteEnded(OP)]
    assert bench.num_gathers == 1, "the wait for a credit does not count"


@pytest.mark.parametrize("filled_first", [True, False])
def test_a_discarded_gather_is_answered_when_its_copy_has_ended(filled_first: bool) -> None:
    bench = Bench()
    bench.gather()
    if filled_first:
        bench.fill()
    assert not bench.heard
    bench.writes.discard(OP)
    if not filled_first:
        assert not bench.heard, "the copier still reads the pages"
        bench.fill()
    assert (bench.posted, bench.heard) == ([], [WriteEnded(OP, WriteFate.BUSY)])


@pytest.mark.parametrize("asked", ["post", "discard", None])
def test_a_failed_gather_is_answered_once(asked: str | None) -> None:
    bench = Bench()
    bench.gather()
    if asked == "post":
        bench.post()
    elif asked == "discard":
        bench.writes.discard(OP)
    bench.fail()
    bench.post()
    bench.writes.discard(OP)
    assert (bench.posted, bench.heard) == ([], [WriteEnded(OP, WriteFate.FAILED)])


def test_nothing_is_gathered_for_a_target_without_slots() -> None:
    bench = Bench(staging_region=None)
    bench.gather()
    assert (bench.jobs, bench.heard) == ([], [WriteEnded(OP, WriteFate.FAILED)])


def test_the_copy_thread_returns_an_early_gather_to_the_loop() -> None:
    told: Mailbox[CopyResult] = Mailbox()
    posted: list[WriteJob] = []
    copier = CopyThread("copier", told.put, posted.append)
    page, slot = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    here = Base(0, 0, 0)
    job = gather(1, lambda: Binding.bulk(here, here, 100), early=True)
    job.sources, job.targets = (page.ctypes.data,), (slot.ctypes.data,)
    copier.submit(job)
    assert told.get(WAIT_S) is job
    assert (job.num_bytes, job.is_over) == (100, False)
    copier.close()
    assert np.array_equal(page, slot)
    assert not posted


# ---------------------------------------------------------------- endpoints


class Gated(NixlTransport):
    """NIXL whose writes start when a test opens the gate."""

    name: ClassVar[str] = "nixl"
    supports_write_now: ClassVar[bool] = False

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self.closed = True
        self.waiting: list[tuple[RemoteMemory, Op, Binding]] = []

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        self.waiting.append((remote, op, pieces))

    def poll(self) -> list[WriteEnded]:
        while self.waiting and not self.closed:
            super().write(*self.waiting.pop(0))
        return super().poll()


LAYOUT = layout(HEADS, 4)
NUM_PAGES, NUM_SLOTS, EARLY = 16, 2, 2
TOKENS = 4 * NUM_PAGES
PAGES = list(range(NUM_PAGES))
NUMBERS = itertools.count()


def config(num_slots: int) -> EndpointConfig:
    """A slot holds a page of all layers. Credits never time out, and no link is measured."""
    return EndpointConfig(
        mode=TransferMode.STAGED,
        slot_bytes=4096,
        staging_bytes=num_slots * 4096,
        link_cost=PRESETS["nixl-host"],
        protocol=replace(QUICK, credit_patience_s=60.0, early_gather_slots=EARLY, local_slots=8),
    )


class Pair(NamedTuple):
    """A source, and a target with few slots."""

    source: SourceEndpoint
    target: TargetEndpoint
    view: InstanceView
    gate: Gated
    pools: tuple[list[np.ndarray], list[np.ndarray]]

    @property
    def machine(self) -> SourceMachine:
        machine: SourceMachine = self.source._loop.runner.machine
        return machine

    @property
    def num_early(self) -> int:
        return sum(write.is_ahead for write in list(self.machine.inflight.writes.values()))

    def is_holding(self) -> bool:
        """Whether every slot of the target is being written, and all early slots are gathered."""
        return (len(self.gate.waiting), self.num_early) == (NUM_SLOTS, EARLY)


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    setups = [TransportSetup(agent=f"early-{next(NUMBERS)}", copy=copy_binding) for _ in range(2)]
    gate, theirs = Gated(setups[0]), NixlTransport(setups[1])
    memories = [Memory.allocate(LAYOUT, 0, NUM_PAGES, each.allocate) for each in (gate, theirs)]
    owners: list[Any] = [memory.owners for memory in memories]
    pools = [[np.asarray(each).view(np.uint8) for each in its] for its in owners]
    for number, pool in enumerate(pools[0]):
        pool[:] = np.random.default_rng(number).integers(1, 255, pool.shape)
    common: Any = {"model": "m", "registry": CollectorRegistry()}
    with (
        SourceEndpoint(
            LAYOUT, memories[0], name="p", transport=gate, config=config(8), **common
        ) as source,
        TargetEndpoint(
            LAYOUT, memories[1], name="d", transport=theirs, config=config(NUM_SLOTS), **common
        ) as target,
    ):
        yield Pair(source, target, view_of(source.record), gate, (pools[0], pools[1]))


def begin(both: Pair) -> tuple[Any, Any]:
    """Open a room, and wait until all slots are in use and two more are gathered."""
    into = both.target.receive("r", prefill=both.view, tokens=TOKENS, pages=PAGES)
    out = both.source.open("r")
    out.push((0, TOKENS), PAGES)
    eventually(both.is_holding)
    return out, into


def test_early_gathers_arrive_intact() -> None:
    with pair() as both:
        out, into = begin(both)
        out.close(b"first token")
        both.gate.closed = False
        assert into.wait(WAIT_S) == Done(b"first token")
        assert isinstance(out.wait(WAIT_S), Done)
        for handle in (out, into):
            handle.wait_released(WAIT_S)
        for sent, got in zip(*both.pools, strict=True):
            assert np.array_equal(sent, got)
        used = {mode for mode, stats in both.source.stats.modes.items() if stats.writes}
        assert used == {TransferMode.STAGED}, "every byte went through a slot"
        assert not both.machine.inflight.writes


def test_an_aborted_room_frees_its_early_slots() -> None:
    with pair() as both:
        out, into = begin(both)
        into.abort()
        for handle in (out, into):
            outcome = handle.wait(WAIT_S)
            assert isinstance(outcome, Failure)
            assert outcome.code is FailureCode.ABORTED
        eventually(lambda: both.num_early == 0)
        assert len(both.machine.inflight.writes) == NUM_SLOTS, "posted writes are still in flight"
        both.gate.closed = False
        for handle in (out, into):
            handle.wait_released(WAIT_S)
        assert len(both.machine.inflight.slots) == both.machine.config.local_slots


def test_a_gpu_gathers_early_unless_configured_otherwise() -> None:
    def early(is_host: bool, configured: int | None) -> int | None:
        memory = SimpleNamespace(device=SimpleNamespace(is_host=is_host))
        setup: Any = SimpleNamespace(slots=SimpleNamespace(pool=POOL), memory=memory)
        protocol = replace(QUICK, early_gather_slots=configured)
        return _protocol_config(EndpointConfig(protocol=protocol), setup).early_gather_slots

    assert [early(True, None), early(False, None)] == [0, GPU_EARLY_SLOTS]
    assert [early(True, 1), early(False, 0)] == [1, 0]
