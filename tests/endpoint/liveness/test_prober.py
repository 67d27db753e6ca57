"""Asking after peers on a thread of its own: who is gone is told of, once, and nobody else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from kvferry.endpoint.liveness.port import Address
from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.loop.probes import PeerProbes
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.runner.runner import PeerGone
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Peer, Session
from kvferry.transports.mailbox import Mailbox

GONE, STUCK, OTHER = Peer("gone", 0), Peer("stuck", 0), Peer("other", 0)
LIFE = 7
WAIT_S = 15.0


@pytest.fixture
def told() -> Mailbox[PeerGone]:
    return Mailbox()


@pytest.fixture
def prober(told: Mailbox[PeerGone]) -> Iterator[Prober]:
    prober = Prober(told.put, "prober")
    yield prober
    prober.close()


def refusing() -> Address:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: Address = server.getsockname()
        return address


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A process that takes connections and has something to say only if a test says it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        yield server


def asked(server: socket.socket) -> None:
    """Wait until somebody asks, and say nothing."""
    server.accept()[0].close()


def test_a_suspect_that_is_gone_is_told_of(prober: Prober, told: Mailbox[PeerGone]) -> None:
    prober.start_probing(GONE, LIFE, refusing())
    assert told.get(WAIT_S) == PeerGone(GONE, LIFE)


def test_a_suspect_is_asked_after_until_it_is_gone(
    prober: Prober, told: Mailbox[PeerGone], listener: socket.socket
) -> None:
    prober.start_probing(STUCK, LIFE, listener.getsockname())
    asked(listener)
    asked(listener)
    assert len(told) == 0
    listener.close()
    assert told.get(WAIT_S) == PeerGone(STUCK, LIFE)


def a_round_goes_by(prober: Prober, told: Mailbox[PeerGone]) -> None:
    """One that has begun after this was called."""
    prober.start_probing(GONE, LIFE, refusing())
    assert told.get(WAIT_S) == PeerGone(GONE, LIFE)


def test_nobody_asks_after_the_acquitted(
    prober: Prober, told: Mailbox[PeerGone], listener: socket.socket
) -> None:
    prober.start_probing(STUCK, LIFE, listener.getsockname())
    asked(listener)
    prober.stop_probing(OTHER, LIFE)
    asked(listener)
    prober.stop_probing(STUCK, LIFE)
    nobody_asks(listener, prober, told)


def nobody_asks(listener: socket.socket, prober: Prober, told: Mailbox[PeerGone]) -> None:
    listener.setblocking(False)
    # The one that goes on may have begun before.
    a_round_goes_by(prober, told)
    with contextlib.suppress(BlockingIOError):
        asked(listener)
    a_round_goes_by(prober, told)
    with pytest.raises(BlockingIOError):
        asked(listener)


def test_a_sign_is_followed_until_there_is_an_answer(
    prober: Prober, told: Mailbox[PeerGone], listener: socket.socket
) -> None:
    prober.sign(STUCK, LIFE, listener.getsockname())
    # What is no answer proves nothing, and it asks again.
    asked(listener)
    asked(listener)
    listener.close()
    assert told.get(WAIT_S) == PeerGone(STUCK, LIFE)
    # Told of once: the next word is about the next.
    prober.sign(GONE, LIFE, refusing())
    assert told.get(WAIT_S).peer == GONE
    assert len(told) == 0


def record_of(peer: Peer, metadata: bytes) -> SessionRecord:
    return SessionRecord(peer, LIFE, Session(LIFE, 1), metadata, exposed=True)


def metadata_with(address: Address) -> bytes:
    return PeerMetadata(address).encode()


def test_a_driver_asks_through_what_it_was_told_by_its_peers(
    prober: Prober, told: Mailbox[PeerGone], listener: socket.socket
) -> None:
    probes = PeerProbes(prober)
    probes.start_probing(record_of(OTHER, b"no card"))
    probes.sign(OTHER, LIFE, b"no card")
    probes.start_probing(record_of(STUCK, metadata_with(listener.getsockname())))
    asked(listener)
    probes.stop_probing(STUCK, LIFE)
    nobody_asks(listener, prober, told)
    probes.start_probing(record_of(GONE, metadata_with(refusing())))
    assert told.get(WAIT_S) == PeerGone(GONE, LIFE)
    probes.sign(GONE, LIFE + 1, metadata_with(refusing()))
    assert told.get(WAIT_S) == PeerGone(GONE, LIFE + 1)
