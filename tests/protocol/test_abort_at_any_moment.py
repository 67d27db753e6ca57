"""Aborts at every moment of a room, and release on proof."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from wire import ROOM, World, let_go, moving
from wire import small_world as world

from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import (
    Cancel,
    Finish,
    Open,
    Push,
)
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Complete,
    Drained,
    Envelope,
    Hello,
    Offer,
    Welcome,
)
from kvferry.protocol.outcome import Failure, FailureCode, Status

S0, S1 = Peer("prefill", 0), Peer("prefill", 1)
T0, T1 = Peer("decode0", 0), Peer("decode0", 1)


# ---------------------------------------------------------------- aborts


def stop_connecting(w: World) -> None:
    w.drops = lambda _, envelope: isinstance(envelope.body, Hello | Welcome)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.drops = lambda _, __: False


def stop_early(w: World) -> None:
    w.receive(ROOM, Request(16))
    w.run()


def stop_offered(w: World) -> None:
    w.drops = lambda _, envelope: isinstance(envelope.body, Offer | Accept)
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.drops = lambda _, __: False


def stop_accepted(w: World) -> None:
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()


def stop_finished(w: World) -> None:
    moving(w)
    w.each_source(Push(ROOM, Span(8, 16)))
    w.each_source(Finish(ROOM, 16))
    w.run()


def stop_closed(w: World) -> None:
    w.drops = lambda _, envelope: isinstance(envelope.body, Complete)
    stop_accepted(w)
    w.tell(S1, Push(ROOM, Span(0, 16)))
    w.tell(S1, Finish(ROOM, 16))
    w.run()
    w.drops = lambda _, __: False


def stop_scattering(w: World) -> None:
    w.hold.scatters = True
    moving(w)
    w.hold.writes = False
    while w.writes:
        w.end_write(w.writes.pop())
    w.run()


STOPS = pytest.mark.parametrize(
    "stop",
    [
        stop_connecting,
        stop_early,
        stop_offered,
        stop_accepted,
        moving,
        stop_finished,
        stop_closed,
        stop_scattering,
    ],
    ids=lambda stop: stop.__name__.removeprefix("stop_"),
)
STAGED = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])


@STAGED
@STOPS
@pytest.mark.parametrize("who", [T0, T1, S0, S1], ids=repr)
def test_an_abort_at_any_moment(stop: Callable[[World], None], who: Peer, staged: bool) -> None:
    w = world(2, 2, staged=staged, credit_patience_s=100.0)
    stop(w)
    if who in w.sources and stop is stop_early:
        w.tell(who, Cancel(ROOM))
        assert not w.reports, "a source knows nothing of a room before it opens it"
        w.each_source(Open(ROOM, w.now + 60))
    w.tell(who, Cancel(ROOM))
    (outcome,) = w.reports[who, ROOM]
    assert isinstance(outcome, Failure)
    assert outcome.code is FailureCode.ABORTED
    w.run()
    # The caller of a decode instance tells all its ranks.
    for peer in w.targets if who in w.targets else w.sources:
        w.tell(peer, Cancel(ROOM))
    let_go(w)
    assert all(isinstance(said[0], Failure) for said in w.reports.values())
    w.finish()


@STAGED
@pytest.mark.parametrize("who", [T0, S0], ids=["decode", "prefill"])
def test_pages_are_released_after_drained(who: Peer, staged: bool) -> None:
    w = world(staged=staged)
    moving(w)
    assert w.writes
    w.tell(who, Cancel(ROOM))
    w.wait(3)
    assert w.outcomes(ROOM) == {"aborted"}
    assert len(w.reports) == 2, "both sides know"
    assert not w.releases, "a write is in flight: nobody may reuse anything"
    assert w.source().status(ROOM) is w.target().status(ROOM) is Status.FAILED
    assert not w.where(Drained)
    if staged:
        assert len(w.target().credits.free) < 3
    while w.writes:
        w.end_write(w.writes.pop())
    w.run()
    assert w.where(Drained)
    assert w.releases == {(S0, ROOM): 1, (T0, ROOM): 1}
    let_go(w)
    w.finish()


def test_scatter_delays_the_release() -> None:
    w = world(staged=True)
    stop_scattering(w)
    assert w.scatters
    w.tell(T0, Cancel(ROOM))
    w.run()
    assert w.releases == {(S0, ROOM): 1}
    let_go(w)
    assert w.releases == {(S0, ROOM): 1, (T0, ROOM): 1}
    w.finish()


@pytest.mark.parametrize("kind", [Abort, Drained], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("who", [T0, S0], ids=["decode", "prefill"])
def test_lost_aborts_and_drains_are_repeated(kind: type[Abort], who: Peer) -> None:
    w = world()
    moving(w)
    lost: list[Envelope] = []

    def drop(_: Peer, envelope: Envelope) -> bool:
        if isinstance(envelope.body, kind) and len(lost) < 2:
            lost.append(envelope)
            return True
        return False

    w.drops = drop
    w.tell(who, Cancel(ROOM))
    w.run()
    let_go(w)
    assert lost
    assert len(w.reports) == 2
    w.finish()
