"""The control channel over real sockets: frames, keys, foreign connections, closing."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvferry.endpoint.control.sockets import (
    LINGER_MS,
    MAX_BATCH,
    MAX_QUEUED,
    WRAPPING_BYTES,
    ControlClient,
    ControlServer,
    new_context,
)
from kvferry.errors import InputError
from kvferry.protocol.codec import MAX_FRAME_BYTES
from kvferry.security.keys import ClusterKey

KEY = ClusterKey(bytes(range(32)))
OTHER = ClusterKey(bytes(32))
ENOUGH_S = 20.0
# How long a test waits for something that must not happen.
WHILE_S = 0.3


class Pair:
    """A server and its clients, polled like in an endpoint's loop."""

    def __init__(self, host: str = "127.0.0.1", key: ClusterKey | None = KEY) -> None:
        self.server = ControlServer(host, 0, key)
        self.clients: list[ControlClient] = []
        self.at_server: list[tuple[bytes, bytes]] = []
        self.at_clients: list[tuple[int, bytes]] = []

    def connect(self, key: ClusterKey | None = KEY) -> ControlClient:
        self.clients.append(ControlClient(self.server.address, key))
        return self.clients[-1]

    def run(self, until: Callable[[], bool], limit_s: float = ENOUGH_S) -> bool:
        """Poll until a condition holds. Return False if it does not in time."""
        poller = zmq.Poller()
        for channel in (self.server, *self.clients):
            for polled in channel.sockets:
                poller.register(polled, zmq.POLLIN)
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                return False
            poller.poll(20)
            self.at_server += self.server.receive()
            for number, client in enumerate(self.clients):
                self.at_clients += [(number, frame) for frame in client.receive()]
        return True

    def close(self) -> None:
        begun = time.monotonic()
        for client in self.clients:
            client.close()
        self.server.close()
        assert time.monotonic() - begun < ENOUGH_S / 2


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(host: str = "127.0.0.1", key: ClusterKey | None = KEY) -> Pair:
        made.append(Pair(host, key))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(pairs: Callable[..., Pair]) -> Pair:
    return pairs()


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_frames_travel_both_ways(
    pairs: Callable[..., Pair], host: str, key: ClusterKey | None
) -> None:
    pair = pairs(host, key)
    client = pair.connect(key)
    assert client.send(b"before the connection is open")
    assert pair.run(lambda: len(pair.at_server) == 1)
    route, frame = pair.at_server[0]
    assert frame == b"before the connection is open"
    assert pair.server.send(route, b"answer")
    assert pair.run(lambda: pair.at_clients == [(0, b"answer")])
    assert not pair.server.counts
    assert not client.counts


def test_each_client_has_its_route(pair: Pair) -> None:
    for number in range(3):
        pair.connect().send(b"%d" % number)
    assert pair.run(lambda: len(pair.at_server) == 3)
    for route, frame in pair.at_server:
        assert pair.server.send(route, b"to " + frame)
    assert pair.run(lambda: len(pair.at_clients) == 3)
    assert sorted(pair.at_clients) == [(0, b"to 0"), (1, b"to 1"), (2, b"to 2")]


@pytest.mark.parametrize("key", [None, KEY])
def test_frames_above_the_limit_are_dropped(
    pairs: Callable[..., Pair], key: ClusterKey | None
) -> None:
    pair = pairs(key=key)
    client = pair.connect(key)
    client.send(bytes(MAX_FRAME_BYTES))
    assert pair.run(lambda: len(pair.at_server) == 1)
    assert len(pair.at_server[0][1]) == MAX_FRAME_BYTES
    client.send(bytes(MAX_FRAME_BYTES + WRAPPING_BYTES + 1))
    # ZeroMQ ends that connection, loses the frames in flight, and reconnects.
    deadline = time.monotonic() + ENOUGH_S
    while len(pair.at_server) == 1 and time.monotonic() < deadline:
        client.send(b"after")
        pair.run(lambda: len(pair.at_server) > 1, WHILE_S)
    assert pair.at_server[1][1] == b"after"


@pytest.mark.parametrize(
    ("ours", "theirs"), [(KEY, OTHER), (KEY, None), (None, KEY)], ids=["other", "none", "ours-none"]
)
def test_a_client_with_another_key_is_refused(
    pairs: Callable[..., Pair], ours: ClusterKey | None, theirs: ClusterKey | None
) -> None:
    pair = pairs(key=ours)
    good, bad = pair.connect(ours), pair.connect(theirs)
    bad.send(b"let me in")
    assert pair.run(lambda: pair.server.counts["refused"] > 0 and bad.counts["refused"] > 0)
    good.send(b"good")
    assert pair.run(lambda: len(pair.at_server) > 0)
    assert [frame for _, frame in pair.at_server] == [b"good"]
    assert not good.counts


def test_knowing_the_servers_public_key_is_not_enough(pair: Pair) -> None:
    context = new_context()
    public, secret = zmq.curve_keypair()
    stranger = context.socket(zmq.DEALER)
    stranger.curve_serverkey = KEY.server.public
    stranger.curve_publickey, stranger.curve_secretkey = public, secret
    stranger.connect(pair.server.address)
    stranger.send(b"let me in", zmq.DONTWAIT)
    assert pair.run(lambda: pair.server.counts["refused"] > 0)
    pair.run(lambda: bool(pair.at_server), WHILE_S)
    assert pair.at_server == []
    context.destroy(0)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x03\x00hi" * 50,
        random.Random(5).randbytes(500),
        b"\xff" + bytes(8) + b"\x7f\x03" + bytes(200),
        b"\xff" * 500,
    ],
    ids=["http", "version-1", "random", "greeting", "ff"],
)
def test_foreign_connections_do_no_harm(
    pairs: Callable[..., Pair], key: ClusterKey | None, junk: bytes
) -> None:
    pair = pairs(key=key)
    client = pair.connect(key)
    client.send(b"before")
    assert pair.run(lambda: len(pair.at_server) == 1)
    with socket.create_connection(("127.0.0.1", pair.server.port), ENOUGH_S) as stranger:
        stranger.sendall(junk)
        pair.run(lambda: len(pair.at_server) > 1, WHILE_S)
        client.send(b"after")
        assert pair.run(lambda: len(pair.at_server) > 1)
    assert [frame for _, frame in pair.at_server] == [b"before", b"after"]


def test_messages_of_several_parts_are_malformed(pairs: Callable[..., Pair]) -> None:
    pair = pairs(key=None)
    client = pair.connect(None)
    client.socket.send_multipart([b"x"] * 100)
    client.socket.send_multipart([b"", b""])
    client.send(b"good")
    assert pair.run(lambda: len(pair.at_server) > 0)
    assert [frame for _, frame in pair.at_server] == [b"good"]
    assert pair.server.counts["malformed"] == 2
    route = pair.at_server[0][0]
    pair.server.socket.send_multipart([route, b"x", b"y"])
    assert pair.run(lambda: client.counts["malformed"] == 1)
    assert pair.at_clients == []


def test_malformed_messages_count_towards_the_limit_of_a_call(pairs: Callable[..., Pair]) -> None:
    pair = pairs(key=None)
    client = pair.connect(None)
    for _ in range(MAX_BATCH + 10):
        client.socket.send_multipart([b"", b""])
    client.send(b"good")
    assert pair.run(lambda: pair.server.counts["malformed"] > 0)
    counted = pair.server.counts["malformed"]
    assert counted <= MAX_BATCH
    while not pair.at_server:
        assert pair.server.socket.poll(int(ENOUGH_S * 1000))
        pair.at_server += pair.server.receive()
        now = pair.server.counts["malformed"]
        assert now - counted <= MAX_BATCH
        counted = now
    assert counted == MAX_BATCH + 10


def test_sending_to_a_dead_route_fails(pair: Pair) -> None:
    client = pair.connect()
    client.send(b"here")
    assert pair.run(lambda: len(pair.at_server) == 1)
    route = pair.at_server[0][0]
    client.close()
    pair.clients.clear()
    assert pair.run(lambda: not pair.server.send(route, b"?"))
    assert not pair.server.send(b"never was", b"?")
    assert pair.server.counts["unsent"] == 2


def test_sending_to_a_full_queue_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ControlClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}", KEY)
        taken = sum(client.send(b"x") for _ in range(MAX_QUEUED + 50))
        assert taken == MAX_QUEUED
        assert client.counts["unsent"] == 50
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < LINGER_MS / 1000 + ENOUGH_S / 4


def test_one_receive_call_is_bounded_and_the_rest_stays_readable(
    pairs: Callable[..., Pair],
) -> None:
    pair = pairs(key=None)
    client = pair.connect(None)
    total = MAX_BATCH + 10
    assert all(client.send(b"%d" % number) for number in range(total))
    assert pair.run(lambda: len(pair.at_server) > 0)
    while len(pair.at_server) < total:
        assert pair.server.socket.poll(int(ENOUGH_S * 1000))
        batch = pair.server.receive()
        assert len(batch) <= MAX_BATCH
        pair.at_server += batch
    assert [frame for _, frame in pair.at_server] == [b"%d" % n for n in range(total)]


def test_a_client_reconnects_when_a_server_returns_to_its_port(pair: Pair) -> None:
    client = pair.connect()
    client.send(b"one")
    assert pair.run(lambda: len(pair.at_server) == 1)
    port = pair.server.port
    pair.server.close()
    pair.server = ControlServer("127.0.0.1", port, KEY)
    deadline = time.monotonic() + ENOUGH_S
    while len(pair.at_server) == 1 and time.monotonic() < deadline:
        client.send(b"two")
        pair.run(lambda: len(pair.at_server) > 1, WHILE_S)
    assert pair.at_server[1][1] == b"two"
    route = pair.at_server[1][0]
    assert pair.server.send(route, b"back")
    assert pair.run(lambda: len(pair.at_clients) == 1)


def test_clients_of_one_endpoint_share_a_context(pair: Pair) -> None:
    context = new_context()
    clients = [ControlClient(pair.server.address, KEY, context) for _ in range(20)]
    pair.clients += clients
    for client in clients:
        client.send(b"x")
    assert pair.run(lambda: len(pair.at_server) == 20)
    for client in clients:
        client.close()
    assert not context.closed
    context.destroy(LINGER_MS)


def test_frames_just_sent_leave_before_the_socket_closes(pair: Pair) -> None:
    client = pair.connect()
    client.send(b"first")
    assert pair.run(lambda: len(pair.at_server) == 1)
    for _ in range(4):
        # More than the kernel buffers.
        assert client.send(bytes(MAX_FRAME_BYTES))
    client.close(linger_ms=int(ENOUGH_S * 1000))
    pair.clients.clear()
    assert pair.run(lambda: len(pair.at_server) == 5)


def test_close_is_idempotent() -> None:
    server = ControlServer("127.0.0.1", 0, KEY)
    client = ControlClient(server.address, KEY)
    for _ in range(2):
        client.close()
        server.close()
    # The port is free again.
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    again = ControlServer(host, int(port), KEY)
    assert again.address == server.address
    again.close()


def test_many_connection_attempts_delay_neither_frames_nor_closing() -> None:
    server = ControlServer("127.0.0.1", 0, KEY)
    strangers = [ControlClient(server.address, OTHER) for _ in range(20)]
    deadline = time.monotonic() + ENOUGH_S
    # Without calls of receive, events of failed handshakes exceed ZeroMQ's default queue size.
    while sum(stranger.counts["refused"] for stranger in strangers) < 1500:
        assert time.monotonic() < deadline
        for stranger in strangers:
            stranger.receive()
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < ENOUGH_S / 4
    for stranger in strangers:
        stranger.close(0)


def test_without_a_key_only_loopback_can_be_bound() -> None:
    with pytest.raises(InputError, match="make a cluster key with `kvferry key FILE`"):
        ControlServer("0.0.0.0", 0, None)
    ControlServer("0.0.0.0", 0, KEY).close()


def test_a_port_in_use_gives_one_sentence(pair: Pair) -> None:
    with pytest.raises(InputError, match="Address already in use; choose another"):
        ControlServer("127.0.0.1", pair.server.port, KEY)
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1"):
        ControlServer("192.0.2.1", 0, KEY)
    with pytest.raises(InputError, match="a port is between"):
        ControlServer("127.0.0.1", 70000, KEY)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://",
        "nonsense",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:0",
        "a\0b",
        "ipc:///tmp/x",
        "inproc://zeromq.zap.01",
        "tcp://a b:1",
        "tcp://\ud800:1",
    ],
)
def test_an_invalid_address_gives_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="use an address like"):
        ControlClient(address, KEY)
