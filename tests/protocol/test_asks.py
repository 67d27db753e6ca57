"""Pulls between machines: one answer for all ranks, kept for a bounded time."""

from __future__ import annotations

import msgspec
import pytest
from wire import ROOM, World
from wire import small_world as world

from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.prefix import prefix_chain
from kvferry.protocol.events import Cancel, Finish, Held, Open, Push, Send
from kvferry.protocol.messages import Accept, Ask, Holding, Offer
from kvferry.protocol.outcome import Done, Failure, FailureCode

CHAIN = prefix_chain(range(40), model="m", dtype="bf16")
LEAD, S1 = Peer("prefill", 0), Peer("prefill", 1)
T0, T1 = Peer("decode0", 0), Peer("decode0", 1)


def pull(w: World, *peers: Peer, prefix: int = 0, room: str = ROOM) -> None:
    """Pull a room at some decode ranks, or at every one."""
    for peer in peers or w.targets:
        event = w.receive_event(peer, room, Request(CHAIN.num_tokens, prefix), w.now + 60)
        wanted = msgspec.structs.replace(event.wanted, chain=CHAIN)
        w.tell(peer, msgspec.structs.replace(event, wanted=wanted))
    w.run()


def hold(w: World, tokens: int) -> None:
    """Open the room at every source, push what is held, and answer."""
    for source in w.sources:
        w.tell(source, Open(ROOM, w.now + 60))
        w.tell(source, Push(ROOM, Span(0, tokens)))
        w.tell(source, Finish(ROOM, tokens, b"meta", CHAIN.digest(tokens)))
    w.tell(LEAD, Held(ROOM, tokens))
    w.run()


def outcome(w: World, peer: Peer, room: str = ROOM) -> object:
    (only,) = w.reports[peer, room]
    return only


def test_only_the_lead_is_asked_and_its_engine_looks_up_once() -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w)
    asks = w.where(Ask)
    assert {ask.chain for ask in asks} == {CHAIN.short}  # type: ignore[union-attr]
    assert len(asks) == 2, "one from each target, to the lead alone"
    assert not w.where(Offer)
    assert [peer for peer, _ in w.lookups] == [LEAD]
    assert (w.lookups[0][1].prefix, w.lookups[0][1].deadline) == (0, w.now + 60)


@pytest.mark.parametrize("prefix", [0, 5, 16, 20])
def test_the_room_has_the_length_of_the_answer(prefix: int) -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w, prefix=prefix)
    hold(w, 16)
    assert w.outcomes(ROOM) == {"done"}
    offers = {offer.request for offer in w.where(Offer)}  # type: ignore[union-attr]
    assert offers == {Request(16, min(prefix, 16))}
    assert outcome(w, T0) == outcome(w, T1) == Done(b"meta", pulled=16)
    w.finish()


def test_a_late_rank_gets_the_same_answer() -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w, T0)
    hold(w, 16)
    assert (T0, ROOM) not in w.reports, "done would be too early: T1 has no answer yet"
    pull(w, T1)
    assert outcome(w, T1) == outcome(w, T0) == Done(b"meta", pulled=16)
    assert len(w.lookups) == 1
    w.finish()


def test_nothing_held_ends_the_pull_at_once_and_is_remembered() -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w, T0)
    w.tell(LEAD, Held(ROOM, 0))
    w.run()
    assert outcome(w, T0) == Done(pulled=0)
    pull(w, T1)
    assert outcome(w, T1) == Done(pulled=0)
    assert not w.where(Offer)
    assert len(w.source().asks.rooms) == 1
    w.wait(w.config.unclaimed_offer_ttl_s)
    assert not w.source().asks.rooms


def test_a_rank_is_not_done_with_an_answer_that_another_did_not_get() -> None:
    """The first answer has expired when the second rank asks, and the engine has more by then."""
    w = world(source_tp=2, target_tp=2, unclaimed_offer_ttl_s=5.0)
    pull(w, T0)
    w.tell(LEAD, Held(ROOM, 0))
    w.run()
    w.wait(w.config.unclaimed_offer_ttl_s)
    pull(w, T1)
    hold(w, 16)
    w.wait(w.config.unclaimed_offer_ttl_s)
    assert outcome(w, T0) == Done(pulled=0)
    failure = outcome(w, T1)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.DEADLINE


def test_an_answer_that_expires_before_the_room_is_open_fails_the_room() -> None:
    w = world(source_tp=2, target_tp=2, unclaimed_offer_ttl_s=5.0)
    pull(w, T0)
    w.wait(1.0)
    w.tell(LEAD, Held(ROOM, 16))
    w.run()
    w.wait(w.config.unclaimed_offer_ttl_s - 1.0)
    hold(w, 16)
    for peer in (LEAD, T0):
        failure = outcome(w, peer)
        assert isinstance(failure, Failure), peer


@pytest.mark.parametrize("tokens", [17, 48])
def test_an_impossible_answer_fails_the_pull(tokens: int) -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w)
    w.tell(LEAD, Held(ROOM, tokens))
    w.run()
    failure = outcome(w, T0)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.BAD_NOTE
    assert w.releases[T0, ROOM] == 1, "no source had an offer"


def test_a_second_answer_changes_nothing() -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w)
    w.tell(LEAD, Held(ROOM, 0))
    w.tell(LEAD, Held(ROOM, 32))
    w.tell(LEAD, Held("never asked", 32))
    w.run()
    assert {answer.num_tokens for answer in w.where(Holding)} == {0}  # type: ignore[union-attr]
    assert w.source().counts["late"] == 2


def test_a_pull_given_up_while_asking_fails_the_room_that_the_engine_opens() -> None:
    w = world(source_tp=2, target_tp=2)
    pull(w)
    for target in w.targets:
        w.tell(target, Cancel(ROOM))
        assert w.releases[target, ROOM] == 1
    w.run()
    hold(w, 16)
    for source in w.sources:
        failure = outcome(w, source)
        assert isinstance(failure, Failure)
        assert failure.code is FailureCode.ABORTED
        assert w.releases[source, ROOM] == 1


def test_a_rank_that_never_asks_ends_the_pin() -> None:
    w = world(source_tp=1, target_tp=2)
    pull(w, T0)
    hold(w, 16)
    assert (LEAD, ROOM) not in w.reports
    w.wait(w.config.unclaimed_offer_ttl_s)
    failure = outcome(w, LEAD)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.DEADLINE
    assert w.releases[LEAD, ROOM] == 1


def test_an_answer_for_nobody_ends_the_pin() -> None:
    """The engine took so long to answer that the source has forgotten who asked."""
    w = world(source_tp=1, target_tp=1)
    pull(w, T0)
    w.tell(T0, Cancel(ROOM))
    w.run()
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    hold(w, 16)
    assert (LEAD, ROOM) not in w.reports
    w.wait(w.config.resend_s)
    failure = outcome(w, LEAD)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.DEADLINE
    assert w.releases[LEAD, ROOM] == 1


def test_asked_rooms_are_bounded() -> None:
    w = world(source_tp=1, target_tp=1, max_asked_rooms=2)
    for room in ("one", "two", "three"):
        pull(w, room=room)
    failure = outcome(w, T0, "three")
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.TOO_MANY_ROOMS
    assert len(w.source().asks.rooms) == len(w.lookups) == 2


def test_a_room_of_another_request_is_not_pulled() -> None:
    w = world(source_tp=1, target_tp=1)
    w.open(ROOM)
    pull(w)
    failure = outcome(w, T0)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.ROOM_TAKEN


def test_answers_to_offers_that_were_not_made_are_ignored() -> None:
    """A source may send anything before the target has offered its pages."""
    w = world(source_tp=2, target_tp=2)
    pull(w)
    link, lead = w.target().peers.current[LEAD], w.source()
    (room,) = w.target().rooms.values()
    lead.outbox.actions = []
    lead.peers.send(lead.links[link.session], Accept(ROOM, room.generation))
    (sent,) = lead.outbox.actions
    assert isinstance(sent, Send)
    w.post(T0, sent.envelope)
    w.run()
    assert w.target().counts["misdirected"] == 1
    hold(w, 32)
    assert outcome(w, T0) == Done(b"meta", pulled=32)
