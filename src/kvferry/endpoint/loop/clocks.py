"""Offsets of peers' clocks, measured with heartbeats that carry times.

The machines do not see these heartbeats; any of them may be lost. For the loop thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from kvferry.ids import Peer, Session
from kvferry.protocol.links import Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.protocol.states import LinkState
from kvferry.telemetry.clocks import Offset, better, offset_of

# Short enough that drift adds half a millisecond at most.
INTERVAL_S = 5.0


class PeerClocks:
    """How far each peer's clock is ahead of the local one, for its current incarnation."""

    def __init__(self, machine: Machine, send: Callable[[Peer, Envelope], None]) -> None:
        self._machine = machine
        self._send = send
        self._requested_at: dict[Peer, float] = {}
        self._offsets: dict[Peer, tuple[int, Offset]] = {}

    def handle(self, envelope: Envelope, beat: Heartbeat) -> None:
        """Answer a clock request, or use the answer to one."""
        now = time.monotonic()
        if beat.asked is None:
            return
        if beat.heard is None or beat.said is None:
            answer = Heartbeat(beat.asked, now, time.monotonic())
            self._send_beat(envelope.sender, envelope.session, answer)
            return
        # The times in an answer may be nonsense; they come from another machine.
        with contextlib.suppress(ValueError):
            new = offset_of(beat.asked, beat.heard, beat.said, now)
            incarnation, known = self._offsets.get(envelope.sender, (None, None))
            best = better(known if incarnation == envelope.incarnation else None, new)
            self._offsets[envelope.sender] = envelope.incarnation, best

    def request(self, links: Iterable[Link], now: float) -> None:
        """Send the clock requests that are due, and forget peers without a link."""
        up = [link for link in links if link.state is LinkState.UP]
        for peer in self._requested_at.keys() - {link.peer for link in up}:
            del self._requested_at[peer]
            self._offsets.pop(peer, None)
        for link in up:
            if now >= self._requested_at.get(link.peer, -INTERVAL_S) + INTERVAL_S:
                self._requested_at[link.peer] = now
                self._send_beat(link.peer, link.session, Heartbeat(time.monotonic()))

    def _send_beat(self, peer: Peer, session: Session, beat: Heartbeat) -> None:
        machine = self._machine
        self._send(peer, Envelope(machine.me, machine.incarnation, session, 0, beat))

    def offset(self, peer: Peer, now: float) -> Offset | None:
        """Return the offset of a peer's clock, with the uncertainty that it has by ``now``."""
        found = self._offsets.get(peer)
        return found[1].aged(now) if found is not None else None
