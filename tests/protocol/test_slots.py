"""Local slots and early gathers of a source."""

from __future__ import annotations

import pytest
from wire import DENSE, ROOM, World, always_stage, dense, never_stage

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import Cancel, Finish, Push, WriteEnded, WriteFate
from kvferry.protocol.messages import Arrived, Drained, Grant, Staging, Want
from kvferry.protocol.outcome import FailureCode

S0, T0 = Peer("prefill", 0), Peer("decode0", 0)
# Size of one token of both layers.
SLOT_BYTES = 64
NEVER_S = 50.0


def world(
    ahead: int | None,
    target_tp: int = 1,
    *,
    num_slots: int = 3,
    slot_bytes: int = SLOT_BYTES,
    **limits: float,
) -> World:
    """Stage everything, and withhold all credits until ``grant``."""
    times = {"local_slots": 4, "credit_patience_s": NEVER_S} | limits
    config = ProtocolConfig(early_gather_slots=ahead, **times)  # type: ignore[arg-type]
    w = World(dense(), (dense(target_tp),), config, Staging(slot_bytes, num_slots), always_stage)
    w.drops = lambda _, envelope: isinstance(envelope.body, Grant)
    return w


def push(w: World, tokens: int = 8, *, finish: bool = True) -> None:
    w.open(ROOM)
    w.receive(ROOM, Request(tokens))
    w.run()
    w.each_source(Push(ROOM, Span(0, tokens)))
    if finish:
        w.each_source(Finish(ROOM, tokens, b"meta"))
    w.run()


def grant(w: World) -> None:
    """Stop dropping grants; lost ones are requested again."""
    w.drops = lambda _, __: False
    w.wait(2 * w.config.resend_s)


def serials(w: World) -> set[int | None]:
    return {body.serial for body in w.where(Arrived) if isinstance(body, Arrived)}


@pytest.mark.parametrize("ahead", [None, 0])
def test_no_early_gather_by_default(ahead: int | None) -> None:
    w = world(ahead)
    push(w)
    assert (w.gathered, w.writes) == ([], [])
    w.hold.writes = True
    grant(w)
    assert {write.local_slot is not None for _, write in w.writes} == {True}
    assert not w.gathered
    w.hold.writes = False
    for held in w.writes:
        w.end_write(held)
    w.writes.clear()
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize("ahead", [0, 2])
def test_write_is_followed_while_fragments_wait(ahead: int) -> None:
    w = world(ahead, num_slots=1)
    push(w, 3)
    w.hold.writes = True
    grant(w)
    followed = []
    while w.writes:
        held = w.writes.pop()
        followed.append(w.source().writes.is_followed(held[1].op))
        w.end_write(held)
        w.wait(2 * w.config.resend_s)
        assert not w.source().writes.is_followed(held[1].op), "it is over"
    assert followed == [True, True, False]
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize(
    ("ahead", "limits", "num_held"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (3, {}, 2),
        (9, {"local_slots": 9}, 4),
        (9, {"local_slots": 9, "max_inflight": 5}, 2),
        (2, {"local_slots": 1}, 1),
        (2, {"max_inflight": 1}, 0),
        (2, {"local_slots": 1, "max_inflight": 1}, 0),
    ],
)
def test_transfer_gathers_early_within_its_limits(
    ahead: int, limits: dict[str, int], num_held: int
) -> None:
    w = world(ahead, **limits)
    push(w)
    assert len(w.gathers) == num_held
    assert len({gather.local_slot for gather in w.gathers.values()}) == num_held
    grant(w)
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    assert None not in serials(w), "all of it went through slots"
    w.finish()


def test_all_transfers_together_use_half_of_the_slots() -> None:
    w = world(2, target_tp=4)
    push(w)
    assert len(w.gathers) == 2
    assert len({gather.transfer.peer for gather in w.gathers.values()}) == 2, "transfers take turns"
    grant(w)
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_transfer_with_credits_proceeds_beside_a_waiting_one() -> None:
    w = world(2, target_tp=2, num_slots=1, local_slots=2)
    stopped = Peer("decode0", 1)
    w.drops = lambda to, envelope: isinstance(envelope.body, Grant) and envelope.sender == stopped
    push(w)
    written = [envelope for to, envelope in w.frames if to == T0]
    blocks = [e.body for e in written if isinstance(e.body, Arrived)]
    assert len(blocks) >= 4, "the transfer with credits has finished"
    assert {gather.transfer.peer for gather in w.gathers.values()} == {stopped}
    w.drops = lambda _, __: False
    w.wait(4)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_only_slot_is_reclaimed_for_a_transfer_with_credits() -> None:
    w = world(2, target_tp=2, num_slots=1, local_slots=1)
    push(w)
    (held,) = w.gathers.values()
    waits, other = (
        held.transfer.peer,
        next(Peer("decode0", r) for r in (0, 1) if r != held.transfer.peer.rank),
    )
    w.drops = lambda to, envelope: isinstance(envelope.body, Grant) and envelope.sender == waits
    w.wait(2 * w.config.resend_s)
    written = [e.body for to, e in w.frames if to == other and isinstance(e.body, Arrived)]
    assert len(written) >= 4, "the transfer with credits has finished"
    assert None not in serials(w)
    assert {gather.transfer.peer for gather in w.gathers.values()} == {waits}, (
        "it has gathered again"
    )
    grant(w)
    w.wait(4)
    assert w.outcomes(ROOM) == {"done"}
    assert None not in serials(w), "reclaimed blocks were staged later"
    w.finish()


@pytest.mark.parametrize("given_up", [False, True])
def test_reclaimed_gather_is_in_flight_until_it_has_ended(given_up: bool) -> None:
    """Meanwhile its own credit may arrive, or the room may be aborted."""
    w = world(2, target_tp=2, num_slots=1, local_slots=1)
    push(w, 1)
    (held,) = w.gathers.values()
    w.hold.discards = True
    w.drops = lambda to, e: isinstance(e.body, Grant) and e.sender == held.transfer.peer
    w.wait(2 * w.config.resend_s)
    assert (len(w.discards), w.writes, len(w.source().inflight.slots)) == (1, [], 0)
    grant(w)
    assert not w.where(Arrived), "the slot is not free yet"
    if given_up:
        w.each_source(Cancel(ROOM))
        w.run()
        assert w.releases[S0, ROOM] == 0, "its pages may still be read"
    w.hold.discards = False
    w.end_discard(w.discards.pop())
    w.wait(4)
    assert w.outcomes(ROOM) == ({FailureCode.ABORTED} if given_up else {"done"})
    assert None not in serials(w)
    assert w.source().counts["busy"] == 0
    w.finish()


def test_oldest_gather_is_posted_first() -> None:
    w = world(2, num_slots=1)
    push(w)
    held = list(w.gathers.values())
    w.hold.writes = True
    grant(w)
    ((_, first),) = w.writes
    assert (first.op, first.blocks, first.local_slot) == (
        held[0].op,
        held[0].blocks,
        held[0].local_slot,
    )
    assert isinstance(first.note.body, Arrived)
    assert first.note.body.serial == 0
    assert [gather.op for gather in w.gathers.values()] == [held[1].op, w.gathered[2].op]
    w.hold.writes = False
    w.end_write(w.writes.pop())
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_post_does_not_wait_for_other_writes() -> None:
    w = world(2, max_inflight=4, num_slots=1)
    push(w, 16, finish=False)
    w.hold.writes = True
    policy, w.stages = w.stages, never_stage
    w.open("other")
    w.receive("other", Request(8))
    w.run()
    for token in range(2):
        w.tell(S0, Push("other", Span(token, token + 1)))
    assert len(w.source().inflight.writes) == w.config.max_inflight, "nothing new may start"
    w.stages = policy
    grant(w)
    assert [write.slot for _, write in w.writes] == [None, None, 0]
    w.hold.writes = False
    for held in w.writes:
        w.end_write(held)
    w.writes.clear()
    w.each_source(Cancel(ROOM))
    w.each_source(Cancel("other"))
    w.wait(4)
    w.finish()


@pytest.mark.parametrize("ahead", [0, 2])
def test_credits_are_requested_once(ahead: int) -> None:
    w = world(ahead)
    push(w)
    totals = {body.total for body in w.where(Want) if isinstance(body, Want)}
    assert totals == {8}, "a token each, gathered or not"
    grant(w)
    w.wait(2)
    assert {body.total for body in w.where(Want) if isinstance(body, Want)} == {8}
    assert serials(w) == set(range(8))
    w.finish()


def test_partly_filled_slot_is_not_gathered_early() -> None:
    w = world(2, slot_bytes=2 * SLOT_BYTES)
    w.open(ROOM)
    w.receive(ROOM, Request(3))
    w.run()
    w.each_source(Push(ROOM, Span(0, 1)))
    assert not w.gathered, "half a slot is free"
    w.each_source(Push(ROOM, Span(1, 2)))
    assert not w.gathered, "the next push may share the slot"
    w.each_source(Push(ROOM, Span(2, 3)))
    (gather,) = w.gathers.values()
    assert [str(block.tokens) for block in gather.blocks] == ["[0, 1)", "[1, 2)"]
    w.each_source(Finish(ROOM, 3, b"meta"))
    assert len(w.gathers) == 2, "no push follows"
    grant(w)
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_gathered_blocks_are_written_directly_without_credits() -> None:
    w = world(2, credit_patience_s=1.0)
    w.hold.discards = True
    push(w)
    assert len(w.gathers) == 2
    w.wait(1.1)
    assert not w.gathers
    assert w.source().counts["impatient"] == 8
    assert w.outcomes(ROOM) == set(), "some of it may still be read"
    assert w.source().counts["busy"] == 0
    while w.discards:
        w.end_discard(w.discards.pop())
    w.wait(1)
    assert w.outcomes(ROOM) == {"done"}
    assert serials(w) == {None}
    assert w.source().counts["busy"] == 0, "no write was refused as busy"
    w.finish()


def test_credit_patience_applies_to_gathered_blocks() -> None:
    w = world(2, credit_patience_s=1.0)
    push(w, 2)
    assert not w.source().rooms[ROOM].outbounds[0].staged
    assert len(w.gathers) == 2
    w.wait(1.1)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize("who", [S0, T0])
def test_abort_waits_for_early_gathers(who: Peer) -> None:
    w = world(2)
    w.hold.discards = True
    push(w)
    w.tell(who, Cancel(ROOM))
    w.run()
    assert len(w.discards) == 2
    assert not w.gathers
    assert w.outcomes(ROOM) == {FailureCode.ABORTED}
    assert w.releases[S0, ROOM] == 0
    assert len(w.source().inflight.slots) == w.config.local_slots - 2
    w.end_discard(w.discards.pop())
    w.run()
    assert w.releases[S0, ROOM] == 0
    assert not w.where(Drained)
    w.end_discard(w.discards.pop())
    w.run()
    assert w.releases[S0, ROOM] == 1
    w.wait(2)
    w.finish()


def test_lost_target_discards_early_gathers() -> None:
    w = world(2, silence_s=4.0, heartbeat_s=1.0)
    w.hold.teardowns = w.hold.discards = True
    push(w)
    del w.targets[T0]
    w.wait(6)
    assert len(w.discards) == 2
    assert w.outcomes(ROOM) == {FailureCode.PEER_SILENT}
    assert w.releases[S0, ROOM] == 0
    while w.discards:
        w.end_discard(w.discards.pop())
    w.run()
    assert w.releases[S0, ROOM] == 1, "nothing reads the pages any more"


def test_failed_gather_fails_its_room() -> None:
    w = world(2)
    push(w)
    (key, _), (other, _) = w.gathers.items()
    del w.gathers[key]
    w.tell(S0, WriteEnded(key[1], WriteFate.FAILED))
    assert w.outcomes(ROOM) == {FailureCode.TRANSPORT}
    w.run()
    assert other not in w.gathers
    w.wait(2)
    w.finish()


def test_busy_post_is_retried() -> None:
    w = world(2)
    push(w)
    w.hold.writes = True
    grant(w)
    held = w.writes.pop(0)
    w.hold.writes = False
    for each in w.writes:
        w.end_write(each)
    w.writes.clear()
    w.fail_write(held, WriteFate.BUSY)
    w.run()
    assert w.source().counts["busy"] == 1
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    assert None not in serials(w)
    w.finish()


def test_slot_holds_one_token() -> None:
    (group,) = DENSE.groups
    assert DENSE.num_layers * group.units * group.unit_bytes == SLOT_BYTES
