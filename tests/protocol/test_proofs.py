"""Proofs of content: sums before Close and before Done, and pages that are held until then."""

from __future__ import annotations

import pytest
from wire import DENSE, ROOM, World, always_stage

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, Peer
from kvferry.layout import Layout, Parallel
from kvferry.plan import Request
from kvferry.protocol.events import Cancel, Proven
from kvferry.protocol.messages import Close, Offer, Staging
from kvferry.protocol.outcome import Failure, FailureCode

FULL = ProtocolConfig(proof_rooms=1.0)
TARGET, SOURCES = Peer("decode0", 0), [Peer("prefill", rank) for rank in range(2)]
REQUEST = Request(10)


def world(config: ProtocolConfig = FULL, *, staged: bool = False) -> World:
    """Return two sources and one target."""
    sides = Layout(DENSE, Parallel(tp=2)), (Layout(DENSE),)
    if staged:
        return World(*sides, config, Staging(slot_bytes=64, num_slots=3), always_stage)
    return World(*sides, config)


def carried(w: World) -> World:
    w.receive(ROOM, REQUEST)
    w.open(ROOM)
    w.prefill_all(ROOM, REQUEST.num_tokens)
    return w


def sums_sent(w: World) -> list[bytes | None]:
    return [body.sums for body in w.where(Close) if isinstance(body, Close)]


@pytest.mark.parametrize("staged", [False, True])
def test_every_source_sends_the_sums_that_the_target_compares(staged: bool) -> None:
    w = carried(world(staged=staged))
    assert w.outcomes(ROOM) == {"done"}
    proofs = [body.proof for body in w.where(Offer) if isinstance(body, Offer)]
    assert len(proofs) == 2
    assert proofs[0] == proofs[1] is not None
    # A sum for each of two layers.
    assert sums_sent(w) == [b"12345678" * 2] * 2
    w.finish()


def test_without_a_proof_there_are_no_sums() -> None:
    w = world(ProtocolConfig())
    w.hold.proofs = True
    carried(w)
    assert w.outcomes(ROOM) == {"done"}
    assert w.proofs == []
    assert sums_sent(w) == [None, None]


@pytest.mark.parametrize("finished_first", [False, True])
def test_a_request_longer_than_what_was_pushed_is_not_proven(finished_first: bool) -> None:
    """The source has no pages for the rest, so it must fail the room before it computes sums."""
    w = world()
    w.hold.proofs = True
    w.open(ROOM)
    if not finished_first:
        w.receive(ROOM, REQUEST)
        w.run()
    w.prefill_all(ROOM, REQUEST.num_tokens // 2)
    if finished_first:
        w.receive(ROOM, REQUEST)
        w.run()
    assert w.proofs == []
    assert "not-all-pushed" in w.outcomes(ROOM)


def test_other_sums_fail_the_room_and_name_the_cells() -> None:
    w = world()
    w.sums[SOURCES[1]] = b"12345678" + b"87654321"
    carried(w)
    w.wait(1.0)
    (failure,) = w.reports[TARGET, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.CONTENT_CORRUPT
    assert failure.message == (
        "what has arrived is not what prefill/1 sent: group 'kv' layers 1 tokens 0..9"
    )
    # The sources hear of it, and all pages are free: nothing is quarantined.
    assert [w.reports[source, ROOM][0] for source in SOURCES] == [failure, failure]
    assert [w.releases[peer, ROOM] for peer in (TARGET, *SOURCES)] == [1, 1, 1]


def test_sums_of_another_number_fail_the_room() -> None:
    w = world()
    w.sums[SOURCES[0]] = b"12345678"
    carried(w)
    (failure,) = w.reports[TARGET, ROOM]
    assert str(failure) == "content-corrupt: prefill/0 sent 1 sums, not 2"


def test_a_source_that_cannot_sum_is_taken_unproven() -> None:
    w = world()
    w.sums[SOURCES[0]] = None
    carried(w)
    assert w.outcomes(ROOM) == {"done"}
    assert w.target().counts["unproven"] == 1


def test_a_target_that_cannot_sum_fails_the_room() -> None:
    w = world()
    w.sums[TARGET] = None
    carried(w)
    (failure,) = w.reports[TARGET, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.INTERNAL


def test_a_target_compares_after_the_last_scatter() -> None:
    w = world(staged=True)
    w.hold.scatters = True
    carried(w)
    assert w.scatters
    assert not [peer for peer, _ in w.proofs if peer == TARGET]
    w.hold.scatters = False
    while w.scatters:
        w.end_scatter(w.scatters.pop())
        w.run()
    assert w.outcomes(ROOM) == {"done"}


@pytest.mark.parametrize("side", [TARGET, SOURCES[0]], ids=str)
def test_pages_are_held_until_their_proof_has_ended(side: Peer) -> None:
    w = world()
    w.hold.proofs = True
    carried(w)
    if side == TARGET:
        for held in [one for one in w.proofs if one[0] != TARGET]:
            w.proofs.remove(held)
            w.end_proof(held)
        w.run()
    mine = [one for one in w.proofs if one[0] == side]
    assert mine
    w.pending.append((side, Cancel(ROOM)))
    w.wait(1.0)
    assert isinstance(w.reports[side, ROOM][0], Failure)
    assert w.releases[side, ROOM] == 0
    for held in mine:
        w.end_proof(held)
    w.wait(1.0)
    assert w.releases[side, ROOM] == 1


@pytest.mark.parametrize("peer", [TARGET, SOURCES[0]], ids=str)
def test_an_unknown_answer_is_counted_and_ignored(peer: Peer) -> None:
    w = carried(world())
    machine = w.source() if peer in w.sources else w.target()
    before = machine.counts["late"]
    assert machine.handle(Proven(Op(99), b""), w.now) == []
    assert machine.counts["late"] == before + 1
