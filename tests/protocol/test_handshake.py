"""Refused handshakes, and frames of unknown peers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from wire import MODEL, World

from kvferry.config import ProtocolConfig
from kvferry.ids import Generation, Peer, Session
from kvferry.layout import Layout, Parallel, Span, attention
from kvferry.plan import Block, PoolMap, Request
from kvferry.protocol.codec import BadFrame, FrameFault, decode, encode
from kvferry.protocol.events import (
    Cancel,
    ConnectRefused,
    Instance,
    PeerRestarted,
    Receive,
    Received,
    ReceiveRequest,
    WrongVersion,
)
from kvferry.protocol.messages import (
    VERSION,
    Accept,
    Arrived,
    Envelope,
    Heartbeat,
    Hello,
    NoSession,
    Offer,
    RefusalCode,
    Refuse,
    TransportOffers,
    Welcome,
)
from kvferry.protocol.outcome import Failure, FailureCode

DENSE = attention(layers=2, kv_heads=4, head_dim=2)
LAYOUT = Layout(DENSE, page_tokens=4)
OTHER = Layout(attention(layers=2, kv_heads=2, head_dim=2), page_tokens=4)
S0, T0 = Peer("prefill", 0), Peer("decode0", 0)
ROOM = "room-1"


def world(**limits: int) -> World:
    return World(LAYOUT, (LAYOUT,), ProtocolConfig(**limits))


def changed_hello(w: World, change: dict[str, object]) -> None:
    """Send a modified Hello of the target."""
    w.drops = lambda _, envelope: isinstance(envelope.body, Hello)
    w.receive(ROOM, Request(8))
    w.drops = lambda _, __: False
    (envelope,) = w.sent(Hello)
    assert isinstance(envelope.body, Hello)
    w.post(S0, replace(envelope, body=replace(envelope.body, **change)))
    w.run()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fingerprint": "another"}, RefusalCode.FINGERPRINT),
        ({"layout": OTHER}, RefusalCode.LAYOUT),
        ({"pools": PoolMap(())}, RefusalCode.POOLS),
        ({"transports": TransportOffers()}, RefusalCode.TRANSPORT),
    ],
    ids=["fingerprint", "layout", "pools", "transport"],
)
def test_a_source_refuses_with_a_code(change: dict[str, object], code: RefusalCode) -> None:
    w = world()
    changed_hello(w, change)
    (refusal,) = w.where(Refuse)
    assert isinstance(refusal, Refuse)
    assert refusal.code is code
    assert refusal.message
    (failure,) = w.reports[T0, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.REFUSED
    assert failure.message.startswith(code)
    assert not w.source().links
    assert not w.where(Welcome)
    w.finish()


def test_too_many_peers() -> None:
    w = World(LAYOUT, (LAYOUT, LAYOUT), ProtocolConfig(max_peers=1))
    w.open("a")
    w.receive("a", Request(8), decode_index=0)
    w.run()
    w.receive("b", Request(8), decode_index=1)
    w.run()
    (refusal,) = w.where(Refuse)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.TOO_MANY_PEERS
    assert w.outcomes("b") == {"refused"}
    w.prefill_all("a", 8)
    assert w.outcomes("a") == {"done"}
    w.finish()


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "another"},
        {"digest": "0" * 32},
        {"layout": Layout(DENSE, Parallel(tp=2), page_tokens=4)},
    ],
    ids=["fingerprint", "digest", "layout"],
)
def test_target_refuses_a_mismatched_welcome(change: dict[str, object]) -> None:
    w = world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Welcome)
    w.receive(ROOM, Request(8))
    w.run()
    w.drops = lambda _, __: False
    (envelope,) = w.sent(Welcome)
    assert isinstance(envelope.body, Welcome)
    w.post(T0, replace(envelope, body=replace(envelope.body, **change)))
    w.run()
    assert w.outcomes(ROOM) == {"refused"}
    assert not w.where(Offer)
    ((to, said),) = [(to, e.body) for to, e in w.frames if isinstance(e.body, Refuse)]
    assert to == S0
    assert isinstance(said, Refuse)
    assert said.code == next(iter(change))
    assert not w.source().links, "the source knows at once that nothing will come of it"
    w.finish()


@pytest.mark.parametrize(
    "prefill",
    [Instance("prefill", "another", LAYOUT), Instance("prefill", MODEL, OTHER)],
    ids=["fingerprint", "layout"],
)
def test_registered_mismatch_is_refused_without_a_frame(prefill: Instance) -> None:
    w = world()
    w.tell(T0, Receive(prefill, ReceiveRequest(ROOM, Request(8), (), w.now + 60)))
    assert w.outcomes(ROOM) == {"refused"}
    assert not w.frames
    w.finish()


# ---------------------------------------------------------------- versions


def wrong(sender: Peer, session: Session, answered: bool = False) -> WrongVersion:
    return WrongVersion(sender, session, 2, answered)


def test_other_version_is_answered_once() -> None:
    w = world()
    stranger = Peer("decode9", 0)
    w.tell(S0, wrong(stranger, Session(5, 1)))
    ((to, envelope),) = w.frames
    assert to == stranger
    assert envelope.seq == 0
    assert isinstance(envelope.body, Refuse)
    assert envelope.body.code is RefusalCode.VERSION
    w.tell(S0, wrong(stranger, Session(5, 1), answered=True))
    assert len(w.frames) == 1, "two versions never talk in circles"
    w.finish()


def test_a_target_gives_up_a_link_whose_peer_speaks_another_version() -> None:
    w = world()
    w.drops = lambda _, envelope: isinstance(envelope.body, Hello)
    w.receive(ROOM, Request(8))
    (session,) = w.target().links
    w.tell(T0, wrong(Peer("prefill", 7), session))
    assert not w.reports, "not the peer of that session"
    w.tell(T0, wrong(S0, session, answered=True))
    assert w.outcomes(ROOM) == {"refused"}
    w.finish()


def test_codec_provides_the_version_event() -> None:
    frame = encode(Envelope(T0, 1, Session(1, 1), 3, Heartbeat()))
    head = b"\xa3kvf"
    bad = decode(frame.replace(head + bytes([VERSION]), head + bytes([VERSION + 1])))
    assert isinstance(bad, BadFrame)
    assert bad.fault is FrameFault.VERSION
    assert bad.header is not None
    assert (bad.header.sender, bad.header.session, bad.header.seq) == (T0, Session(1, 1), 3)


# ---------------------------------------------------------------- strangers and the past


def connected() -> World:
    w = world()
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    return w


def test_numbered_frame_of_an_unknown_session_is_answered() -> None:
    w = connected()
    before = len(w.frames)
    stranger = Peer("decode9", 0)
    for body in (Heartbeat(), Accept("x", Generation(1)), NoSession()):
        for seq in (0, 1):
            w.tell(S0, Received(Envelope(stranger, 5, Session(5, 1), seq, body)))
    answers = [(to, envelope.body) for to, envelope in w.frames[before:]]
    assert answers == [(stranger, NoSession())] * 2
    assert w.source().counts["stale"] == 6
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_a_session_belongs_to_its_peer() -> None:
    w = connected()
    (session,) = w.source().links
    thief = Peer("decode9", 3)
    w.tell(S0, Received(Envelope(thief, 5, session, 50, Heartbeat())))
    w.tell(S0, Received(Envelope(thief, 5, session, 51, NoSession())))
    hello = w.sent(Hello)[0].body
    w.tell(S0, Received(Envelope(thief, 5, session, 52, hello)))
    assert list(w.source().links) == [session]
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_message_for_the_other_side_is_counted() -> None:
    w = connected()
    (session,) = w.source().links
    stray = Envelope(T0, w.target().incarnation, session, 0, Accept("x", Generation(1)))
    w.tell(S0, Received(stray))
    assert w.source().counts["misdirected"] == 1
    w.prefill_all(ROOM, 8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_blocks_that_are_not_owed_fail_the_room() -> None:
    w = connected()
    (session,) = w.target().links
    note = Arrived(ROOM, Generation(1), (Block("kv", Span(0, 2), Span(0, 9)),))
    w.tell(T0, Received(Envelope(S0, w.source().incarnation, session, 0, note)))
    w.run()
    assert w.outcomes(ROOM) == {"bad-note"}
    w.each_source(Cancel(ROOM))
    w.wait(2 * w.config.unclaimed_offer_ttl_s + 1)
    w.finish()


def test_refused_connection_fails_waiting_rooms_at_once() -> None:
    w = world()
    w.drops = lambda to, _: to == S0
    w.receive(ROOM, Request(8))
    w.run()
    w.tell(T0, ConnectRefused(S0, "another key"))
    outcome = w.reports[T0, ROOM]
    assert outcome == [Failure(FailureCode.REFUSED, "another key")]
    assert w.releases[T0, ROOM] == 1
    w.tell(T0, ConnectRefused(S0, "again"))


def test_rooms_go_to_the_registered_incarnation() -> None:
    """The earlier incarnation may still be alive; its rooms fail and wait for proof."""
    w = world()
    w.receive("before", Request(8))
    w.run()
    w.hold.teardowns = True
    old = w.source().incarnation
    w.tell(T0, PeerRestarted(S0, old))
    assert w.outcomes("before") == set(), "nothing new in that"
    w.start_source(0, old + 1)
    w.tell(T0, PeerRestarted(S0, old + 1))
    assert w.outcomes("before") == {"peer-restarted"}
    assert not w.releases[T0, "before"], "nobody has proven that the old life writes nothing"
    w.open("after")
    w.receive("after", Request(8))
    w.run()
    w.prefill_all("after", 8)
    assert w.outcomes("after") == {"done"}


def test_source_with_another_layout_gets_a_new_session() -> None:
    """Even if the earlier Hello was never answered."""
    w = world()
    w.drops = lambda to, _: to == S0
    w.receive("before", Request(8))
    w.run()
    w.drops = lambda _, __: False
    w.prefill = Layout(DENSE, page_tokens=8)
    w.start_source(0, w.source().incarnation + 1)
    w.open("after")
    w.receive("after", Request(8))
    w.run()
    assert w.outcomes("before") == {"peer-restarted"}
    w.prefill_all("after", 8)
    assert w.outcomes("after") == {"done"}
    w.finish()
