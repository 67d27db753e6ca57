"""Sessions and their ids, replaced and lost links, and delayed frames."""

from __future__ import annotations

import pytest
from wire import ROOM, World, dense, let_go
from wire import small_world as world

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer, Session
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import Cancel, Push, Received, Tick
from kvferry.protocol.links import EARLY_BEAT
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Envelope,
    Heartbeat,
    Hello,
    NoSession,
    Offer,
    RefusalCode,
    Refuse,
    Welcome,
)
from kvferry.protocol.outcome import FailureCode
from kvferry.protocol.states import LinkState

S0, T0 = Peer("prefill", 0), Peer("decode0", 0)


def carried(w: World, room: str = "next") -> None:
    """Complete a room without faults."""
    w.open(room)
    w.receive(room, Request(8))
    w.run()
    w.prefill_all(room, 8)
    assert w.outcomes(room) == {"done"}


def stop_target_until_lost(w: World) -> None:
    """Stop the target until the source has lost its session."""
    stopped = w.targets.pop(T0)
    w.wait(w.config.silence_s + 1)
    w.targets[T0] = stopped
    assert not w.source().links


def states(w: World) -> list[LinkState]:
    return [link.state for link in w.source().links.values()]


# ---------------------------------------------------------------- names


def test_welcome_completes_the_session_id() -> None:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    greeting, name = Session(2000, 1), Session(2000, 1, 1000, 1)
    assert [e.session for e in w.sent(Hello)] == [greeting]
    assert {e.session for e in w.sent(Welcome)} == {name}
    w.prefill_all(ROOM, 8)
    assert {e.session for _, e in w.frames if not isinstance(e.body, Hello)} == {name}
    assert name.greeting == greeting
    assert list(w.source().links) == list(w.target().links) == [name]
    w.finish()


def test_hello_with_a_complete_session_id_is_dropped() -> None:
    w = world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Hello)
    w.receive(ROOM, Request(8))
    (hello,) = w.sent(Hello)
    for session in (Session(2000, 1, 1000, 1), Session(77, 1)):
        w.tell(S0, Received(Envelope(T0, 2000, session, 1, hello.body)))
    assert not w.source().links
    assert w.source().counts["stale"] == 2
    w.tell(T0, Cancel(ROOM))
    w.wait(w.config.handshake_s + 1)
    w.finish()


@pytest.mark.parametrize("given_up", [False, True], ids=["offer", "abort"])
def test_first_frame_with_the_complete_id_confirms_the_session(given_up: bool) -> None:
    w = world()
    w.receive(ROOM, Request(8))
    for _ in ("Hello", "its memory is reached"):
        w.tell(*w.pending.popleft())
        assert states(w) == [LinkState.GREETING]
        assert not w.source().peers.current
    if given_up:
        w.tell(T0, Cancel(ROOM))
    w.tell(*w.pending.popleft())
    ((to, event),) = w.pending
    assert to == S0
    assert isinstance(event, Received)
    assert isinstance(event.envelope.body, Abort if given_up else Offer)
    w.tell(*w.pending.popleft())
    assert states(w) == [LinkState.UP]
    w.run()
    carried(w)
    w.tell(T0, Cancel(ROOM))
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


def test_unconfirmed_welcome_expires() -> None:
    w = world()
    w.receive(ROOM, Request(8))
    w.tell(*w.pending.popleft())
    del w.targets[T0]
    w.wait(w.config.handshake_s - 1)
    assert states(w) == [LinkState.GREETING]
    assert {type(e.body) for _, e in w.frames} == {Hello, Welcome}, "nothing is said on it"
    w.wait(2)
    assert not w.source().links
    w.finish()


# ---------------------------------------------------------------- the past


def test_late_hello_of_an_old_session_is_ignored() -> None:
    w = world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Hello)
    w.receive("a", Request(8))
    w.wait(w.config.handshake_s + 1)
    assert w.outcomes("a") == {"unreachable"}
    old = w.sent(Hello)[0]
    w.drops = lambda _, __: False
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    w.tell(S0, Received(old))
    assert states(w) == [LinkState.UP, LinkState.GREETING]
    assert w.source().peers.current[T0].session.number == 2
    w.run()
    assert w.sent(NoSession), "the target knows nothing of that session"
    assert states(w) == [LinkState.UP]
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.finish()


def test_late_hello_of_a_dead_incarnation_is_ignored() -> None:
    w = world()
    w.receive("a", Request(8))
    w.run()
    (old,) = w.sent(Hello)
    w.start_target(0, 0, incarnation=9999)
    w.open("b")
    w.receive("b", Request(8))
    w.run()
    w.tell(S0, Received(old))
    assert w.source().peers.current[T0].incarnation == 9999
    w.run()
    assert [session.target for session in w.source().links] == [9999]
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


def test_late_frames_of_a_lost_session_are_ignored() -> None:
    w = world()
    w.receive(ROOM, Request(8))
    w.run()
    late = [(to, e) for to, e in w.frames if isinstance(e.body, Hello | Offer)]
    assert len(late) == 2
    w.tell(T0, Cancel(ROOM))
    w.run()
    assert w.releases[T0, ROOM] == 1
    stop_target_until_lost(w)
    accepted = len(w.sent(Accept))
    for to, envelope in late:
        w.post(to, envelope)
    w.run()
    assert len(w.sent(Accept)) == accepted
    w.hold.writes = True
    w.open(ROOM)
    w.each_source(Push(ROOM, Span(0, 8)))
    w.run()
    assert not w.writes, "the target's pages are somebody else's now"
    w.each_source(Cancel(ROOM))
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


def test_slow_teardown_ends_only_its_session() -> None:
    w = world()
    w.hold.teardowns = True
    w.receive("lost", Request(8))
    w.run()
    stop_target_until_lost(w)
    w.tell(T0, Tick())
    w.run()
    for number in range(4):
        w.open(f"room {number}")
        w.receive(f"room {number}", Request(8))
        w.run()
        slow, w.teardowns = w.teardowns, []
        assert bool(slow) is (number == 0)
        for held in slow:
            w.end_teardown(held)
        w.run()
        w.prefill_all(f"room {number}", 8)
        assert w.outcomes(f"room {number}") == {"done"}
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


# ---------------------------------------------------------------- limits


def test_known_peer_may_reconnect_at_the_limit() -> None:
    w = World(dense(), (dense(), dense()), ProtocolConfig(max_peers=1))
    w.receive("a", Request(8))
    w.run()
    w.start_target(0, 0, incarnation=77)
    carried(w, "b")
    w.receive("c", Request(8), decode_index=1)
    w.run()
    (refusal,) = w.where(Refuse)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.TOO_MANY_PEERS
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


@pytest.mark.parametrize("incarnation", [2000, 77], ids=["same", "restarted"])
def test_session_is_replaced_when_the_next_is_confirmed(incarnation: int) -> None:
    w = world()
    w.open("a")
    w.receive("a", Request(8))
    w.run()
    if incarnation == 2000:
        # Only the target has lost the link: its end of the connection is torn down.
        w.drops = lambda _, envelope: isinstance(envelope.body, Abort)
        w.tear_down(T0, S0)
        w.run()
    else:
        w.start_target(0, 0, incarnation=incarnation)
    w.receive("b", Request(8))
    w.tell(*w.pending.popleft())
    assert states(w) == [LinkState.UP, LinkState.GREETING]
    assert not w.reports[S0, "a"]
    w.run()
    assert states(w) == [LinkState.UP]
    (failure,) = w.reports[S0, "a"]
    same = incarnation == 2000
    code = FailureCode.SESSION_REPLACED if same else FailureCode.PEER_RESTARTED
    assert failure.code is code  # type: ignore[union-attr]
    w.open("b")
    w.prefill_all("b", 8)
    assert w.outcomes("b") == {"done"}
    w.wait(w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


def test_forgotten_session_is_proof() -> None:
    """The room ends, although the transport has not reported the tear-down."""
    w = world()
    w.hold.teardowns = True
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    stop_target_until_lost(w)
    w.tell(T0, Tick())
    assert w.target().rooms
    assert not w.releases[T0, ROOM]
    w.run()
    assert w.releases[T0, ROOM] == 1
    assert not w.target().rooms
    assert not w.target().links


# ---------------------------------------------------------------- lost links


def test_offer_on_a_lost_link_is_refused() -> None:
    """An accepted offer would outlive its link, and its writes could not be sent."""
    w = world()
    w.hold.writes = w.hold.teardowns = True
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.tell(S0, Push(ROOM, Span(0, 16)))
    w.run()
    # The target stops, and the source loses it with a write in flight.
    w.drops = lambda to, _: to == S0
    w.wait(w.config.silence_s + 0.1)
    assert w.source().inflight.writes
    # The target continues without knowing that.
    w.drops = lambda _, __: False
    w.receive("next", Request(16))
    w.open("next")
    w.run()
    assert not w.source().rooms["next"].outbounds
    assert w.outcomes("next") == {"session-replaced"}
    w.hold.writes = w.hold.teardowns = False
    let_go(w)
    w.wait(120)
    w.finish()


# ---------------------------------------------------------------- idle links


def test_an_idle_link_is_closed_and_opened_again() -> None:
    w = world(idle_s=5.0)
    carried(w, "first")
    w.wait(4.5)
    assert len(w.source().links) == len(w.target().links) == 1
    w.wait(2.0)
    assert not w.source().links
    assert not w.target().links
    carried(w, "second")
    assert [s.number for s in w.target().links] == [2]


def test_a_link_is_not_idle_while_a_room_waits_on_it() -> None:
    w = world(idle_s=5.0)
    w.receive(ROOM, Request(8), deadline=100.0)
    w.run()
    w.wait(30.0)
    w.open(ROOM, deadline=100.0)
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    assert [s.number for s in w.target().links] == [1]


def test_heartbeats_of_many_links_leave_in_one_tick() -> None:
    """Ticks look at every link, so their number must not grow with the links."""
    w = World(dense(), (dense(),) * 8)
    for index in range(8):
        w.now += 0.1
        w.receive(f"room-{index}", Request(8), decode_index=index)
        w.run()
    machine, ticks = w.source(), 0
    end = w.now + 5 * w.config.heartbeat_s
    before = len(w.sent(Heartbeat))
    while (due := machine.wakeup()) is not None and due < end:
        w.now = due
        w.tell(S0, Tick())
        ticks += 1
    assert len(machine.links) == 8
    assert len(w.sent(Heartbeat)) - before >= 4 * 8
    assert ticks <= 5 / EARLY_BEAT
