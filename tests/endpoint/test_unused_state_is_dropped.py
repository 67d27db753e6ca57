"""A loop drops unused state: connections, routes, sent frames and ended links."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from kvferry.endpoint.control.bundles import bundle
from kvferry.endpoint.loop.channels import SourceChannel
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.sides import SourceSide, TargetSide
from kvferry.endpoint.transport_thread import Measured
from kvferry.ids import Peer, Session
from kvferry.plan.cost import LinkCost, LinkCostTable
from kvferry.protocol.codec import encode
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.telemetry.observer import Observer

ME, PEER = Peer("prefill", 0), Peer("decode", 0)
SESSION, OTHER = Session(7, 1), Session(8, 1)
ROUTES = {SESSION: b"to-7", OTHER: b"to-8"}
FIRST = LinkCost(descriptor_s=1e-6, bytes_per_s=1e9, copy_bytes_per_s=1e9)
SLOW = LinkCost(descriptor_s=5e-6, bytes_per_s=1e6, copy_bytes_per_s=1e9)


class Recorder:
    """Stand-in for any part, which records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self.asked.append((name, *args, *more.values()))


# ---------------------------------------------------------------- frames and routes


class Server:
    """A source's server with given messages, which records what is sent."""

    socket = "socket"
    sockets = (socket,)

    def __init__(self, *messages: tuple[bytes, bytes]) -> None:
        self.counts: Counter[str] = Counter()
        self.sent: list[tuple[bytes, bytes]] = []
        self._messages = messages

    def receive(self, ready: object) -> tuple[tuple[bytes, bytes], ...]:
        return self._messages

    def send(self, route: bytes, message: bytes) -> None:
        self.sent.append((route, message))


def heartbeat(session: Session) -> Envelope:
    return Envelope(ME, 7, session, 1, Heartbeat())


def channel_that_heard(*sessions: Session) -> tuple[SourceChannel, Server, Recorder]:
    """A channel that has a route for each session."""
    heard = [
        (ROUTES[session], message)
        for session in sessions
        for message in bundle([encode(heartbeat(session))])
    ]
    server: Any = Server(*heard)
    poller: Any = Recorder()
    meter: Any = Recorder()
    channel = SourceChannel(ME, poller, meter, meter, server)
    assert len(list(channel.receive({"socket"}))) == len(sessions)
    return channel, server, poller


def test_a_frame_is_sent_once() -> None:
    channel, server, poller = channel_that_heard(SESSION)
    channel.send(PEER, heartbeat(SESSION))
    channel.flush()
    channel.flush()
    assert [route for route, _ in server.sent] == [b"to-7"]
    # Sending may have consumed the signal of a message that arrived meanwhile.
    assert poller.asked.count(("mark_used", "socket")) == 1


def test_only_routes_of_ended_sessions_are_dropped() -> None:
    channel, server, _ = channel_that_heard(SESSION, OTHER)
    channel.keep_routes([OTHER])
    for session in (SESSION, OTHER):
        channel.send(PEER, heartbeat(session))
    channel.flush()
    assert [route for route, _ in server.sent] == [b"to-8"]


# ---------------------------------------------------------------- links and connections


def test_a_measured_cost_is_used_until_the_link_ends() -> None:
    transport_thread = Recorder()
    nothing: Any = None
    costs = LinkCostTable({"slow": FIRST})
    costs.add(SESSION, "slow", "a-host")
    links = TargetLinkTable(nothing, transport_thread, nothing, costs, nothing, measures=True)  # type: ignore[arg-type]
    side = SourceSide(nothing, nothing, nothing, Observer(), links, nothing)
    side.handle_result(Measured(SESSION, SLOW))
    assert (costs.of(SESSION), costs.latest) == (SLOW, SLOW)
    links.cut(SESSION)
    links.forget(SESSION)
    assert costs.of(SESSION) == FIRST
    assert transport_thread.asked == [("cut", SESSION), ("forget", SESSION)]


class Connections(Recorder):
    """A target's channel with connections to these peers."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__()
        self.peers = set(peers)


def test_only_connections_to_unused_instances_are_dropped() -> None:
    needed, gone = Peer("needed", 0), Peer("gone", 0)
    channel: Any = Connections(needed, gone)
    transport_thread: Any = Recorder()
    nothing: Any = None
    directory: Any = SimpleNamespace(drop_unused=lambda linked: {"needed"} | linked)
    link = SimpleNamespace(peer=Peer("linked", 3))
    machine = SimpleNamespace(links={SESSION: link})
    runner: Any = SimpleNamespace(machine=machine)
    rooms: Any = type("Rooms", (list,), {})()
    side = TargetSide(runner, rooms, channel, Observer(), transport_thread, nothing, directory)
    side.clean_up()
    assert channel.asked == [("drop", gone)]
    rooms.append("a room")
    channel.peers = {Peer("linked", 3)}
    side.clean_up()
    assert channel.asked == [("drop", gone)]
    # Peers may write here only while there is a room.
    assert transport_thread.asked == [("expect_writes", False), ("expect_writes", True)]
