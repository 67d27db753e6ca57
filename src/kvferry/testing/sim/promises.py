"""Promises about time that a node must keep, checked after each of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvferry.ids import Peer, Room, Session
from kvferry.protocol.events import Event, Received
from kvferry.protocol.outcome import Failure

if TYPE_CHECKING:
    from kvferry.testing.sim.nodes import Node

NOBODY = Peer("nobody", 0)


class Promises:
    """Frames that a node has heard or left unread, and the promises that rest on them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self.taking: Event | None = None
        self._unread: Counter[Peer] = Counter()
        # How long the process had run when it last heard from each peer, and when that was.
        self._heard_after: dict[Peer, tuple[float, float]] = {}
        # The highest sequence number of each session, newest session of a peer last.
        self._highest: dict[Peer, dict[Session, int]] = {}

    def came(self, event: Event) -> None:
        """An event waits for a process that is stopped."""
        self._unread[_sender(event)] += 1

    def reading(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same events, kept in mind while the node takes them."""
        for event in events:
            self._world.remember(self._node.peer, "<", event)
            if self._is_news(event):
                self._heard_after[_sender(event)] = self._node.process.ran_s, self._world.now
            self.taking = event
            yield event
            self._unread[_sender(event)] -= 1
            self.taking = None

    def _is_news(self, event: Event) -> bool:
        """Return whether a frame shows that its sender lives.

        A replayed or overtaken frame does not: it may be older than the sender's death.
        """
        if not isinstance(event, Received):
            return True
        envelope = event.envelope
        highest = self._highest.setdefault(envelope.sender, {})
        if envelope.session in highest and envelope.session != next(reversed(highest)):
            return False
        before = highest.setdefault(envelope.session, 0)
        highest[envelope.session] = max(before, envelope.seq)
        return envelope.seq == 0 or envelope.seq > before

    def caught_up(self) -> None:
        """Nothing is unread."""
        self._unread.clear()

    def check(self) -> None:
        """Check the promises after a step."""
        self._node.machine.check()
        self._check_deadlines()
        self._check_sleep()

    def _check_deadlines(self) -> None:
        """A process that was stopped learns the time with its next turn, like any other."""
        node = self._node
        for room, due in node.due.items():
            if self._world.now > due + 3e-3 and room not in node.outcomes:
                self._world.violate("never hangs", f"{node.peer} is past its deadline", room)

    def _check_sleep(self) -> None:
        """Nothing else wakes a runner that sleeps past a timer of its machine."""
        node = self._node
        wakeup = node.machine.wakeup()
        if wakeup is not None:
            late = node.runner.wakeup() - max(wakeup, self._world.now)
            if late > node.machine.config.resend_s / 4 + 1e-9:
                self._world.violate("never hangs", f"{node.peer} sleeps past its machine's timer")

    def demand_silence(self, room: Room, failure: Failure) -> None:
        """Silence counts only once all words are read, and only while this process runs."""
        node, words = self._node, failure.message.split()
        for peer, count in self._unread.items():
            if count > 0 and str(peer) in words:
                text = f"{node.peer} takes {peer} for silent with its words unread"
                self._world.violate("never hangs", text, room)
        times = node.machine.config
        # A process can't tell when it was stopped between two heartbeats.
        limit_s = times.silence_s - times.heartbeat_s
        for peer, (ran_s, heard_at) in self._heard_after.items():
            if str(peer) not in words or node.machine.current.get(peer) is not None:
                continue  # another one's judgement
            silent_s = node.process.ran_s - ran_s
            if silent_s < limit_s <= self._world.now - heard_at:
                text = f"{node.peer} takes {peer} for silent after running for {silent_s:.2f} s"
                self._world.violate("never hangs", text, room)


def _sender(event: Event) -> Peer:
    return event.envelope.sender if isinstance(event, Received) else NOBODY
