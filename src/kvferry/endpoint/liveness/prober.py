"""The prober: asks lifelines until a process is proven gone.

One thread for all of an endpoint's lost peers, because asking waits. What it
finds it tells the owner; what nobody needs any more is forgotten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.endpoint.liveness.port import Address, Liveness, probe
from kvferry.endpoint.runner.runner import PeerGone
from kvferry.ids import Peer

PROBE_S = 0.5
REPEAT_S = 0.5
# A sign of death may come before the process has quite gone: ask again soon, for a while.
SIGN_S = 3.0
SIGN_REPEAT_S = 0.05
# What a process had handed to the network before it died may still come in.
GRACE_S = 0.25

Suspect = tuple[Peer, int]


class Prober:
    """Asks after probes until they are gone or acquitted."""

    def __init__(self, on_gone: Callable[[PeerGone], None], name: str) -> None:
        self._on_gone = on_gone
        self._suspects: dict[Suspect, Address] = {}
        self._signs: dict[Suspect, tuple[Address, float]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start_probing(self, peer: Peer, incarnation: int, address: Address) -> None:
        """Ask after that life until it is proven gone or nobody cares any more."""
        with self._changed:
            self._suspects[peer, incarnation] = address
            self._changed.notify()

    def sign(self, peer: Peer, incarnation: int, address: Address) -> None:
        """There was a sign that it may be gone: ask until it answers, for a short while."""
        with self._changed:
            self._signs[peer, incarnation] = address, time.monotonic() + SIGN_S
            self._changed.notify()

    def stop_probing(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof any more."""
        if self._suspects:
            with self._changed:
                self._suspects.pop((peer, incarnation), None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._suspects or self._signs or self._closing)
                if self._closing:
                    return
                signs = {
                    start_probing: address for start_probing, (address, _) in self._signs.items()
                }
                asked = self._suspects | signs
            for start_probing, address in asked.items():
                self._ask(start_probing, address)
            with self._changed:
                if not self._closing:
                    self._changed.wait(SIGN_REPEAT_S if self._signs else REPEAT_S)

    def _ask(self, start_probing: Suspect, address: Address) -> None:
        life = probe(address, start_probing[1], PROBE_S)
        with self._changed:
            expired = time.monotonic() >= self._signs.get(start_probing, (address, 0.0))[1]
            if life is not Liveness.UNKNOWN or expired:
                self._signs.pop(start_probing, None)
            if life is Liveness.GONE:
                self._suspects.pop(start_probing, None)
        if life is Liveness.GONE:
            time.sleep(GRACE_S)
            self._on_gone(PeerGone(*start_probing))
