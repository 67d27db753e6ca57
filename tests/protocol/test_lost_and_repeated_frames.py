"""Lost, repeated and overtaken frames, which may cost time and nothing else."""

from __future__ import annotations

import itertools

import pytest
from wire import ROOM, small_world

from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import Finish, Push, Received, WriteEnded
from kvferry.protocol.messages import Accept, Close, Complete, Grant, Offer, StatusPoll, Want

STAGED = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
LOSABLE = [Offer, Accept, Want, Grant, Close, Complete]


@STAGED
@pytest.mark.parametrize("kind", LOSABLE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how_often", [1, 3])
def test_lost_frame_is_repaired(kind: type[Offer], how_often: int, staged: bool) -> None:
    w = small_world(2, staged=staged)
    lost = itertools.count()
    w.drops = lambda _, envelope: isinstance(envelope.body, kind) and next(lost) < how_often
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.wait(2)
    w.prefill_all(ROOM, 16)
    w.wait(10)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_repeated_offer_is_accepted_again() -> None:
    w = small_world()
    lost = itertools.count()
    w.drops = lambda _, envelope: isinstance(envelope.body, Accept) and next(lost) < 1
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.wait(4 * w.config.resend_s)
    assert (len(w.where(Offer)), len(w.where(Accept))) == (2, 2)
    w.prefill_all(ROOM, 8)
    w.wait(2)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@STAGED
def test_lost_notes_are_repeated(staged: bool) -> None:
    w = small_world(2, staged=staged)
    w.hold.notes = True
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.prefill_all(ROOM, 8)
    w.hold.notes = False
    w.wait(4 * w.config.status_poll_s)
    assert w.outcomes(ROOM) == {"done"}
    assert bool(w.where(StatusPoll)) is staged, (
        "without credits, Close itself says what was written"
    )
    w.finish()


@STAGED
def test_repeated_frames_change_nothing(staged: bool) -> None:
    w = small_world(2, 2, staged=staged)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    seen = 0

    def again() -> None:
        nonlocal seen
        new, seen = w.frames[seen:], len(w.frames)
        w.pending.extend((to, Received(envelope)) for to, envelope in new)
        w.run()

    w.run()
    again()
    for at in range(0, 16, 4):
        w.each_source(Push(ROOM, Span(at, at + 4)))
        w.run()
        again()
    w.each_source(Finish(ROOM, 16, b"meta"))
    w.run()
    again()
    everything = list(w.frames)
    w.wait(4)
    assert w.outcomes(ROOM) == {"done"}
    w.pending.extend((to, Received(envelope)) for to, envelope in reversed(everything))
    w.wait(4)
    w.finish()


def test_an_overtaken_frame_is_dropped() -> None:
    w = small_world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Offer)
    w.receive(ROOM, Request(8))
    w.wait(w.config.resend_s + 0.1)
    first, second = w.sent(Offer)[:2]
    w.drops = lambda _, __: False
    source = w.source()
    w.tell(source.me, Received(second))
    before = len(w.where(Accept))
    w.tell(source.me, Received(first))
    assert source.counts["overtaken"] == 1
    assert len(w.where(Accept)) == before
    w.open(ROOM)
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_end_of_a_write_counts_once() -> None:
    w = small_world()
    w.hold.writes = True
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.each_source(Push(ROOM, Span(0, 8)))
    (held,) = w.writes
    w.end_write(w.writes.pop())
    w.run()
    w.tell(held[0], WriteEnded(held[1].op))
    assert w.source().counts["late"] == 1
    w.each_source(Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()
