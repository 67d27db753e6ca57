"""Limits on rooms, links and plans."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from wire import ROOM, let_go
from wire import small_world as world

from kvferry.ids import Peer, Session
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import Cancel, Push, Received
from kvferry.protocol.links import MAX_PLANS, plan_between
from kvferry.protocol.messages import Envelope, Hello
from kvferry.protocol.states import LinkState, RoomState

S0, T0 = Peer("prefill", 0), Peer("decode0", 0)


@pytest.mark.parametrize("restart", [False, True])
def test_late_frame_of_an_old_session_does_not_end_the_new_one(restart: bool) -> None:
    w = world()
    held: list[Envelope] = []

    def hold(to: Peer, envelope: Envelope) -> bool:
        late = to == S0 and not isinstance(envelope.body, Hello)
        if late:
            held.append(envelope)
        return late

    w.drops = hold
    w.receive("old", Request(8))
    w.run()
    if restart:
        w.start_target(0, 0, incarnation=77)
    else:
        w.tear_down(T0, S0)
        w.run()
    w.drops = lambda to, envelope: False
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    (living,) = [link for link in w.source().links.values() if link.state is LinkState.UP]
    w.tell(S0, Received(held[0]))
    w.run()
    assert w.source().peers.current[T0] is living
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}


def test_late_engine_call_is_ignored_after_a_retry() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    w.tell(T0, Cancel(ROOM))
    w.run()
    w.receive(ROOM, Request(8))
    w.run()
    w.tell(S0, Push(ROOM, Span(0, 8)))
    assert w.source().rooms[ROOM].state is RoomState.EARLY
    assert not w.source().rooms[ROOM].pushes


def test_remembered_rooms_do_not_block_early_offers() -> None:
    w = world(max_early_rooms=3)
    for number in range(5):
        w.open(f"x{number}", deadline=1)
    w.wait(2)
    assert sum(room.state is RoomState.OVER for room in w.source().rooms.values()) == 3
    w.receive(ROOM, Request(8))
    w.run()
    assert w.source().rooms[ROOM].state is RoomState.EARLY
    w.open(ROOM)
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    let_go(w)


def test_early_room_does_not_count_twice() -> None:
    w = world(max_rooms=1)
    w.receive(ROOM, Request(8))
    w.run()
    w.open(ROOM)
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}


def test_tentative_links_and_plans_are_bounded() -> None:
    w = world(max_peers=1)
    w.receive(ROOM, Request(8))
    hello = w.sent(Hello)[0].body
    assert isinstance(hello, Hello)
    for number in range(2 * MAX_PLANS):
        other = replace(hello, layout=replace(hello.layout, page_tokens=1 + number))
        frame = Envelope(T0, 2000, Session(2000, 10 + number), 1, other)
        w.source().handle(Received(frame), w.now)
    assert len(w.source().links) == 1
    assert plan_between.cache_info().currsize == MAX_PLANS
