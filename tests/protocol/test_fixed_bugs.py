"""Bugs that the machines once had, each in a minimal scenario."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace

import pytest
from wire import DENSE, MODEL, ROOM, World, always_stage, dense, let_go, moving
from wire import small_world as world

from kvferry.digest import MAX_DIGEST
from kvferry.errors import InputError, Misuse
from kvferry.ids import Generation, Op, Peer, Serial, Session
from kvferry.layout import Layout, Span
from kvferry.plan import Block, Request
from kvferry.protocol.events import (
    Cancel,
    Event,
    Finish,
    Instance,
    Push,
    Receive,
    Received,
    ReceiveRequest,
    Scattered,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.messages import (
    MAX_METADATA,
    MAX_PAGES,
    MAX_REMAINING_S,
    MAX_TABLES,
    Abort,
    Accept,
    Arrived,
    Drained,
    Envelope,
    Offer,
    PageTableMessage,
    Staging,
    StatusPoll,
)
from kvferry.protocol.outcome import MAX_TEXT, Failure, FailureCode
from kvferry.protocol.states import RoomState

S0, S1 = Peer("prefill", 0), Peer("prefill", 1)
T0, T1 = Peer("decode0", 0), Peer("decode0", 1)


def started(w: World, tokens: int = 8) -> World:
    """Open a room at prefill and receive it at decode."""
    w.open(ROOM)
    w.receive(ROOM, Request(tokens))
    w.run()
    return w


def code(w: World, peer: Peer, room: str = ROOM) -> FailureCode:
    (said,) = w.reports[peer, room]
    assert isinstance(said, Failure)
    return said.code


def deliver_only(w: World, kind: type[Event]) -> None:
    """Deliver all pending events of a type before any others."""
    chosen = [one for one in w.pending if isinstance(one[1], kind)]
    assert chosen
    w.pending = deque(one for one in w.pending if not isinstance(one[1], kind))
    for one in chosen:
        w.tell(*one)


# ---------------------------------------------------------------- proof


def offered_twice(w: World) -> Envelope:
    """The source has accepted the first Offer and aborted; the second one is in flight."""
    w.open(ROOM)
    w.drops = lambda _, envelope: isinstance(envelope.body, Offer)
    w.receive(ROOM, Request(8))
    w.wait(w.config.resend_s + 0.1)
    w.drops = lambda _, envelope: False
    first, second = w.sent(Offer)
    w.tell(S0, Received(first))
    w.tell(S0, Cancel(ROOM))
    return second


def test_drained_is_no_proof_while_an_offer_is_in_flight() -> None:
    w = world()
    offered_twice(w)
    (drained,) = w.where(Drained)
    w.drops = lambda _, envelope: isinstance(envelope.body, Abort)
    w.run()
    assert isinstance(drained, Drained)
    assert drained.heard < w.sent(Offer)[1].seq
    assert code(w, T0) is FailureCode.ABORTED, "known at once"
    assert not w.releases[T0, ROOM], "but the pages may still be written"
    assert w.where(Abort, S0), "so it asks again"
    w.drops = lambda _, __: False
    w.wait(w.config.resend_s + 0.1)
    assert w.releases[T0, ROOM] == 1
    let_go(w)
    w.finish()


def test_repeated_offer_is_refused_after_drained() -> None:
    w = world()
    second = offered_twice(w)
    w.tell(S0, Received(second))
    w.run()
    assert w.releases[T0, ROOM] == 1
    w.hold.writes = True
    w.open(ROOM)
    w.each_source(Push(ROOM, Span(0, 8)))
    w.run()
    assert not w.writes, "the target's pages are somebody else's now"
    w.each_source(Cancel(ROOM))
    let_go(w)
    w.finish(attempts=2)


def test_closed_source_that_is_gone_does_not_delay_release() -> None:
    w = world(2, 1)
    started(w)
    w.tell(S0, Push(ROOM, Span(0, 8)))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    w.hold.teardowns = True
    del w.sources[S0]
    w.wait(w.config.silence_s + 1)
    assert not w.reports, "nothing is missing from it"
    w.teardowns.clear()
    w.tear_down(T0, S0)
    w.tell(T0, Cancel(ROOM))
    w.run()
    assert w.releases[T0, ROOM] == 1
    let_go(w)
    w.finish()


def test_failed_room_waits_for_a_lost_closed_source() -> None:
    w = world(2, 1)
    started(w)
    w.tell(S0, Push(ROOM, Span(0, 8)))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    w.hold.teardowns = True
    del w.sources[S0]
    w.wait(w.config.silence_s + 1)
    w.tell(T0, Cancel(ROOM))
    w.wait(20)
    assert not w.releases[T0, ROOM], "lost is not proof"
    let_go(w)
    assert w.releases[T0, ROOM] == 1
    w.finish()


# ---------------------------------------------------------------- failed rooms


def test_late_abort_does_not_affect_the_next_attempt() -> None:
    w = world()
    moving(w)
    w.tell(S0, Cancel(ROOM))
    while w.writes:
        w.end_write(w.writes.pop())
    deliver_only(w, WriteEnded)
    w.run()
    aborts = [body for body in w.where(Abort, S0) if isinstance(body, Abort)]
    assert [body.accepted for body in aborts] == [True]
    assert not w.source().rooms, "not even a warning"
    w.hold.writes = False
    started(w)
    w.prefill_all(ROOM, 8)
    assert [len(said) for said in w.reports.values()] == [2, 2]
    assert not any(isinstance(said[-1], Failure) for said in w.reports.values())
    w.finish(attempts=2)


def test_abort_before_the_offer_is_remembered() -> None:
    w = world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Offer)
    w.receive(ROOM, Request(8))
    w.run()
    w.tell(T0, Cancel(ROOM))
    w.run()
    assert w.source().rooms[ROOM].state is RoomState.WARNED
    w.open(ROOM)
    assert code(w, S0) is FailureCode.ABORTED
    let_go(w)
    w.finish()


def failed_with_one_target_unheard() -> World:
    """Fail a room of two targets after only one of them has sent its offer."""
    w = world(1, 2)
    w.open(ROOM)
    w.receive(ROOM, Request(8), only=0)
    w.run()
    w.tell(T0, Cancel(ROOM))
    w.run()
    assert code(w, S0) is FailureCode.ABORTED
    assert w.source().rooms[ROOM].state is RoomState.OVER
    assert w.source().status(ROOM) is None
    return w


def test_late_offer_for_a_failed_room_is_refused() -> None:
    w = failed_with_one_target_unheard()
    w.receive(ROOM, Request(8), only=1)
    w.run()
    assert code(w, T1) is FailureCode.ABORTED, "the reason that the others have"
    assert w.releases[T1, ROOM] == 1
    assert not w.where(Accept, T1)
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    assert not w.source().rooms, "remembered for a while only"
    w.finish()


def test_pushes_after_the_failure_are_ignored() -> None:
    w = failed_with_one_target_unheard()
    w.receive(ROOM, Request(8), only=1)
    w.run()
    frames = len(w.frames)
    for event in (Push(ROOM, Span(0, 8)), Finish(ROOM, 8), Cancel(ROOM)):
        w.tell(S0, event)
    assert len(w.frames) == frames
    let_go(w)
    w.finish()


def test_finished_room_can_be_reopened() -> None:
    w = failed_with_one_target_unheard()
    started(w)
    w.prefill_all(ROOM, 8)
    assert [len(w.reports[peer, ROOM]) for peer in (S0, T0, T1)] == [2, 2, 1]
    assert not any(isinstance(said[-1], Failure) for said in w.reports.values())
    w.finish(attempts=2)


# ---------------------------------------------------------------- slots


def test_a_failed_room_gets_no_more_credits() -> None:
    w = World(dense(2), (dense(),), staging=Staging(64, 2), stages=always_stage)
    w.hold.writes = w.hold.scatters = True
    for room, source in (("served", S1), ("failed", S0)):
        w.open(room)
        w.receive(room, Request(32))
        w.run()
        w.tell(source, Push(room, Span(0, 32)))
        w.run()
    book = w.target().credits
    assert not book.free
    assert book.accounts["failed", 0].wanted, "it waits in the queue"
    del w.sources[S0]
    w.tell(T0, Cancel("failed"))
    while w.writes:
        w.end_write(w.writes.pop())
    w.run()
    while w.scatters:
        w.end_scatter(w.scatters.pop())
    w.run()
    assert book.accounts["served", 1].granted > 2
    assert not book.outstanding(("failed", 0))
    w.each_source(Cancel("served"))
    w.each_source(Cancel("failed"))
    let_go(w)
    w.finish()


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_note_larger_than_its_slot_fails_the_room(tokens: int) -> None:
    w = world(staged=True)
    w.hold.scatters = True
    moving(w, 16)
    (link,) = w.source().links.values()
    blocks = tuple(Block("kv", Span(0, 2), Span(at, at + 1)) for at in range(tokens))
    note = Arrived(ROOM, w.target().rooms[ROOM].generation, blocks, Serial(0))
    w.tell(T0, Received(Envelope(S0, w.source().incarnation, link.session, 0, note)))
    assert not w.scatters, "it would read behind the slot"
    assert code(w, T0) is FailureCode.BAD_NOTE
    let_go(w)
    w.finish()


def test_status_poll_for_an_unknown_room_is_answered() -> None:
    w = world()
    moving(w, 16)
    (link,) = w.target().links.values()
    nudge = Envelope(
        T0, w.target().incarnation, link.session, 0, StatusPoll("another", Generation(1))
    )
    w.tell(S0, Received(nudge))
    (drained,) = w.where(Drained)
    assert isinstance(drained, Drained)
    assert (drained.room, drained.failure.code) == ("another", FailureCode.UNKNOWN_ROOM)
    w.each_source(Cancel(ROOM))
    let_go(w)
    w.finish()


@pytest.mark.parametrize("rank", [0, 7])
def test_messages_of_other_peers_are_ignored(rank: int) -> None:
    w = world()
    moving(w, 16)
    target = w.target()
    (link,) = target.links.values()
    stranger, session = Peer("another", rank), Session(99, 1, 99, 1)
    target.links[session] = replace(link, peer=stranger, session=session)
    assert link.incarnation is not None
    failure = Failure.of(FailureCode.ABORTED, "says a stranger")
    abort = Abort(ROOM, target.rooms[ROOM].generation, failure)
    w.tell(T0, Received(Envelope(stranger, link.incarnation, session, 0, abort)))
    assert target.rooms[ROOM].failure is None
    del target.links[session]
    w.each_source(Cancel(ROOM))
    let_go(w)
    w.finish()


# ---------------------------------------------------------------- limits of frames


def test_far_deadline_is_clamped_in_the_offer() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8), deadline=1e9)
    w.run()
    (offer,) = w.where(Offer)
    assert isinstance(offer, Offer)
    assert offer.remaining_s == MAX_REMAINING_S
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_long_failure_message_is_truncated() -> None:
    large_pages = Layout(DENSE, page_tokens=16)
    w = started(World(large_pages, (large_pages,)), tokens=900)
    for first in range(0, 900, 4):
        w.each_source(Push(ROOM, Span(first, first + 2)))
        w.run()
    w.each_source(Finish(ROOM, 900))
    w.run()
    (failure,) = w.reports[T0, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.NOT_ALL_PUSHED
    assert len(failure.message) == MAX_TEXT
    let_go(w)
    w.finish()


def test_failure_messages_are_truncated() -> None:
    assert len(Failure.of(FailureCode.TRANSPORT, "é" * 5000).message) == MAX_TEXT
    assert Failure.of(FailureCode.TRANSPORT, "short").message == "short"


PAGES = tuple(range(MAX_PAGES + 1))


def wants(tables: tuple[PageTableMessage, ...], digest: bytes = b"") -> Receive:
    wanted = ReceiveRequest("new", Request(8), tables, 200.0, digest)
    return Receive(Instance("prefill", MODEL, dense()), wanted)


def test_an_event_that_no_frame_can_carry_is_refused_when_it_is_made() -> None:
    with pytest.raises(InputError, match="metadata must have at most"):
        Finish(ROOM, 16, bytes(MAX_METADATA + 1))
    with pytest.raises(InputError, match="a digest has at most"):
        Finish(ROOM, 16, b"", bytes(MAX_DIGEST + 1))
    with pytest.raises(InputError, match="a digest has at most"):
        wants((), bytes(MAX_DIGEST + 1))
    with pytest.raises(InputError, match="a room has at most"):
        wants(tuple(PageTableMessage(f"g{i}", ()) for i in range(MAX_TABLES + 1)))
    with pytest.raises(InputError, match="a room has at most"):
        wants((PageTableMessage("kv", PAGES),))
    wants((PageTableMessage("kv", PAGES[1:]),) * MAX_TABLES, bytes(MAX_DIGEST))


@pytest.mark.parametrize("tokens", [Span(0, 8), Span(7, 9)], ids=["twice", "in part"])
def test_misuse_by_the_engine_changes_nothing(tokens: Span) -> None:
    w = world()
    moving(w, 16)
    machine = w.source()
    before = pickle.dumps(machine)
    with pytest.raises(Misuse):
        machine.handle(Push(ROOM, tokens), w.now)
    assert pickle.dumps(machine) == before
    w.hold.writes = False
    while w.writes:
        w.end_write(w.writes.pop())
    w.prefill_all(ROOM, 16, first=8, metadata=bytes(MAX_METADATA))
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


# ---------------------------------------------------------------- late and unknown events


def test_machine_without_timers_has_no_wakeup() -> None:
    w = world()
    w.hold.teardowns = True
    moving(w)
    ((_, write),) = w.writes
    w.writes.clear()
    w.tell(S0, WriteEnded(write.op, WriteFate.UNKNOWN))
    assert w.source().rooms, "it waits for proof, and no clock brings that"
    assert w.source().wakeup() is None
    let_go(w)
    w.finish()


@pytest.mark.parametrize(
    ("peer", "event"),
    [
        (T0, Scattered(Op(7))),
        (S0, WriteEnded(Op(7))),
        (S0, WriteEnded(Op(7), WriteFate.FAILED)),
        (S0, WriteEnded(Op(7), WriteFate.BUSY)),
    ],
    ids=["scattered", "sent", "failed", "busy"],
)
def test_unknown_write_end_is_counted(peer: Peer, event: Event) -> None:
    w = started(world())
    w.tell(peer, event)
    machine = w.source() if peer == S0 else w.target()
    assert machine.counts["late"] == 1
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()
