"""Choice of a link's transport."""

from __future__ import annotations

import pytest
from wire import World

from kvferry.ids import Peer
from kvferry.layout import Layout, attention
from kvferry.plan import Request
from kvferry.protocol.events import MemoryReached
from kvferry.protocol.messages import (
    Hello,
    RefusalCode,
    Refuse,
    TransportLack,
    TransportOffer,
    TransportOffers,
    Welcome,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.transports import common_transports, no_transport_message

LAYOUT = Layout(attention(layers=2, kv_heads=4, head_dim=2), page_tokens=4)
S0, T0 = Peer("prefill", 0), Peer("decode0", 0)
ROOM = "room-1"


def side(held: str, **lacked: str) -> TransportOffers:
    """Parse ``shm@a nixl``: transports in order; the realm defaults to the name."""
    offers = [TransportOffer(*word.partition("@")[::2]) for word in held.split()]
    lacks = [TransportLack(name, why) for name, why in lacked.items()]
    return TransportOffers(tuple(offers), tuple(lacks))


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ("shm@a nixl mooncake", "shm@a nixl mooncake", "shm nixl mooncake"),
        ("shm@a nixl mooncake", "shm@b nixl mooncake", "nixl mooncake"),
        ("shm@a cuda@g nixl", "cuda@g nixl", "cuda nixl"),
        ("cuda@g nixl", "cuda@h nixl", "nixl"),
        ("shm@a mooncake", "shm@b nixl mooncake", "mooncake"),
        ("shm@a nixl", "shm@b mooncake", ""),
        ("shm@a", "shm@a nixl", "shm"),
        ("shm@a nixl", "nixl", "nixl"),
        ("nixl shm@a", "shm@a nixl", "nixl shm"),
        ("mooncake@tcp", "mooncake@rdma", ""),
        ("", "shm@a", ""),
        ("", "", ""),
    ],
)
def test_best_common_transport(source: str, target: str, names: str) -> None:
    found = common_transports(side(source), side(target))
    assert [offer.name for offer in found.offers] == names.split()
    every = {word.partition("@")[0] for word in f"{source} {target}".split()}
    assert {text.partition(":")[0] for text in found.problems} == every - set(names.split())


def test_target_payload_is_used() -> None:
    theirs = TransportOffers((TransportOffer("nixl", "", b"reach me so"),))
    (offer,) = common_transports(side("nixl"), theirs).offers
    assert offer.payload == b"reach me so"


def test_each_problem_is_listed() -> None:
    source = side("shm@here nixl", cuda="no GPU", mooncake="install it")
    target = side("shm@there mooncake", cuda="no runner", nixl="install NIXL")
    found = common_transports(source, target)
    assert found.offers == ()
    assert found.problems == (
        "shm: prefill is at here and decode at there, which do not meet",
        "nixl: not at decode (install NIXL)",
        "mooncake: not at prefill (install it)",
        "cuda: on neither side (no GPU)",
    )
    assert common_transports(side("shm"), side("nixl")).problems == (
        "shm: not at decode (it was not asked for)",
        "nixl: not at prefill (it was not asked for)",
    )
    assert no_transport_message(()).endswith("neither side has one")


def world(source: str, target: str) -> World:
    return World(LAYOUT, (LAYOUT,), transports=(side(source), side(target)))


def carried(w: World) -> None:
    w.open(ROOM)
    w.prefill_all(ROOM, 8)
    w.run()
    (outcome,) = w.reports[T0, ROOM]
    assert isinstance(outcome, Done)


def test_both_sides_know_the_transport() -> None:
    w = world("shm@a nixl", "shm@b nixl")
    w.receive(ROOM, Request(8))
    w.run()
    for machine in (w.source(), w.target()):
        assert [link.transport for link in machine.links.values()] == ["nixl"]
    carried(w)
    w.finish()


def test_welcome_waits_for_the_connected_memory() -> None:
    w = world("shm nixl", "shm nixl")
    w.hold.connects = True
    w.receive(ROOM, Request(8))
    w.wait(2 * w.config.resend_s)
    assert len(w.sent(Hello)) > 1
    assert not w.sent(Welcome)
    ((_, connect),) = w.connects
    assert [offer.name for offer in connect.transports] == ["shm", "nixl"]
    # The first did not work after all.
    w.tell(S0, MemoryReached(connect.session, "nixl"))
    w.run()
    (welcome,) = w.where(Welcome)
    assert isinstance(welcome, Welcome)
    assert welcome.transport == "nixl"
    carried(w)
    w.finish()


def test_unreachable_memory_is_refused_with_reasons() -> None:
    w = world("shm@a cuda nixl", "shm@b cuda nixl")
    w.hold.connects = True
    w.receive(ROOM, Request(8))
    w.run()
    ((_, connect),) = w.connects
    w.tell(S0, MemoryReached(connect.session, "", ("cuda: no such GPU", "nixl: no route")))
    w.run()
    (refusal,) = w.where(Refuse)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.TRANSPORT
    for reason in ("cuda: no such GPU", "nixl: no route", "shm: prefill is at a"):
        assert reason in refusal.message
    (failure,) = w.reports[T0, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.REFUSED
    assert not w.source().links
    # It comes too late, and for a session that is over.
    w.tell(S0, MemoryReached(connect.session, "nixl"))
    w.tell(S0, MemoryReached(connect.session, "", ()))
    w.run()
    assert not w.where(Welcome)
    w.finish()


def test_target_refuses_a_transport_it_did_not_offer() -> None:
    w = world("nixl", "nixl")
    w.hold.connects = True
    w.receive(ROOM, Request(8))
    w.run()
    ((_, connect),) = w.connects
    w.tell(S0, MemoryReached(connect.session, "carrier pigeon"))
    w.run()
    (refusal,) = w.where(Refuse)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.TRANSPORT
    (failure,) = w.reports[T0, ROOM]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.REFUSED
    w.finish()
