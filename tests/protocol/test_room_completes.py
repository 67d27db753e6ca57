"""Rooms that complete, in every order of events and for many layouts."""

from __future__ import annotations

import gc

import pytest
from wire import World, always_stage, never_stage

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer
from kvferry.layout import CacheSpec, DType, Layout, Paged, Parallel, Span, StateRow, attention
from kvferry.layout.spec import Group, Tensor, Window
from kvferry.plan import Block, Request
from kvferry.protocol.events import Cancel, Finish, Prepare, Push, Tick
from kvferry.protocol.inbound import InboundTransfer, TargetRoom
from kvferry.protocol.messages import (
    Arrived,
    Close,
    Grant,
    Staging,
    Want,
)
from kvferry.protocol.outbound import OutboundTransfer, SourceRoom
from kvferry.protocol.outcome import Done, Status

DENSE = attention(layers=2, kv_heads=4, head_dim=2)
HYBRID = CacheSpec(
    4,
    (
        Group("full", Paged(), (0, 2), 4, (Tensor("k", DType.UINT8, 2),)),
        Group("near", Window(7), (1,), 2, (Tensor("k", DType.UINT8, 2),)),
        Group("state", StateRow(), (1, 3), 4, (Tensor("s", DType.UINT8, 5),)),
    ),
)
ROOM = "room-1"


def layout(spec: CacheSpec, tp: int = 1, pp: int = 1, page: int = 4) -> Layout:
    return Layout(spec, Parallel(tp=tp, pp=pp), page_tokens=page)


def world(
    source: Layout, *targets: Layout, staged: bool = False, config: ProtocolConfig | None = None
) -> World:
    stages = always_stage if staged else never_stage
    staging = Staging(slot_bytes=64, num_slots=3) if staged else Staging()
    return World(source, targets, config or ProtocolConfig(), staging, stages)


STAGED = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
PAIRS = pytest.mark.parametrize(
    ("source", "target"),
    [
        (layout(DENSE), layout(DENSE)),
        (layout(DENSE, tp=2), layout(DENSE, tp=2, page=8)),
        (layout(DENSE, tp=2), layout(DENSE, tp=4)),
        (layout(DENSE, tp=4, page=8), layout(DENSE, tp=1)),
        (layout(DENSE, tp=2, pp=2), layout(DENSE, tp=2)),
        (layout(HYBRID, tp=2), layout(HYBRID, tp=1, pp=2)),
        (layout(HYBRID, pp=2), layout(HYBRID, tp=2)),
    ],
    ids=str,
)


@STAGED
@PAIRS
@pytest.mark.parametrize("order", ["prefill first", "decode first", "offer in the middle", "last"])
@pytest.mark.parametrize("prefix", [0, 5])
def test_every_order_completes(
    source: Layout, target: Layout, staged: bool, order: str, prefix: int
) -> None:
    w = world(source, target, staged=staged)
    request = Request(24, prefix)
    if order == "decode first":
        w.receive(ROOM, request)
        w.run()
        w.open(ROOM)
    else:
        w.open(ROOM)
    if order == "prefill first":
        w.receive(ROOM, request)
        w.run()
    if order == "offer in the middle":
        w.each_source(Push(ROOM, Span(0, 16)))
        w.receive(ROOM, request)
        w.prefill_all(ROOM, 24, first=16)
    else:
        w.prefill_all(ROOM, 24)
    if order == "last":
        assert w.source().status(ROOM) is Status.CONNECTING
        w.receive(ROOM, request)
    w.wait(4)
    assert w.outcomes(ROOM) == {"done"}
    assert w.metadata(ROOM) == {b"meta"}
    if staged:
        assert any(isinstance(arrived, Arrived) and arrived.serial is not None
                   for arrived in w.where(Arrived))  # fmt: skip
    w.finish()


@pytest.mark.parametrize("spec", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_a_fully_cached_prompt_sends_close_alone(spec: CacheSpec) -> None:
    w = world(layout(spec, tp=2), layout(spec))
    w.open(ROOM)
    w.receive(ROOM, Request(24, 24))
    w.run()
    w.each_source(Finish(ROOM, 24, b"first token"))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    assert w.metadata(ROOM) == {b"first token"}
    assert not w.where(Arrived)
    assert not any(w.landed.values())
    w.finish()


@STAGED
def test_ended_rooms_are_freed_without_garbage_collection(staged: bool) -> None:
    w = world(layout(DENSE, tp=2), layout(DENSE), staged=staged)
    gc.collect()
    gc.disable()
    try:
        w.open(ROOM)
        w.receive(ROOM, Request(24))
        w.run()
        w.prefill_all(ROOM, 24)
        w.wait(4)
        assert w.outcomes(ROOM) == {"done"}
        kinds = SourceRoom, OutboundTransfer, TargetRoom, InboundTransfer
        assert [one for one in gc.get_objects() if type(one) in kinds] == []
    finally:
        gc.enable()


@STAGED
def test_lead_sends_metadata_to_every_target(staged: bool) -> None:
    w = world(layout(DENSE, tp=2, pp=2), layout(DENSE, tp=4), staged=staged)
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    for peer in w.sources:
        w.tell(peer, Push(ROOM, Span(0, 8)))
        w.tell(peer, Finish(ROOM, 8, f"from {peer.rank}".encode()))
    w.wait(4)
    lead = w.prefill.lead
    assert lead == 2
    with_metadata = {
        e.sender.rank
        for e in w.sent(Close)
        if isinstance(e.body, Close) and e.body.metadata is not None
    }
    assert with_metadata == {lead}
    done = [w.reports[peer, ROOM] for peer in w.targets]
    assert done == [[Done(b"from 2")]] * 4
    w.finish()


def test_idle_sources_release_their_pages() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=2)
    w = world(layout(spec, tp=4), layout(spec, tp=2))
    plan = w.plan()
    idle = [rank for rank in range(4) if not plan.targets_of(rank)]
    assert idle, "this pair leaves some sources without work"
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    assert all(w.releases[Peer("prefill", rank), ROOM] == 1 for rank in range(4))
    for rank in idle:
        told = {to.rank for to, e in w.frames if e.sender == Peer("prefill", rank)}
        assert told == set(plan.audience(rank))
    w.finish()


@STAGED
def test_one_source_serves_tp2_and_tp4_at_the_same_time(staged: bool) -> None:
    w = world(layout(DENSE, tp=2), layout(DENSE, tp=2), layout(DENSE, tp=4), staged=staged)
    for index, room in enumerate(["a", "b"]):
        w.open(room)
        w.receive(room, Request(24), decode_index=index)
    w.run()
    for at in range(0, 24, 8):
        for room in ("a", "b"):
            w.each_source(Push(room, Span(at, at + 8)))
    for room in ("a", "b"):
        w.each_source(Finish(room, 24, room.encode()))
    w.wait(4)
    assert w.outcomes("a") == w.outcomes("b") == {"done"}
    assert (w.metadata("a"), w.metadata("b")) == ({b"a"}, {b"b"})
    w.finish()


def test_the_same_room_is_not_sent_to_two_instances() -> None:
    w = world(layout(DENSE), layout(DENSE), layout(DENSE))
    w.open(ROOM)
    w.receive(ROOM, Request(8), decode_index=0)
    w.run()
    w.receive(ROOM, Request(8), decode_index=1)
    w.run()
    w.prefill_all(ROOM, 8)
    assert w.reports[Peer("decode0", 0), ROOM] == [Done(b"meta")]
    (refused,) = w.reports[Peer("decode1", 0), ROOM]
    assert str(refused).startswith("room-taken")
    w.finish()


def test_many_rooms_share_three_slots() -> None:
    w = world(layout(DENSE, tp=2), layout(DENSE), staged=True)
    rooms = [f"room-{i}" for i in range(6)]
    for room in rooms:
        w.open(room)
        w.receive(room, Request(16))
    w.run()
    for room in rooms:
        w.each_source(Push(room, Span(0, 16)))
        w.each_source(Finish(room, 16, room.encode()))
    w.wait(10)
    for room in rooms:
        assert w.outcomes(room) == {"done"}
        assert w.metadata(room) == {room.encode()}
    w.finish()


# ---------------------------------------------------------------- credits


def test_prepare_requests_credits() -> None:
    w = world(layout(DENSE), layout(DENSE), staged=True)
    w.open(ROOM)
    w.receive(ROOM, Request(4))
    w.run()
    w.each_source(Prepare(ROOM, Span(0, 4)))
    w.run()
    (want,) = w.where(Want)
    assert isinstance(want, Want)
    assert w.where(Grant)
    assert not w.where(Arrived)
    w.each_source(Push(ROOM, Span(0, 4)))
    w.run()
    assert [body for body in w.where(Want) if body != want] == [], "asked once for one part"
    w.each_source(Finish(ROOM, 4))
    w.wait(4)
    assert want.total == len({b.serial for b in w.where(Arrived) if isinstance(b, Arrived)})
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_modes_of_an_announced_chunk_are_requested_once() -> None:
    asked: list[Span] = []

    def stages(block: Block) -> bool:
        asked.append(block.tokens)
        return block.tokens.first < 4

    dense = layout(DENSE)
    w = World(dense, (dense,), ProtocolConfig(), Staging(64, 2), stages)
    w.open(ROOM)
    w.receive(ROOM, Request(12))
    w.run()
    for tokens in (Span(0, 4), Span(4, 8)):
        w.each_source(Prepare(ROOM, tokens))
    assert asked == [Span(0, 4), Span(4, 8)]
    for tokens in (Span(0, 4), Span(4, 8), Span(8, 12)):
        w.each_source(Push(ROOM, tokens))
    # Blocks that go directly are asked for again, because their pages may have been unknown.
    assert asked[2:] == [Span(4, 8), Span(8, 12)]
    (outbound,) = w.source().rooms[ROOM].outbounds.values()
    assert not outbound.cuts, "what was pushed is not remembered"
    w.each_source(Finish(ROOM, 12))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_transfer_without_credits_writes_directly() -> None:
    w = world(layout(DENSE), layout(DENSE), staged=True)
    w.drops = lambda _, envelope: isinstance(envelope.body, Grant)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.prefill_all(ROOM, 16)
    assert not w.landed
    w.wait(w.config.credit_patience_s / 2 + 0.1)
    assert not w.landed
    assert len(w.where(Want)) > 1, "a lost Want or Grant is repaired by asking again"
    w.wait(w.config.credit_patience_s)
    assert w.outcomes(ROOM) == {"done"}
    assert w.source().counts["impatient"] > 0
    assert {b.serial for b in w.where(Arrived) if isinstance(b, Arrived)} == {None}
    w.finish()


def test_early_offers_of_all_targets_are_kept() -> None:
    w = world(layout(DENSE), layout(DENSE, tp=2))
    w.receive(ROOM, Request(8))
    w.run()
    w.open(ROOM)
    w.each_source(Cancel(ROOM))
    w.run()
    assert ROOM not in w.source().rooms, "it is kept only for offers that have not come"
    w.finish()


def test_credit_patience_starts_with_the_first_waiting_block() -> None:
    w = world(layout(DENSE), layout(DENSE), staged=True)
    w.drops = lambda _, envelope: isinstance(envelope.body, Grant)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    for first in (0, 4, 8):
        w.each_source(Push(ROOM, Span(first, first + 4)))
        w.wait(w.config.credit_patience_s * 0.4)
    assert w.landed, "every push begins it anew"
    w.drops = lambda _, __: False
    w.prefill_all(ROOM, 16, first=12)
    w.wait(4)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_slot_is_granted_again_after_its_scatter() -> None:
    config = ProtocolConfig(credit_patience_s=50.0)
    w = world(layout(DENSE), layout(DENSE), staged=True, config=config)
    w.hold.scatters = True
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.prefill_all(ROOM, 16)
    w.wait(5)
    assert len(w.scatters) == 3, "each of the three slots is being scattered"
    assert {scatter.slot for _, scatter in w.scatters} == {0, 1, 2}
    assert w.target().status(ROOM) is Status.WAITING
    while w.scatters:
        w.end_scatter(w.scatters.pop())
        w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize("staged", [False, True])
def test_writes_in_flight_are_limited(staged: bool) -> None:
    config = ProtocolConfig(max_inflight=2, local_slots=1, credit_patience_s=50.0)
    w = world(layout(DENSE), layout(DENSE, tp=4), staged=staged, config=config)
    w.hold.writes = True
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.each_source(Push(ROOM, Span(0, 16)))
    w.each_source(Finish(ROOM, 16))
    w.run()
    peers: set[Peer] = set()
    while w.writes:
        assert len(w.writes) <= (1 if staged else 2)
        peers.update(write.transfer.peer for _, write in w.writes[:1])
        w.end_write(w.writes.pop(0))
        w.run()
    assert len(peers) == 4
    w.wait(1)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_status_can_be_reduced_by_min() -> None:
    w = world(layout(DENSE), layout(DENSE, tp=2))
    assert w.target().status(ROOM) is None
    w.open(ROOM)
    assert w.source().status(ROOM) is Status.CONNECTING
    w.receive(ROOM, Request(8))
    assert w.target().status(ROOM) is Status.CONNECTING
    w.run()
    assert w.source().status(ROOM) is Status.WAITING
    assert w.target().status(ROOM) is Status.WAITING
    w.each_source(Push(ROOM, Span(0, 4)))
    w.run()
    assert w.source().status(ROOM) is Status.MOVING
    assert min(w.target(rank).status(ROOM) or Status.DONE for rank in (0, 1)) is Status.MOVING
    w.prefill_all(ROOM, 8, first=4)
    assert w.source().status(ROOM) is None
    w.finish()


def test_wakeup_is_not_early() -> None:
    w = world(layout(DENSE), layout(DENSE))
    assert w.source().wakeup() is None
    assert w.target().wakeup() is None
    w.receive(ROOM, Request(8))
    w.run()
    due = w.target().wakeup()
    assert due is not None
    quiet = len(w.frames)
    w.now = due - 0.01
    for peer in (*w.sources, *w.targets):
        w.tell(peer, Tick())
    assert len(w.frames) == quiet
    w.open(ROOM)
    w.prefill_all(ROOM, 8)
    w.finish()
