"""Unauthenticated peers, wrong keys, and malformed or hostile frames."""

from __future__ import annotations

import http.client
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from endpoint.fleets import HEADS, QUICK, eventually, layout

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.bundles import bundle
from kvferry.endpoint.control.sockets import ControlClient
from kvferry.endpoint.setup import make_transport
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.errors import InputError
from kvferry.ids import Generation, Peer, Session
from kvferry.memory.pools import Memory
from kvferry.plan.places import contiguous_pools
from kvferry.plan.plan import Request
from kvferry.protocol.codec import encode
from kvferry.protocol.messages import VERSION, Abort, Body, Envelope, Heartbeat, Hello, Offer
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.security.keys import ClusterKey
from kvferry.testing.fleet import Fleet, FleetSide

REQUEST = Request(30, prefix=3)
CONFIG = EndpointConfig(protocol=QUICK)
LAYOUT = layout(HEADS, 8)


def fleet_of(key_file: Path | None = None) -> Fleet:
    sides = [FleetSide(name, LAYOUT, 16, CONFIG) for name in ("prefill", "decode")]
    return Fleet(*sides, key_file=str(key_file) if key_file else None)


def view_of(fleet: Fleet, key: ClusterKey | None = None) -> InstanceView:
    with DiscoveryClient(fleet.url, key) as client:
        return client.resolve("prefill", 20.0)


def port_of(view: InstanceView) -> tuple[str, int]:
    at = urlsplit(view.ranks[0].control)
    assert at.hostname is not None
    assert at.port is not None
    return at.hostname, at.port


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    ClusterKey.new().write(path)
    return path


def stranger_frame(body: Body, number: int = 1) -> bytes:
    return encode(Envelope(Peer("stranger", 0), 5, Session(5, number), 1, body))


def hello(fingerprint: str, metadata: bytes) -> Hello:
    return Hello(fingerprint, LAYOUT, contiguous_pools(LAYOUT, 0, 4, 1).map, metadata=metadata)


def strange_frames(fingerprint: str) -> Iterator[bytes]:
    """Frames that no kvferry endpoint sends."""
    yield b""
    yield os.urandom(40)
    yield msgspec.msgpack.encode(["kvf", VERSION + 1, ["p", 0], 1, [1, 1], 1, []])
    yield msgspec.msgpack.encode(["kvf", VERSION, ["p", 0], 1, [1, 1], 1, ["x"]])
    room, generation = "before", Generation(1)
    yield stranger_frame(Heartbeat())
    yield stranger_frame(Offer(room, generation, REQUEST, (), 5.0))
    yield stranger_frame(Abort(room, generation, Failure(FailureCode.ABORTED)))
    yield stranger_frame(hello("another model", b""), 9)
    # Valid except for the metadata.
    for number, metadata in enumerate((b"", b"garbage", os.urandom(4096)), start=2):
        yield stranger_frame(hello(fingerprint, metadata), number)


def strange_messages(fingerprint: str) -> Iterator[bytes]:
    yield from (message for frame in strange_frames(fingerprint) for message in bundle([frame]))
    yield b""
    yield os.urandom(1 << 16)
    yield struct.pack(">I", 1 << 31) + b"short"
    # A million empty frames, which would take a loop seconds.
    yield bytes(4 << 20)


@pytest.mark.timeout(60)
def test_hostile_frames_stop_nothing() -> None:
    with fleet_of() as fleet:
        view = view_of(fleet)
        fleet.fill("before", 1, REQUEST.num_tokens)
        fleet.receive("before", "decode", REQUEST)
        for message in strange_messages(view.fingerprint or ""):
            stranger = ControlClient(view.ranks[0].control)
            assert stranger.send(message)
            stranger.socket.send_multipart([b"two", b"parts"])
            # A lost connection hints at a death.
            stranger.close()
        fleet.send("before", REQUEST.num_tokens)
        fleet.demand_done("before", fleet.parties("decode"), 20.0)
        fleet.finish("before", "decode")
        wanted = {"frame-foreign", "frame-version", "frame-malformed", "refused"}
        eventually(lambda: wanted <= set(fleet.sources[0].ask("stats").rejected))
        fleet.carry("after", REQUEST, seed=2)
        # The handshakes of strangers time out and are forgotten.
        eventually(lambda: fleet.sources[0].ask("peers") == ["decode/0"], QUICK.handshake_s + 5)
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
def test_bytes_that_are_not_zeromq_stop_nothing() -> None:
    with fleet_of() as fleet:
        where = port_of(view_of(fleet))
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(1 << 16),
            b"\xff" + b"\0" * 8 + b"\x7f",
        ):
            with socket.create_connection(where) as stranger:
                stranger.sendall(noise)
        held_open = [socket.create_connection(where) for _ in range(20)]
        fleet.carry("room", REQUEST, seed=1)
        for stranger in held_open:
            stranger.close()
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("key", [None, ClusterKey.new()], ids=["none", "another"])
def test_without_the_key_no_frame_is_accepted(key: ClusterKey | None, key_file: Path) -> None:
    with fleet_of(key_file) as fleet:
        view = view_of(fleet, ClusterKey.read(key_file))
        (message,) = bundle([stranger_frame(hello(view.fingerprint or "", b""))])
        fleet.carry("before", REQUEST, seed=1)
        stranger = ControlClient(view.ranks[0].control, key)
        stranger.send(message)
        source = fleet.sources[0]
        eventually(lambda: source.ask("stats").rejected["connection"] > 0)
        assert source.ask("peers") == ["decode/0"]
        assert set(source.ask("stats").rejected) == {"connection"}
        stranger.close()
        fleet.carry("after", REQUEST, seed=2)
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
def test_a_decode_rank_with_another_key_gets_nothing(key_file: Path) -> None:
    other = ClusterKey.new()
    with fleet_of(key_file) as fleet:
        view = view_of(fleet, ClusterKey.read(key_file))
        transport = make_transport("shm")
        memory = Memory.allocate(LAYOUT, 0, 16, transport.allocate)
        with TargetEndpoint(
            *(LAYOUT, memory),
            name="stranger",
            model="test-model",
            transport=transport,
            discovery=fleet.url,
            key=other,
            config=CONFIG,
        ) as target:
            unlisted = target.receive(
                "a", prefill="prefill", tokens=8, pages=[0], deadline_s=QUICK.handshake_s
            )
            met = target.receive("b", prefill=view, tokens=8, pages=[1], deadline_s=10.0)
            for handle in (unlisted, met):
                assert isinstance(handle.wait(15.0), Failure)
                assert handle.failure is not None
                assert handle.failure.code in (FailureCode.UNREACHABLE, FailureCode.REFUSED)
                handle.wait_released(5.0)
        assert fleet.sources[0].ask("peers") == []
        fleet.carry("room", REQUEST, seed=1)


@pytest.mark.timeout(60)
def test_registering_takes_the_key(key_file: Path) -> None:
    with fleet_of(key_file) as fleet:
        view = view_of(fleet, ClusterKey.read(key_file))
        record = fleet.sources[0].ask("record")
        rogue = msgspec.structs.replace(record, incarnation=1, control="tcp://127.0.0.1:9")
        for key in (None, ClusterKey.new()):
            with DiscoveryClient(fleet.url, key) as client:
                with pytest.raises(DiscoveryError) as raised:
                    client.register(rogue).result(10.0)
                assert raised.value.fault is DiscoveryFault.UNSIGNED
        at = urlsplit(fleet.url)
        for body in (b"", b"{", b"[]", os.urandom(4096)):
            connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=10)
            connection.request("PUT", "/v1/instances/prefill/ranks/0", body)
            assert 400 <= connection.getresponse().status < 500
            connection.close()
        assert view_of(fleet, ClusterKey.read(key_file)) == view
        fleet.carry("room", REQUEST, seed=1)


@pytest.mark.parametrize("kind", [SourceEndpoint, TargetEndpoint])
def test_without_a_key_endpoints_listen_on_loopback_only(
    kind: type[SourceEndpoint] | type[TargetEndpoint],
) -> None:
    transport = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 4, transport.allocate)
    # An address that no machine has: it must be refused before it is bound.
    config = EndpointConfig(host="192.0.2.1")
    with pytest.raises(InputError, match="kvferry key"):
        kind(LAYOUT, memory, name="x", model="m", transport=transport, config=config)
