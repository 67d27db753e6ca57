"""Suspects: to a driver, the port through which it asks whether peers live.

The asking is the prober's, on a thread of its own; what it finds comes as ``PeerGone``.
"""

from __future__ import annotations

from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.runner.sessions import Record
from kvferry.ids import Peer


class Suspects:
    """Who is asked after, at the lifelines that they told us of."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober

    def suspect(self, record: Record) -> None:
        """Ask after that life until it is proven gone, or acquitted."""
        told = PeerMetadata.read(record.metadata)
        if told:
            self._prober.suspect(record.peer, record.incarnation, told.address)

    def acquit(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof any more."""
        self._prober.acquit(peer, incarnation)

    def sign(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """There was a sign that it may be gone: ask until it answers, for a short while."""
        told = PeerMetadata.read(metadata)
        if told:
            self._prober.sign(peer, incarnation, told.address)
