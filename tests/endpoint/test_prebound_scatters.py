"""A target binds the scatter that a source probably sends next while its GPU is idle."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.jobs import ScatterJob
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.scatters import StagedScatters
from kvferry.ids import Op, Peer, Serial, SlotIndex
from kvferry.layout import Layout, Parallel, Span, attention
from kvferry.plan import Block, PagedView, RankPair, Request, StagingView, bind, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.places import PoolMap, contiguous_pools
from kvferry.protocol.events import Cancel, Event, ReceiveRequest, Scatter, Scattered
from kvferry.protocol.messages import PageTableMessage
from kvferry.telemetry.observer import Observer

NUM_PAGES, PAGE = 16, 4
LAYOUT = Layout(attention(layers=2, kv_heads=2, head_dim=8), Parallel(), page_tokens=PAGE)
PLAN = reshard(LAYOUT, LAYOUT)
GROUP = LAYOUT.spec.groups[0].name
POOLS = contiguous_pools(LAYOUT, 0, NUM_PAGES).map
REQUEST = Request(4 * PAGE * 3 + 2)
SOURCE = Peer("p", 0)
(OWED,) = PLAN.blocks(0, 0, REQUEST)


def block(first: int, end: int) -> Block:
    return replace(OWED, tokens=Span(first, end))


class Bench:
    """A target's scatters with a copier that records its jobs."""

    def __init__(self, pools: PoolMap = POOLS) -> None:
        self.jobs: list[ScatterJob] = []
        self.prebound: list[tuple[Binding, tuple[int, ...], tuple[int, ...]]] = []
        self.rooms: RoomTable[Incoming] = RoomTable(Peer("d", 0), Observer())
        self.answers: list[Event] = []
        parts: dict[str, Any] = {
            "setup": SimpleNamespace(
                me=Peer("d", 0),
                memory=SimpleNamespace(map=pools),
                slots=SimpleNamespace(address=lambda slot: 4096 * slot),
                addresses=(0, 0, 0, 0),
            ),
            "rooms": self.rooms,
            "copier": SimpleNamespace(
                submit=self.jobs.append, prebind=lambda *copy: self.prebound.append(copy)
            ),
            "observer": Observer(),
            "answer": self.answers.append,
            **dict.fromkeys(("transport_thread", "connect_unix", "proofs")),
        }
        self.scatters = StagedScatters(**parts)
        self._ops = 0

    def receive(self, room: str, pages: list[int]) -> None:
        wanted = ReceiveRequest(room, REQUEST, (PageTableMessage(GROUP, tuple(pages)),), inf)
        self.rooms.add(Incoming(wanted, "p", LAYOUT, 0, lambda _: None))

    def release(self, room: str) -> None:
        self.rooms.release(room)

    def scatter(self, room: str, *blocks: Block) -> ScatterJob:
        self._ops += 1
        about = Op(self._ops), room, SOURCE, PLAN, REQUEST, blocks, SlotIndex(0), Serial(1)
        self.scatters.scatter(Scatter(*about))
        return self.jobs[-1]

    def check(self, job: ScatterJob, room: str, *blocks: Block) -> None:
        """Check that a job copies these blocks."""
        handle = self.rooms.get(room)
        assert handle is not None
        side = PagedView(POOLS, handle.request.page_tables)
        wanted = bind(PLAN, RankPair(0, 0), REQUEST, StagingView(), side, blocks)
        for got, right in zip(job.bind().descriptors(), wanted.descriptors(), strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.receive("r", list(range(NUM_PAGES)))
    return bench


def copy(job: ScatterJob) -> None:
    """Do what a GPU copier does with a job."""
    job.bind()
    assert job.when_idle is not None
    job.when_idle()


def test_a_scatter_that_cannot_be_bound_fails_its_room() -> None:
    bench = Bench(PoolMap(()))
    bench.receive("r", list(range(NUM_PAGES)))
    about = Op(7), "r", SOURCE, PLAN, REQUEST, (OWED,), SlotIndex(0), Serial(1)
    bench.scatters.scatter(Scatter(*about))
    assert not bench.jobs
    cancel, scattered = bench.answers
    assert isinstance(cancel, Cancel)
    assert cancel.failure is not None
    assert "a scatter failed" in cancel.failure.message
    assert scattered == Scattered(Op(7))


def test_the_next_scatter_is_bound_in_advance(bench: Bench) -> None:
    copy(bench.scatter("r", block(0, 20)))
    ((binding, *between),) = bench.prebound
    job = bench.scatter("r", block(20, 40))
    assert job.bind() is binding, "a copier recognizes the object"
    assert between == [job.sources, job.targets]
    assert len(bench.prebound) == 1
    bench.check(bench.scatter("r", block(20, 40)), "r", block(20, 40))
    copy(bench.jobs[-1])
    # The last is shorter, and none follows it.
    last = block(40, REQUEST.num_tokens)
    bench.check(bench.scatter("r", last), "r", last)


def test_nothing_is_bound_for_a_released_room(bench: Bench) -> None:
    job = bench.scatter("r", block(0, 20))
    job.bind()
    bench.release("r")
    assert job.when_idle is not None
    job.when_idle()
    assert not bench.prebound


def test_nothing_is_bound_beyond_the_last_token(bench: Bench) -> None:
    copy(bench.scatter("r", block(30, REQUEST.num_tokens)))
    assert not bench.prebound


@pytest.mark.parametrize("blocks", [(block(24, 30),), (block(20, 30), block(40, 42))])
def test_an_unexpected_scatter_is_bound_on_arrival(bench: Bench, blocks: tuple[Block, ...]) -> None:
    copy(bench.scatter("r", block(0, 20)))
    bench.check(bench.scatter("r", *blocks), "r", *blocks)


def test_only_the_latest_scatter_predicts_the_next(bench: Bench) -> None:
    first, second = bench.scatter("r", block(0, 10)), bench.scatter("r", block(10, 20))
    first.bind()
    second.bind()
    assert first.when_idle is not None
    first.when_idle()
    assert not bench.prebound
    copy(second)
    bench.check(bench.scatter("r", block(20, 30)), "r", block(20, 30))


def test_a_new_room_with_the_same_id_is_bound_to_its_own_pages(bench: Bench) -> None:
    copy(bench.scatter("r", block(0, 20)))
    bench.release("r")
    bench.receive("r", list(reversed(range(NUM_PAGES))))
    bench.check(bench.scatter("r", block(20, 40)), "r", block(20, 40))


def test_wrong_pages_of_the_next_scatter_are_ignored(bench: Bench) -> None:
    bench.receive("s", [0, 1, 2])
    job = bench.scatter("s", block(0, 12))
    copy(job)
    assert not bench.prebound
