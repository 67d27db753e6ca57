"""What an owner lets go of: connections, routes, frames that were sent, and links that are over."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import zmq
from endpoint.fleets import eventually

from kvferry.endpoint.control.bundles import bundle
from kvferry.endpoint.control.sockets import has_message
from kvferry.endpoint.loop.channels import SourceChannel
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.sides import TargetRoomEnds, TargetSide
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
    """Anything, as far as it writes down what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self.asked.append((name, *args, *more.values()))


# ---------------------------------------------------------------- frames and routes


class Server:
    """The socket of a source: what it hears, and what was sent where."""

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
    """A route for each session."""
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


def test_a_frame_leaves_once() -> None:
    channel, server, poller = channel_that_heard(SESSION)
    channel.send(PEER, heartbeat(SESSION))
    channel.flush()
    channel.flush()
    assert [route for route, _ in server.sent] == [b"to-7"]
    # Sending may have swallowed the sign of what came meanwhile.
    assert poller.asked.count(("used", "socket")) == 1


def test_routes_of_sessions_that_are_over_are_forgotten_and_no_others() -> None:
    channel, server, _ = channel_that_heard(SESSION, OTHER)
    channel.keep([OTHER])
    for session in (SESSION, OTHER):
        channel.send(PEER, heartbeat(session))
    channel.flush()
    assert [route for route, _ in server.sent] == [b"to-8"]


# ---------------------------------------------------------------- links and connections


def test_what_was_measured_of_a_link_is_used_until_the_link_is_over() -> None:
    transport_thread = Recorder()
    nothing: Any = None
    costs = LinkCostTable({"slow": FIRST})
    costs.add(SESSION, "slow", "a-host")
    links = TargetLinkTable(nothing, transport_thread, nothing, costs, nothing, measures=True)  # type: ignore[arg-type]
    links.hear(Measured(SESSION, SLOW))
    assert (costs.of(SESSION), costs.latest) == (SLOW, SLOW)
    links.cut(SESSION)
    links.forget(SESSION)
    assert costs.of(SESSION) == FIRST
    assert transport_thread.asked == [("cut", SESSION), ("forget", SESSION)]


class Connections(Recorder):
    """A target's channel: to whom there is a connection."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__()
        self.peers = set(peers)


def test_connections_to_instances_that_nobody_needs_are_dropped_and_no_others() -> None:
    needed, gone = Peer("needed", 0), Peer("gone", 0)
    channel: Any = Connections(needed, gone)
    scatters: Any = Recorder()
    directory: Any = SimpleNamespace(forget_ended=lambda linked: {"needed"} | linked)
    link = SimpleNamespace(peer=Peer("linked", 3))
    machine = SimpleNamespace(links={SESSION: link})
    runner: Any = SimpleNamespace(machine=machine)
    rooms: Any = type("Rooms", (list,), {})()
    nothing: Any = None
    ends = TargetRoomEnds(rooms, runner.machine, scatters)
    role = TargetSide(runner, nothing, ends, scatters, channel, directory, Observer())
    role.tidy()
    assert channel.asked == [("drop", gone)]
    rooms.append("a room")
    channel.peers = {Peer("linked", 3)}
    role.tidy()
    assert channel.asked == [("drop", gone)]
    # Peers may write here only while there is a room.
    assert scatters.asked == [("expect", False), ("expect", True)]


# ---------------------------------------------------------------- what a poller must not forget


def test_a_message_whose_sign_was_swallowed_is_found_before_a_sleep() -> None:
    """Whoever uses a ZeroMQ socket takes the sign of what has come out of its file."""
    context: Any = zmq.Context()
    listening, saying = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    saying.connect(f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}")
    poller = Poller()
    poller.watch(listening)
    assert poller.wait(0.0) == set()
    saying.send(b"a")
    eventually(lambda: has_message(listening))
    poller.used(listening)
    assert poller.wait(5.0) == {listening}
    # Not taken, and so still there.
    assert poller.wait(5.0) == {listening}
    listening.recv()
    assert poller.wait(0.0) == set()
    poller.unwatch(listening)
    context.destroy(0)
