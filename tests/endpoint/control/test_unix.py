"""Unix channels: frames both ways, the secret, limits, and the fallback to ZeroMQ."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from endpoint.fleets import eventually
from msgspec.structs import replace

from kvferry.endpoint.control.bundles import bundle
from kvferry.endpoint.control.sockets import ControlServer
from kvferry.endpoint.control.unix import (
    MAX_UNPROVEN,
    MAX_UNSENT_BYTES,
    SECRET_BYTES,
    UnixChannel,
    UnixListener,
    UnixServer,
    connect,
)
from kvferry.endpoint.loop.channels import (
    MAX_CHANNELS,
    MAX_UNFINISHED_BYTES,
    Channel,
    ConnectionLost,
    SourceChannel,
    TargetChannel,
)
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.ids import Generation, Peer, Session
from kvferry.protocol.codec import MAX_FRAME_BYTES
from kvferry.protocol.events import Event, Received
from kvferry.protocol.messages import Accept, Envelope, Heartbeat
from kvferry.telemetry.observer import Observer

SOURCE, TARGET = Peer("prefill", 0), Peer("decode", 0)
SESSION = Session(1, 1)


@pytest.fixture
def server() -> Iterator[UnixServer]:
    made = UnixServer.open()
    assert made is not None
    yield made
    made.close()


def joined(server: UnixServer) -> tuple[UnixChannel, UnixChannel]:
    """Both ends of a connection."""
    ours = connect(server.listener)
    (theirs,) = server.accept()
    assert ours is not None
    return ours, theirs


def received(channel: UnixChannel, num_frames: int, other: UnixChannel) -> list[bytes]:
    """Receive a number of frames while the other end sends what it has queued."""
    frames: list[bytes] = []
    while len(frames) < num_frames and not channel.over:
        other.resume()
        frames += channel.receive()
    return frames


def message(*frames: bytes) -> bytes:
    (one,) = bundle(frames)
    return one


def test_frames_arrive_whole_and_in_order_both_ways(server: UnixServer) -> None:
    ours, theirs = joined(server)
    # Larger than a socket buffer, so that it arrives in parts.
    frames = [b"a", b"", b"b" * 3_000_000, b"c" * 70_000, b"d"]
    for channel, other in ((ours, theirs), (theirs, ours)):
        assert channel.send(message(*frames[:2]))
        assert channel.send(message(*frames[2:4]))
        assert channel.send(message(frames[4]))
        assert channel.has_unsent
        got = received(other, len(frames), channel)
        # Compare lengths and first bytes only: pytest would print a difference of megabytes.
        assert [(len(frame), frame[:1]) for frame in got] == [(len(f), f[:1]) for f in frames]
        assert not channel.has_unsent
    ours.close()
    theirs.close()


def test_the_queue_for_a_peer_that_does_not_read_is_bounded(server: UnixServer) -> None:
    ours, theirs = joined(server)
    large = message(bytes(MAX_FRAME_BYTES))
    sent = 0
    while ours.send(large):
        sent += 1
        assert sent <= MAX_UNSENT_BYTES // len(large) + 1
    # The queued messages arrive whole, and the channel goes on.
    assert len(received(theirs, sent, ours)) == sent
    assert ours.send(message(b"next"))
    assert received(theirs, 1, ours) == [b"next"]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("secret", [bytes(SECRET_BYTES), b"x" * 1000], ids=["zeros", "noise"])
def test_frames_behind_a_wrong_secret_are_ignored(server: UnixServer, secret: bytes) -> None:
    ours = connect(UnixListener(server.listener.name, secret[:SECRET_BYTES]))
    assert ours is not None
    (theirs,) = server.accept()
    ours.send(secret + message(b"frame"))
    assert (theirs.receive(), theirs.is_proven, theirs.over) == ([], False, True)
    ours.close()
    theirs.close()


def test_a_secret_may_arrive_in_parts(server: UnixServer) -> None:
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    plain.connect(f"\0{server.listener.name}")
    (theirs,) = server.accept()
    plain.send(server.listener.secret[:10])
    assert (theirs.receive(), theirs.is_proven, theirs.over) == ([], False, False)
    plain.send(server.listener.secret[10:] + message(b"frame")[:3])
    assert (theirs.receive(), theirs.is_proven) == ([], True)
    plain.send(message(b"frame")[3:])
    assert theirs.receive() == [b"frame"]
    plain.close()
    assert (theirs.receive(), theirs.over) == ([], True)
    theirs.close()


def test_connections_without_the_secret_are_limited(server: UnixServer) -> None:
    proven, heard = joined(server)
    proven.send(message(b"frame"))
    assert heard.receive() == [b"frame"]
    came: list[tuple[socket.socket, UnixChannel]] = []
    for _ in range(MAX_UNPROVEN + 3):
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.connect(f"\0{server.listener.name}")
        came += [(plain, channel) for channel in server.accept()]
    assert [channel.over for _, channel in came] == [True] * 3 + [False] * MAX_UNPROVEN
    assert not heard.over
    for plain, channel in came:
        plain.close()
        channel.close()
    proven.close()
    heard.close()


def test_an_impossible_length_ends_the_channel(server: UnixServer) -> None:
    ours, theirs = joined(server)
    ours.send(message(b"frame") + struct.pack(">I", MAX_FRAME_BYTES + 1) + b"more")
    assert (theirs.receive(), theirs.over) == ([b"frame"], True)
    ours.close()
    theirs.close()


def test_connecting_where_nobody_listens_returns_none() -> None:
    assert connect(UnixListener("kvferry-nobody-is-here", bytes(SECRET_BYTES))) is None


def test_the_listener_is_optional_in_the_metadata_and_its_secret_hidden() -> None:
    listener = UnixListener("kvferry-x", bytes(SECRET_BYTES))
    metadata = PeerMetadata(("127.0.0.1", 1), listener=listener)
    assert PeerMetadata.decode(metadata.encode()) == metadata
    without = replace(metadata, listener=None)
    assert PeerMetadata.decode(without.encode()) == without
    assert PeerMetadata.decode(b"\xc1") is None
    assert listener.secret.hex() not in repr(metadata)
    assert repr(listener.secret) not in repr(metadata)


# ---------------------------------------------------------------- channels


class Seen(Observer):
    """An observer that records frames and counts refusals."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, Peer, object]] = []
        self.refusals: Counter[str] = Counter()

    def frame_in(self, envelope: Envelope) -> None:
        self.frames.append(("in", envelope.sender, envelope.body))

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        self.frames.append(("out", peer, envelope.body))

    def refused(self, what: str, times: int = 1) -> None:
        self.refusals[what] += times


class Two(NamedTuple):
    """Both sides' channels with their pollers, and the source's listener."""

    source: SourceChannel
    target: TargetChannel
    source_poller: Poller
    target_poller: Poller
    listener: UnixListener
    seen: tuple[Seen, Seen]


def ignore(event: Event) -> None:
    """Ignore an event."""


@pytest.fixture
def two(server: UnixServer) -> Iterator[Two]:
    control = ControlServer("127.0.0.1")
    pollers, seen = (Poller(), Poller()), (Seen(), Seen())
    source = SourceChannel(SOURCE, pollers[0], seen[0], ignore, control, server)
    target = TargetChannel(TARGET, pollers[1], seen[1], ignore, None, lambda _: control.address)
    yield Two(source, target, *pollers, server.listener, seen)
    target.close()
    source.close()


def frame(sender: Peer, seq: int) -> Envelope:
    return Envelope(sender, 1, SESSION, seq, Heartbeat())


def taken(channel: Channel[Any], poller: Poller) -> list[object]:
    """Receive: the sequence numbers of frames, and lost connections."""
    found = channel.receive(poller.wait(0.0))
    return [one.envelope.seq if isinstance(one, Received) else one for one in found]


def say(channel: Channel[Any], to: Peer, sender: Peer, seq: int) -> None:
    channel.send(to, frame(sender, seq))
    channel.flush()


def awaited(channel: Channel[Any], poller: Poller, wanted: object) -> None:
    eventually(lambda: wanted in taken(channel, poller))


def test_a_target_uses_the_unix_channel_and_is_answered_there(two: Two) -> None:
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    two.target.connect_unix(SOURCE, two.listener)
    assert taken(two.source, two.source_poller) == []
    say(two.target, SOURCE, TARGET, 2)
    # No thread in between: the frame is there at once.
    assert taken(two.source, two.source_poller) == [2]
    say(two.source, TARGET, SOURCE, 1)
    assert taken(two.target, two.target_poller) == [1]


def test_frames_fall_back_to_the_control_channel(two: Two) -> None:
    two.target.connect_unix(SOURCE, two.listener)
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    two.source._unix_channels.close()
    awaited(two.target, two.target_poller, ConnectionLost(SOURCE))
    say(two.target, SOURCE, TARGET, 2)
    awaited(two.source, two.source_poller, 2)
    say(two.source, TARGET, SOURCE, 1)
    awaited(two.target, two.target_poller, 1)


def test_every_frame_is_observed_on_both_sides(two: Two) -> None:
    accept = Accept(7, Generation(1))
    two.target.send(SOURCE, replace(frame(TARGET, 1), body=accept))
    say(two.target, SOURCE, TARGET, 2)
    awaited(two.source, two.source_poller, 2)
    there, here = (one.frames for one in two.seen)
    assert here == [("out", SOURCE, accept), ("out", SOURCE, Heartbeat())]
    assert there == [("in", TARGET, accept), ("in", TARGET, Heartbeat())]


def test_a_new_connection_replaces_the_former(two: Two) -> None:
    for seq in (1, 2):
        two.target.connect_unix(SOURCE, two.listener)
        say(two.target, SOURCE, TARGET, seq)
        awaited(two.source, two.source_poller, seq)
    say(two.source, TARGET, SOURCE, 1)
    assert taken(two.target, two.target_poller) == [1]
    two.target.drop(SOURCE)
    awaited(two.source, two.source_poller, ConnectionLost(None))


def test_a_slow_reader_gets_every_frame(two: Two) -> None:
    two.target.connect_unix(SOURCE, two.listener)
    num_frames = 4000
    for seq in range(1, num_frames + 1):
        two.target.send(SOURCE, replace(frame(TARGET, seq), sender=Peer("d" * 200, 0)))
    two.target.flush()
    found: list[object] = []
    while len(found) < num_frames:
        found += taken(two.source, two.source_poller)
        # Woken because there is room to write; no frame has arrived.
        assert taken(two.target, two.target_poller) == []
    assert found == list(range(1, num_frames + 1))


def held_bytes(two: Two) -> int:
    return sum(channel.num_unfinished for channel in two.source._unix_channels._channels.values())


def test_incomplete_frames_of_authenticated_peers_are_bounded(two: Two) -> None:
    """Twelve channels each send all but the last byte of a frame of maximum length."""
    channels = [connect(two.listener) for _ in range(12)]
    half_frame = struct.pack(">I", MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1)
    for channel in channels:
        assert channel is not None
        channel.send(half_frame)
    while any(
        channel is not None and channel.has_unsent and not channel.over for channel in channels
    ):
        assert held_bytes(two) <= MAX_UNFINISHED_BYTES
        for channel in channels:
            assert channel is not None
            channel.resume()
        taken(two.source, two.source_poller)
    assert two.seen[0].refusals["unfinished-frames"] >= 8
    for channel in channels:
        assert channel is not None
        channel.close()
    # A peer that behaves is served as before.
    two.target.connect_unix(SOURCE, two.listener)
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)


def test_further_channels_are_closed_and_use_the_control_channel(two: Two) -> None:
    channels = []
    for _ in range(MAX_CHANNELS + 8):
        channels.append(connect(two.listener))
        taken(two.source, two.source_poller)
    assert two.seen[0].refusals["too-many-lines"] == 8
    two.target.connect_unix(SOURCE, two.listener)
    taken(two.source, two.source_poller)
    eventually(lambda: ConnectionLost(SOURCE) in taken(two.target, two.target_poller))
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    for channel in channels:
        assert channel is not None
        channel.close()
