"""A target binds, when its GPU copies nothing, what a source will probably send next."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.jobs import ScatterJob
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


class Desk:
    """A target's scatters, with a copier that writes down what it is given."""

    def __init__(self, pools: PoolMap = POOLS) -> None:
        self.jobs: list[ScatterJob] = []
        self.prebound: list[tuple[Binding, tuple[int, ...], tuple[int, ...]]] = []
        self.rooms: dict[str, Incoming] = {}
        self.answers: list[Event] = []
        parts: dict[str, Any] = {
            "setup": SimpleNamespace(
                member=SimpleNamespace(rank=0),
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
            **dict.fromkeys(("transport_thread", "join")),
        }
        self.scatters = StagedScatters(**parts)
        self._ops = 0

    def receive(self, room: str, pages: list[int]) -> None:
        wanted = ReceiveRequest(room, REQUEST, (PageTableMessage(GROUP, tuple(pages)),), inf)
        nothing: Any = lambda *_: None  # noqa: E731
        self.rooms[room] = Incoming(wanted, "p", nothing, nothing)

    def release(self, room: str) -> None:
        del self.rooms[room]
        self.scatters.release(room)

    def scatter(self, room: str, *blocks: Block) -> ScatterJob:
        self._ops += 1
        about = Op(self._ops), room, SOURCE, PLAN, REQUEST, blocks, SlotIndex(0), Serial(1)
        self.scatters.scatter(Scatter(*about))
        return self.jobs[-1]

    def check(self, job: ScatterJob, room: str, *blocks: Block) -> None:
        """It copies what it should."""
        side = PagedView(POOLS, self.rooms[room].wanted.page_tables)
        wanted = bind(PLAN, RankPair(0, 0), REQUEST, StagingView(), side, blocks)
        for got, right in zip(job.bind().descriptors(), wanted.descriptors(), strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.receive("r", list(range(NUM_PAGES)))
    return desk


def copy(job: ScatterJob) -> None:
    """As a GPU's copier does."""
    job.bind()
    assert job.at_leisure is not None
    job.at_leisure()


def test_what_can_not_be_bound_fails_its_room_and_nothing_else() -> None:
    desk = Desk(PoolMap(()))
    desk.receive("r", list(range(NUM_PAGES)))
    about = Op(7), "r", SOURCE, PLAN, REQUEST, (OWED,), SlotIndex(0), Serial(1)
    desk.scatters.scatter(Scatter(*about))
    assert not desk.jobs
    cancel, scattered = desk.answers
    assert isinstance(cancel, Cancel)
    assert cancel.failure is not None
    assert "a scatter failed" in cancel.failure.message
    assert scattered == Scattered(Op(7))


def test_what_comes_next_is_bound_before_it_comes(desk: Desk) -> None:
    copy(desk.scatter("r", block(0, 20)))
    ((binding, *between),) = desk.prebound
    job = desk.scatter("r", block(20, 40))
    assert job.bind() is binding, "a copier knows it by that"
    assert between == [job.sources, job.targets]
    assert len(desk.prebound) == 1
    desk.check(desk.scatter("r", block(20, 40)), "r", block(20, 40))
    copy(desk.jobs[-1])
    # The last is shorter, and nothing comes after it.
    last = block(40, REQUEST.num_tokens)
    desk.check(desk.scatter("r", last), "r", last)


def test_nothing_is_bound_for_a_room_that_is_over(desk: Desk) -> None:
    job = desk.scatter("r", block(0, 20))
    job.bind()
    desk.release("r")
    assert job.at_leisure is not None
    job.at_leisure()
    assert not desk.prebound


def test_nothing_comes_after_the_end(desk: Desk) -> None:
    copy(desk.scatter("r", block(30, REQUEST.num_tokens)))
    assert not desk.prebound


@pytest.mark.parametrize("blocks", [(block(24, 30),), (block(20, 30), block(40, 42))])
def test_what_was_not_foreseen_is_bound_as_it_comes(desk: Desk, blocks: tuple[Block, ...]) -> None:
    copy(desk.scatter("r", block(0, 20)))
    desk.check(desk.scatter("r", *blocks), "r", *blocks)


def test_of_several_only_the_last_is_followed(desk: Desk) -> None:
    first, second = desk.scatter("r", block(0, 10)), desk.scatter("r", block(10, 20))
    first.bind()
    second.bind()
    assert first.at_leisure is not None
    first.at_leisure()
    assert not desk.prebound
    copy(second)
    desk.check(desk.scatter("r", block(20, 30)), "r", block(20, 30))


def test_a_room_of_the_same_name_has_other_pages(desk: Desk) -> None:
    copy(desk.scatter("r", block(0, 20)))
    desk.release("r")
    desk.receive("r", list(reversed(range(NUM_PAGES))))
    desk.check(desk.scatter("r", block(20, 40)), "r", block(20, 40))


def test_pages_that_are_wrong_are_told_of_when_they_are_needed(desk: Desk) -> None:
    desk.receive("s", [0, 1, 2])
    job = desk.scatter("s", block(0, 12))
    copy(job)
    assert not desk.prebound
