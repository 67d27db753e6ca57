"""The liveness prober: a thread that probes peers, which blocks, until they are proven dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.endpoint.liveness.port import Address, Liveness, probe
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.runner.runner import PeerGone
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Peer

PROBE_TIMEOUT_S = 0.5
PROBE_INTERVAL_S = 0.5
# A connection may end shortly before its process does: after a hint, probe often for a while.
HINT_DURATION_S = 3.0
HINT_INTERVAL_S = 0.05
# Data that a process gave to the network before it died may still arrive for this long.
GRACE_S = 0.25


class Prober:
    """Peers port of a runner. Any thread may call it; ``on_gone`` is called on its own thread."""

    def __init__(self, on_gone: Callable[[PeerGone], None], name: str) -> None:
        self._on_gone = on_gone
        self._probed: dict[tuple[Peer, int], Address] = {}
        # Peers that may be dead, and until when to probe them.
        self._hints: dict[tuple[Peer, int], tuple[Address, float]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start_probing(self, record: SessionRecord) -> None:
        """Probe a session's peer until it is proven dead, or ``stop_probing``."""
        metadata = PeerMetadata.decode(record.metadata)
        if metadata:
            with self._changed:
                self._probed[record.life] = metadata.liveness_port
                self._changed.notify()

    def stop_probing(self, record: SessionRecord) -> None:
        """Stop probing a session's peer."""
        if self._probed:
            with self._changed:
                self._probed.pop(record.life, None)

    def hint_death(self, record: SessionRecord) -> None:
        """Probe a peer that may be dead until it answers, for a short while."""
        metadata = PeerMetadata.decode(record.metadata)
        if metadata:
            until = time.monotonic() + HINT_DURATION_S
            with self._changed:
                self._hints[record.life] = metadata.liveness_port, until
                self._changed.notify()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._probed or self._hints or self._closing)
                if self._closing:
                    return
                hinted = {life: address for life, (address, _) in self._hints.items()}
                addresses = self._probed | hinted
            for life, address in addresses.items():
                self._probe(life, address)
            with self._changed:
                if not self._closing:
                    self._changed.wait(HINT_INTERVAL_S if self._hints else PROBE_INTERVAL_S)

    def _probe(self, life: tuple[Peer, int], address: Address) -> None:
        liveness = probe(address, life[1], PROBE_TIMEOUT_S)
        with self._changed:
            expired = time.monotonic() >= self._hints.get(life, (address, 0.0))[1]
            if liveness is not Liveness.UNKNOWN or expired:
                self._hints.pop(life, None)
            if liveness is Liveness.GONE:
                self._probed.pop(life, None)
        if liveness is Liveness.GONE:
            time.sleep(GRACE_S)
            self._on_gone(PeerGone(*life))
