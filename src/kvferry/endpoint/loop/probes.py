"""PeerProbes: to a runner, the port through which it asks whether peers live.

The asking is the prober's, on a thread of its own; what it finds comes as ``PeerGone``.
"""

from __future__ import annotations

from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Peer


class PeerProbes:
    """Who is asked after, at the lifelines that they told us of."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober

    def start_probing(self, record: SessionRecord) -> None:
        """Ask after that life until it is proven gone, or acquitted."""
        told = PeerMetadata.read(record.metadata)
        if told:
            self._prober.start_probing(record.peer, record.incarnation, told.address)

    def stop_probing(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof any more."""
        self._prober.stop_probing(peer, incarnation)

    def sign(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """There was a sign that it may be gone: ask until it answers, for a short while."""
        told = PeerMetadata.read(metadata)
        if told:
            self._prober.sign(peer, incarnation, told.address)
