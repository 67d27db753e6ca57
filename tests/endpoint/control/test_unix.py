"""Lines between processes of one host: frames both ways, nobody without the secret, and ends."""

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
from kvferry.endpoint.loop.channels import Channel, Dropped, SourceChannel, TargetChannel
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.unix_channels import MAX_LINES, MAX_UNFINISHED_BYTES
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
    """A line, by its two ends."""
    ours = connect(server.listener)
    (theirs,) = server.accept()
    assert ours is not None
    return ours, theirs


def received(line: UnixChannel, num_frames: int, other: UnixChannel) -> list[bytes]:
    """So many frames, while the other end goes on sending what was left."""
    frames: list[bytes] = []
    while len(frames) < num_frames and not line.over:
        other.resume()
        frames += line.receive()
    return frames


def message(*frames: bytes) -> bytes:
    (one,) = bundle(frames)
    return one


def test_frames_come_whole_and_in_order_both_ways(server: UnixServer) -> None:
    ours, theirs = joined(server)
    # Larger than a socket holds, so that it comes in parts.
    frames = [b"a", b"", b"b" * 3_000_000, b"c" * 70_000, b"d"]
    for line, other in ((ours, theirs), (theirs, ours)):
        assert line.send(message(*frames[:2]))
        assert line.send(message(*frames[2:4]))
        assert line.send(message(frames[4]))
        assert line.has_unsent
        got = received(other, len(frames), line)
        # Never compared as a whole: the difference would be printed.
        assert [(len(frame), frame[:1]) for frame in got] == [(len(f), f[:1]) for f in frames]
        assert not line.has_unsent
    ours.close()
    theirs.close()


def test_what_a_peer_does_not_read_is_bounded(server: UnixServer) -> None:
    ours, theirs = joined(server)
    large = message(bytes(MAX_FRAME_BYTES))
    sent = 0
    while ours.send(large):
        sent += 1
        assert sent <= MAX_UNSENT_BYTES // len(large) + 1
    # What was taken comes whole, and the line goes on.
    assert len(received(theirs, sent, ours)) == sent
    assert ours.send(message(b"next"))
    assert received(theirs, 1, ours) == [b"next"]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("said", [bytes(SECRET_BYTES), b"x" * 1000], ids=["zeros", "noise"])
def test_who_does_not_know_the_secret_is_not_heard(server: UnixServer, said: bytes) -> None:
    ours = connect(UnixListener(server.listener.name, said[:SECRET_BYTES]))
    assert ours is not None
    (theirs,) = server.accept()
    ours.send(said + message(b"frame"))
    assert (theirs.receive(), theirs.is_proven, theirs.over) == ([], False, True)
    ours.close()
    theirs.close()


def test_half_a_secret_proves_nothing_yet(server: UnixServer) -> None:
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


def test_those_who_prove_nothing_are_few(server: UnixServer) -> None:
    proven, heard = joined(server)
    proven.send(message(b"frame"))
    assert heard.receive() == [b"frame"]
    came: list[tuple[socket.socket, UnixChannel]] = []
    for _ in range(MAX_UNPROVEN + 3):
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.connect(f"\0{server.listener.name}")
        came += [(plain, line) for line in server.accept()]
    assert [line.over for _, line in came] == [True] * 3 + [False] * MAX_UNPROVEN
    assert not heard.over
    for plain, line in came:
        plain.close()
        line.close()
    proven.close()
    heard.close()


def test_a_length_that_no_frame_has_ends_the_line(server: UnixServer) -> None:
    ours, theirs = joined(server)
    ours.send(message(b"frame") + struct.pack(">I", MAX_FRAME_BYTES + 1) + b"more")
    assert (theirs.receive(), theirs.over) == ([b"frame"], True)
    ours.close()
    theirs.close()


def test_nobody_at_the_door() -> None:
    assert connect(UnixListener("kvferry-nobody-is-here", bytes(SECRET_BYTES))) is None


def test_a_door_is_part_of_what_peers_are_told_and_earlier_ones_have_none() -> None:
    listener = UnixListener("kvferry-x", bytes(SECRET_BYTES))
    metadata = PeerMetadata(("127.0.0.1", 1), listener=listener)
    assert PeerMetadata.decode(metadata.encode()).listener == listener
    assert PeerMetadata.decode(replace(metadata, listener=None).encode()).listener is None
    assert PeerMetadata.read(b"\xc1") is None
    assert listener.secret.hex() not in repr(metadata)
    assert repr(listener.secret) not in repr(metadata)


# ---------------------------------------------------------------- channels


class Seen(Observer):
    """An observer of a channel that counts refusals."""

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
    """Both sides' channels, with what each waits in, and the source's listener."""

    source: SourceChannel
    target: TargetChannel
    source_poller: Poller
    target_poller: Poller
    listener: UnixListener
    seen: tuple[Seen, Seen]


def nobody(event: Event) -> None:
    """Hears of nothing."""


@pytest.fixture
def two(server: UnixServer) -> Iterator[Two]:
    control = ControlServer("127.0.0.1")
    pollers, seen = (Poller(), Poller()), (Seen(), Seen())
    source = SourceChannel(SOURCE, pollers[0], seen[0], nobody, control, server)
    target = TargetChannel(TARGET, pollers[1], seen[1], nobody, None, lambda _: control.address)
    yield Two(source, target, *pollers, server.listener, seen)
    target.close()
    source.close()


def frame(sender: Peer, seq: int) -> Envelope:
    return Envelope(sender, 1, SESSION, seq, Heartbeat())


def taken(channel: Channel[Any], poller: Poller) -> list[object]:
    """The numbers of the frames that have come, and what became of connections."""
    found = channel.receive(poller.wait(0.0))
    return [one.envelope.seq if isinstance(one, Received) else one for one in found]


def say(channel: Channel[Any], to: Peer, sender: Peer, seq: int) -> None:
    channel.send(to, frame(sender, seq))
    channel.flush()


def awaited(channel: Channel[Any], poller: Poller, wanted: object) -> None:
    eventually(lambda: wanted in taken(channel, poller))


def test_who_has_joined_talks_on_the_line_and_is_answered_there(two: Two) -> None:
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    two.target.join(SOURCE, two.listener)
    assert taken(two.source, two.source_poller) == []
    say(two.target, SOURCE, TARGET, 2)
    # No thread between them: what was said is there.
    assert taken(two.source, two.source_poller) == [2]
    say(two.source, TARGET, SOURCE, 1)
    assert taken(two.target, two.target_poller) == [1]


def test_when_the_line_ends_the_control_channel_is_still_there(two: Two) -> None:
    two.target.join(SOURCE, two.listener)
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    two.source._lines.close()
    awaited(two.target, two.target_poller, Dropped(SOURCE))
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


def test_a_second_session_replaces_the_line(two: Two) -> None:
    for seq in (1, 2):
        two.target.join(SOURCE, two.listener)
        say(two.target, SOURCE, TARGET, seq)
        awaited(two.source, two.source_poller, seq)
    say(two.source, TARGET, SOURCE, 1)
    assert taken(two.target, two.target_poller) == [1]
    two.target.drop(SOURCE)
    awaited(two.source, two.source_poller, Dropped(None))


def test_a_peer_that_reads_slowly_gets_everything(two: Two) -> None:
    two.target.join(SOURCE, two.listener)
    num_frames = 4000
    for seq in range(1, num_frames + 1):
        two.target.send(SOURCE, replace(frame(TARGET, seq), sender=Peer("d" * 200, 0)))
    two.target.flush()
    found: list[object] = []
    while len(found) < num_frames:
        found += taken(two.source, two.source_poller)
        # Woken for there is room, and nothing has come.
        assert taken(two.target, two.target_poller) == []
    assert found == list(range(1, num_frames + 1))


def held_bytes(two: Two) -> int:
    return sum(line.num_unfinished for line in two.source._lines._lines.values())


def test_unfinished_frames_of_those_who_know_the_secret_are_bounded(two: Two) -> None:
    """Twelve lines that each send all but the last byte of the longest frame there is."""
    lines = [connect(two.listener) for _ in range(12)]
    half_frame = struct.pack(">I", MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1)
    for line in lines:
        assert line is not None
        line.send(half_frame)
    while any(line is not None and line.has_unsent and not line.over for line in lines):
        assert held_bytes(two) <= MAX_UNFINISHED_BYTES
        for line in lines:
            assert line is not None
            line.resume()
        taken(two.source, two.source_poller)
    assert two.seen[0].refusals["unfinished-frames"] >= 8
    for line in lines:
        assert line is not None
        line.close()
    # Whoever behaves is heard as before.
    two.target.join(SOURCE, two.listener)
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)


def test_lines_are_so_many_at_most_and_others_use_the_control_channel(two: Two) -> None:
    lines = []
    for _ in range(MAX_LINES + 8):
        lines.append(connect(two.listener))
        taken(two.source, two.source_poller)
    assert two.seen[0].refusals["too-many-lines"] == 8
    two.target.join(SOURCE, two.listener)
    taken(two.source, two.source_poller)
    eventually(lambda: Dropped(SOURCE) in taken(two.target, two.target_poller))
    say(two.target, SOURCE, TARGET, 1)
    awaited(two.source, two.source_poller, 1)
    for line in lines:
        assert line is not None
        line.close()
