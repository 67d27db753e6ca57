"""Clocks of peers, measured with heartbeats: a question with our time, an answer with theirs.

The machines know nothing of it: these heartbeats have no number, and any of them may be lost.
Belongs to the owner's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from kvferry.ids import Peer
from kvferry.protocol.links import Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.protocol.states import LinkState
from kvferry.telemetry.clocks import Offset, better, offset_of

# Often enough that drift adds half a millisecond at most.
ASK_S = 5.0

SendFrame = Callable[[Peer, Envelope], None]


class PeerClocks:
    """How far the clocks of peers are ahead of ours, in the life that we know of each."""

    def __init__(self, machine: Machine, send: SendFrame) -> None:
        self._machine = machine
        self._send = send
        self._asked: dict[Peer, float] = {}
        self._offsets: dict[Peer, tuple[int, Offset]] = {}

    def heard(self, envelope: Envelope, beat: Heartbeat) -> None:
        """A heartbeat has come: answer a question, take an answer."""
        now = time.monotonic()
        if beat.asked is None:
            return
        if beat.heard is None or beat.said is None:
            answer = Heartbeat(beat.asked, now, time.monotonic())
            self._say(envelope.sender, envelope, answer)
            return
        with contextlib.suppress(ValueError):
            # A stranger's answer, or one to another life of ours, may be nonsense.
            new = offset_of(beat.asked, beat.heard, beat.said, now)
            life, known = self._offsets.get(envelope.sender, (None, None))
            best = better(known if life == envelope.incarnation else None, new)
            self._offsets[envelope.sender] = envelope.incarnation, best

    def _say(self, peer: Peer, about: Envelope, beat: Heartbeat) -> None:
        machine = self._machine
        self._send(peer, Envelope(machine.me, machine.incarnation, about.session, 0, beat))

    def ask(self, links: Iterable[Link], now: float) -> None:
        """Ask whoever has not been asked for a while, and forget who is gone."""
        up = [link for link in links if link.state is LinkState.UP]
        known = {link.peer for link in up}
        for peer in self._asked.keys() - known:
            del self._asked[peer]
            self._offsets.pop(peer, None)
        machine = self._machine
        for link in up:
            if now >= self._asked.get(link.peer, -ASK_S) + ASK_S:
                self._asked[link.peer] = now
                beat = Heartbeat(time.monotonic())
                frame = Envelope(machine.me, machine.incarnation, link.session, 0, beat)
                self._send(link.peer, frame)

    def offset(self, peer: Peer, now: float) -> Offset | None:
        """How far a peer's clock is ahead, as sure as that is by now."""
        found = self._offsets.get(peer)
        return found[1].aged(now) if found is not None else None
