"""Rooms that fail through deadlines, dead peers, failed writes or misuse."""

from __future__ import annotations

import pickle

import pytest
from wire import MODEL, ROOM, World, let_go, moving
from wire import small_world as world

from kvferry.errors import Misuse
from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import (
    Cancel,
    Event,
    Finish,
    Instance,
    Open,
    Prepare,
    Push,
    Receive,
    ReceiveRequest,
    WriteFate,
)
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import (
    Complete,
    Hello,
    PageTableMessage,
)
from kvferry.protocol.outcome import Failure, FailureCode

S0, S1 = Peer("prefill", 0), Peer("prefill", 1)
T0, T1 = Peer("decode0", 0), Peer("decode0", 1)


STAGED = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])


def stop_closed(w: World) -> None:
    """The second source has closed; drop its Complete."""
    w.drops = lambda _, envelope: isinstance(envelope.body, Complete)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.tell(S1, Push(ROOM, Span(0, 16)))
    w.tell(S1, Finish(ROOM, 16))
    w.run()
    w.drops = lambda _, __: False


# ---------------------------------------------------------------- deadlines and expiry


def test_unclaimed_offer_expires() -> None:
    w = world(unclaimed_offer_ttl_s=20.0)
    w.receive(ROOM, Request(8), deadline=60)
    w.run()
    assert w.source().rooms
    w.wait(19)
    assert w.source().rooms
    w.wait(2)
    assert not w.source().rooms
    assert w.outcomes(ROOM) == {"deadline"}
    w.finish()


def test_too_many_early_offers_are_refused() -> None:
    w = world(max_early_rooms=2)
    for room in ("a", "b", "c"):
        w.receive(room, Request(8))
        w.run()
    assert w.outcomes("c") == {"too-many-rooms"}
    for room in ("a", "b"):
        w.open(room)
        w.prefill_all(room, 8)
        assert w.outcomes(room) == {"done"}
    w.finish()


def test_room_without_an_offer_ends_at_its_deadline() -> None:
    w = world()
    w.open(ROOM, deadline=30)
    w.prefill_all(ROOM, 8)
    w.wait(29)
    assert not w.reports
    w.wait(2)
    assert w.outcomes(ROOM) == {"deadline"}
    let_go(w)
    w.finish()


def test_a_room_that_is_never_pushed_ends_at_both_deadlines() -> None:
    w = world(2, 2)
    w.open(ROOM, deadline=30)
    w.receive(ROOM, Request(8), deadline=20)
    w.wait(21)
    assert {w.reports[peer, ROOM][0].code for peer in w.targets} == {"deadline"}  # type: ignore[union-attr]
    let_go(w)
    assert w.outcomes(ROOM) == {"deadline"}
    w.finish()


def test_passed_deadline_fails_at_once() -> None:
    w = world()
    w.open(ROOM, deadline=0)
    w.receive(ROOM, Request(8), deadline=0)
    assert w.outcomes(ROOM) == {"deadline"}
    assert not w.frames
    let_go(w)
    w.finish()


def test_limits_on_rooms() -> None:
    w = world(max_rooms=1)
    w.open("a")
    w.receive("a", Request(8))
    w.run()
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    assert w.outcomes("b") == {"too-many-rooms"}
    w.prefill_all("a", 8)
    assert w.outcomes("a") == {"done"}
    let_go(w)
    w.finish()


def test_a_target_refuses_tokens_beyond_its_limit_and_tells_its_sources() -> None:
    w = world(max_tokens=12)
    for room in ("a", "b"):
        w.open(room)
    w.receive("a", Request(8))
    w.receive("b", Request(8, prefix=3))
    w.run()
    # Nothing was pushed: the sources know before prefill has computed.
    assert w.outcomes("b") == {"too-many-rooms"}
    assert {"b"} & {room for _, room in w.releases} == {"b"}
    w.prefill_all("a", 8)
    assert w.outcomes("a") == {"done"}
    w.open("c")
    w.receive("c", Request(16, prefix=4))
    w.run()
    w.prefill_all("c", 16)
    assert w.outcomes("c") == {"done"}
    let_go(w)
    w.finish()


# ---------------------------------------------------------------- peers


def test_pages_wait_for_proof_from_a_dead_source() -> None:
    w = world(2, 1)
    w.hold.teardowns = True
    moving(w)
    del w.sources[S0]
    w.wait(w.config.silence_s + 1)
    assert w.reports[T0, ROOM] == [Failure(FailureCode.PEER_SILENT, f"nothing heard from {S0}")]
    assert w.reports[S1, ROOM][0].code is FailureCode.PEER_SILENT  # type: ignore[union-attr]
    w.writes = [held for held in w.writes if held[0] != S0]
    while w.writes:
        w.end_write(w.writes.pop())
    w.wait(50)
    assert w.releases == {(S1, ROOM): 1}
    assert w.target().num_quarantined == 1
    let_go(w)
    assert w.target().num_quarantined == 0
    w.finish()


def test_source_keeps_pages_until_proof_from_a_dead_target() -> None:
    w = world(1, 2)
    w.hold.teardowns = True
    moving(w)
    del w.targets[T1]
    w.wait(w.config.silence_s + 1)
    assert w.reports[S0, ROOM][0].code is FailureCode.PEER_SILENT  # type: ignore[union-attr]
    assert w.reports[T0, ROOM][0].code is FailureCode.PEER_SILENT  # type: ignore[union-attr]
    for held in [held for held in w.writes if held[1].transfer.peer == T0]:
        w.writes.remove(held)
        w.end_write(held)
    w.run()
    assert w.releases == {(T0, ROOM): 1}
    assert w.source().num_quarantined == 1
    w.writes.clear()
    let_go(w)
    assert w.releases == {(T0, ROOM): 1, (S0, ROOM): 1}
    w.finish()


def test_restarted_source_is_recognized() -> None:
    w = world()
    w.open("a")
    w.receive("a", Request(8))
    w.run()
    w.start_source(0, incarnation=77)
    w.wait(1.5)
    assert w.reports[T0, "a"][0].code is FailureCode.PEER_RESTARTED  # type: ignore[union-attr]
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.finish()


def test_restarted_target_is_recognized() -> None:
    w = world()
    w.open("a")
    w.receive("a", Request(8))
    w.run()
    w.start_target(0, 0, incarnation=77)
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    assert w.reports[S0, "a"][0].code is FailureCode.PEER_RESTARTED  # type: ignore[union-attr]
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.finish()


def test_stopped_target_continues_with_a_new_session() -> None:
    w = world()
    w.open("a")
    w.receive("a", Request(8))
    w.run()
    stopped = w.targets.pop(T0)
    w.wait(w.config.silence_s + 1)
    assert w.reports[S0, "a"][0].code is FailureCode.PEER_SILENT  # type: ignore[union-attr]
    w.targets[T0] = stopped
    w.wait(2)
    assert isinstance(w.reports[T0, "a"][0], Failure)
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.finish()


def test_closed_source_may_leave() -> None:
    w = world(2, 1)
    stop_closed(w)
    del w.sources[S1]
    w.wait(w.config.silence_s + 1)
    assert not w.reports
    w.tell(S0, Push(ROOM, Span(0, 16)))
    w.tell(S0, Finish(ROOM, 16))
    w.run()
    assert (T0, ROOM) in w.reports
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_silent_source_is_unreachable() -> None:
    w = world()
    w.sources.clear()
    w.receive(ROOM, Request(8))
    w.wait(w.config.handshake_s - 1)
    assert not w.reports
    assert len(w.where(Hello)) > 10
    w.wait(2)
    assert w.outcomes(ROOM) == {"unreachable"}
    w.finish()


# ---------------------------------------------------------------- writes that fail


@STAGED
def test_busy_transport_is_retried(staged: bool) -> None:
    w = world(staged=staged)
    moving(w)
    for _ in range(5):
        held, w.writes = w.writes, []
        for one in held:
            w.fail_write(one, WriteFate.BUSY)
        w.run()
        assert not w.writes, "it waits before it tries again"
        w.wait(w.config.resend_s / 4 + 0.01)
        assert w.writes
    assert not w.reports
    w.hold.writes = False
    while w.writes:
        w.end_write(w.writes.pop())
    w.prefill_all(ROOM, 16, first=8)
    w.wait(3)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@STAGED
def test_failed_write_fails_only_its_room(staged: bool) -> None:
    w = world(staged=staged)
    moving(w)
    held, w.writes = w.writes, []
    for one in held:
        w.fail_write(one, WriteFate.FAILED)
    w.run()
    let_go(w)
    assert w.outcomes(ROOM) == {"transport"}
    assert not w.sent(Hello)[1:], "the link stays"
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    w.prefill_all("b", 8)
    w.wait(3)
    assert w.outcomes("b") == {"done"}
    w.finish()


@STAGED
def test_write_of_unknown_fate_is_quarantined(staged: bool) -> None:
    w = world(staged=staged, max_quarantined_rooms=1)
    w.hold.teardowns = True
    moving(w)
    held, w.writes = w.writes, []
    for one in held:
        w.fail_write(one, WriteFate.UNKNOWN)
    w.wait(30)
    assert w.reports[S0, ROOM][0].code is FailureCode.TRANSPORT  # type: ignore[union-attr]
    assert not w.releases
    assert w.source().num_quarantined == 1
    assert len(w.source().inflight.writes) == len(held)
    w.open("b")
    assert w.outcomes("b") == {"quarantine-full"}
    assert w.teardowns
    let_go(w)
    assert w.releases == {(S0, ROOM): 1, (T0, ROOM): 1, (S0, "b"): 1}
    w.finish()


# ---------------------------------------------------------------- what engines get wrong


def test_different_token_counts_fail_the_room() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.prefill_all(ROOM, 12)
    let_go(w)
    assert w.outcomes(ROOM) == {"tokens-differ"}
    w.finish()


@pytest.mark.parametrize("late", [False, True], ids=["offered before", "offered after"])
def test_missing_push_fails_the_room_at_finish(late: bool) -> None:
    w = world()
    w.open(ROOM)
    if not late:
        w.receive(ROOM, Request(16))
        w.run()
    w.each_source(Push(ROOM, Span(0, 8)))
    w.each_source(Finish(ROOM, 16))
    w.run()
    if late:
        w.receive(ROOM, Request(16))
        w.run()
    let_go(w)
    assert w.outcomes(ROOM) == {"not-all-pushed"}
    w.finish()


@pytest.mark.parametrize(
    ("peer", "event"),
    [
        (S0, Open(ROOM, 200.0)),
        (S0, Push("finished", Span(0, 8))),
        (S0, Prepare("finished", Span(0, 8))),
        (S0, Finish("finished", 8)),
        (T0, None),
    ],
    ids=["open twice", "push", "prepare", "finish twice", "receive twice"],
)
def test_misuse_raises_and_changes_nothing(peer: Peer, event: Event | None) -> None:
    w = world(1, 2)
    moving(w)
    w.each_source(Open("finished", w.now + 60))
    w.each_source(Finish("finished", 0))
    machine: Machine = w.sources.get(peer) or w.targets[peer]
    if event is None:
        event = w.receive_event(peer, ROOM, Request(16), w.now + 60)
    before = pickle.dumps(machine)
    assert pickle.dumps(machine) == before, "the comparison itself is stable"
    with pytest.raises(Misuse):
        machine.handle(event, w.now)
    assert pickle.dumps(machine) == before
    w.each_source(Cancel("finished"))
    w.each_source(Cancel(ROOM))
    let_go(w)
    w.finish()


def test_late_steps_of_a_failed_room_are_ignored() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.tell(T0, Cancel(ROOM))
    w.run()
    frames = len(w.frames)
    for event in (Prepare(ROOM, Span(0, 8)), Push(ROOM, Span(0, 8)), Finish(ROOM, 8), Cancel(ROOM)):
        w.tell(S0, event)
    assert len(w.frames) == frames
    let_go(w)
    w.finish()


def test_pages_outside_the_pool_are_refused_by_the_source() -> None:
    w = world()
    w.open(ROOM)
    tables = (PageTableMessage("kv", (0, 64)),)
    prefill = Instance("prefill", MODEL, w.prefill)
    w.tell(T0, Receive(prefill, ReceiveRequest(ROOM, Request(8), tables, w.now + 60)))
    w.run()
    assert w.reports[T0, ROOM][0].code is FailureCode.BAD_OFFER  # type: ignore[union-attr]
    assert not w.writes
    w.each_source(Cancel(ROOM))
    let_go(w)
    w.finish()


def test_unexpected_disconnect_fails_the_rooms() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.tear_down(T0, S0)
    w.tear_down(S0, T0)
    w.run()
    assert w.outcomes(ROOM) == {"peer-gone"}
    w.finish()
