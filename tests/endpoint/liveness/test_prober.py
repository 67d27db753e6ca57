"""The liveness prober: reports each dead peer once, and nobody else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from kvferry.endpoint.liveness.port import Address
from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.runner.runner import PeerGone
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Peer, Session
from kvferry.transports.mailbox import Mailbox

GONE, STUCK, OTHER = Peer("gone", 0), Peer("stuck", 0), Peer("other", 0)
INCARNATION = 7
WAIT_S = 15.0


@pytest.fixture
def reported() -> Mailbox[PeerGone]:
    return Mailbox()


@pytest.fixture
def prober(reported: Mailbox[PeerGone]) -> Iterator[Prober]:
    prober = Prober(reported.put, "prober")
    yield prober
    prober.close()


def refusing() -> Address:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: Address = server.getsockname()
        return address


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that accepts connections but answers nothing by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        yield server


def accept_probe(server: socket.socket) -> None:
    """Wait for a probe, and close it without an answer."""
    server.accept()[0].close()


def record_of(peer: Peer, metadata: bytes, incarnation: int = INCARNATION) -> SessionRecord:
    return SessionRecord(peer, incarnation, Session(incarnation, 1), metadata, exposed=True)


def metadata_with(address: Address) -> bytes:
    return PeerMetadata(address).encode()


def start_probing(prober: Prober, peer: Peer, address: Address) -> None:
    prober.start_probing(record_of(peer, metadata_with(address)))


def test_a_dead_peer_is_reported(prober: Prober, reported: Mailbox[PeerGone]) -> None:
    start_probing(prober, GONE, refusing())
    assert reported.get(WAIT_S) == PeerGone(GONE, INCARNATION)


def test_a_peer_is_probed_until_it_is_dead(
    prober: Prober, reported: Mailbox[PeerGone], listener: socket.socket
) -> None:
    start_probing(prober, STUCK, listener.getsockname())
    accept_probe(listener)
    accept_probe(listener)
    assert len(reported) == 0
    listener.close()
    assert reported.get(WAIT_S) == PeerGone(STUCK, INCARNATION)


def wait_for_round(prober: Prober, reported: Mailbox[PeerGone]) -> None:
    """Wait for a round of probes that starts after this call."""
    start_probing(prober, GONE, refusing())
    assert reported.get(WAIT_S) == PeerGone(GONE, INCARNATION)


def test_probing_stops_on_request(
    prober: Prober, reported: Mailbox[PeerGone], listener: socket.socket
) -> None:
    start_probing(prober, STUCK, listener.getsockname())
    accept_probe(listener)
    prober.stop_probing(record_of(OTHER, b""))
    accept_probe(listener)
    prober.stop_probing(record_of(STUCK, b""))
    check_not_probed(listener, prober, reported)


def check_not_probed(listener: socket.socket, prober: Prober, reported: Mailbox[PeerGone]) -> None:
    listener.setblocking(False)
    # A round that started before may still probe.
    wait_for_round(prober, reported)
    with contextlib.suppress(BlockingIOError):
        accept_probe(listener)
    wait_for_round(prober, reported)
    with pytest.raises(BlockingIOError):
        accept_probe(listener)


def test_a_death_hint_is_followed_until_there_is_an_answer(
    prober: Prober, reported: Mailbox[PeerGone], listener: socket.socket
) -> None:
    prober.hint_death(record_of(STUCK, metadata_with(listener.getsockname())))
    # A connection without a valid answer proves nothing, so it probes again.
    accept_probe(listener)
    accept_probe(listener)
    listener.close()
    assert reported.get(WAIT_S) == PeerGone(STUCK, INCARNATION)
    # A death is reported once: the next report is about the next hint.
    prober.hint_death(record_of(GONE, metadata_with(refusing()), INCARNATION + 1))
    assert reported.get(WAIT_S) == PeerGone(GONE, INCARNATION + 1)
    assert len(reported) == 0


def test_peers_with_invalid_metadata_are_not_probed(
    prober: Prober, reported: Mailbox[PeerGone]
) -> None:
    prober.start_probing(record_of(OTHER, b"not metadata"))
    prober.hint_death(record_of(OTHER, b"not metadata"))
    wait_for_round(prober, reported)
    assert len(reported) == 0
