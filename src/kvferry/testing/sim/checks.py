"""Checks of a node: its promises about time after each step, and its tables at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvferry.endpoint.runner.runner import MIN_STALL
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.events import Event, Received
from kvferry.protocol.outcome import Failure
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine

if TYPE_CHECKING:
    from kvferry.testing.sim.nodes import Node

NOBODY = Peer("nobody", 0)


class NodeChecks:
    """The frames that a node has received and not yet handled, with the checks that need them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self.current_event: Event | None = None
        self._unread: Counter[Peer] = Counter()
        # For each peer: how long this process had run when it last heard from it, and the time.
        self._last_heard: dict[Peer, tuple[float, float]] = {}
        # The highest sequence number of each session, a peer's newest session last.
        self._highest: dict[Peer, dict[Session, int]] = {}

    def add_unread(self, event: Event) -> None:
        """Count an event that waits because the process is stopped."""
        self._unread[_sender(event)] += 1

    def clear_unread(self) -> None:
        """Forget the unread events: the node has caught up."""
        self._unread.clear()

    def track(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, and record each while the node handles it."""
        for event in events:
            self._world.record(self._node.peer, "<", event)
            if self._shows_life(event):
                self._last_heard[_sender(event)] = self._node.process.ran_s, self._world.now
            self.current_event = event
            yield event
            self._unread[_sender(event)] -= 1
            self.current_event = None

    def _shows_life(self, event: Event) -> bool:
        """Return whether a frame shows that its sender is alive.

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

    def check(self) -> None:
        """Check the machine's invariants, the deadlines of rooms and the runner's wakeup."""
        node, now = self._node, self._world.now
        node.machine.check()
        for room, due in node.due.items():
            if now > due + 3e-3 and room not in node.outcomes:
                self._world.violate("never hangs", f"{node.peer} is past its deadline", room)
        wakeup = node.machine.wakeup()
        if wakeup is not None:
            late = node.runner.wakeup() - max(wakeup, now)
            if late > node.machine.config.resend_s / 4 + 1e-9:
                self._world.violate("never hangs", f"{node.peer} sleeps past its machine's timer")

    def check_silence(self, room: Room, failure: Failure) -> None:
        """Check a room that failed because a peer was silent.

        A peer is silent only if all its frames are handled, and only for the time in which
        this process ran.
        """
        node, words = self._node, failure.message.split()
        for peer, count in self._unread.items():
            if count > 0 and str(peer) in words:
                text = f"{node.peer} calls {peer} silent with its frames unread"
                self._world.violate("never hangs", text, room)
        times = node.machine.config
        # A process cannot tell that it was stopped between two heartbeats, and does not report
        # less than ``MIN_STALL``.
        limit_s = times.silence_s - times.heartbeat_s * (1 + MIN_STALL)
        for peer, (ran_s, heard_at) in self._last_heard.items():
            if str(peer) not in words or node.machine.peers.current.get(peer) is not None:
                continue  # The failure is about another peer, or another session.
            silent_s = node.process.ran_s - ran_s
            if silent_s < limit_s <= self._world.now - heard_at:
                text = f"{node.peer} calls {peer} silent after running for {silent_s:.2f} s"
                self._world.violate("never hangs", text, room)

    def table_sizes(self) -> dict[str, int]:
        """Return the sizes of tables that must be empty when nothing is in progress."""
        runner = self._node.runner
        return table_sizes(runner.machine) | {
            "writes in flight": len(runner.sessions.by_op),
            "dead sessions": len(runner.sessions.records) - len(runner.machine.links),
            "probes": len(self._node.peers.probes),
        }


def table_sizes(machine: SourceMachine | TargetMachine) -> dict[str, int]:
    """Return the sizes of a machine's tables that must be empty when nothing is in progress."""
    sizes = {
        "rooms": len(machine.rooms),
        "lost links": sum(link.state is LinkState.LOST for link in machine.links.values()),
    }
    if isinstance(machine, SourceMachine):
        return sizes | {
            "asked rooms": len(machine.asks.rooms),
            "writes": len(machine.inflight.writes),
            "proofs": len(machine.proofs.under_way),
            "undecided": len(machine.writes.undecided),
            "local slots in use": machine.config.local_slots - len(machine.inflight.slots),
        }
    return sizes | {
        "scatters": len(machine.scatters.under_way),
        "accounts": len(machine.credits.accounts),
        "proofs": len(machine.proofs.under_way),
        "declines": len(machine.declines.waiting),
        "slots in use": machine.staging.num_slots - len(machine.credits.free),
    }


def _sender(event: Event) -> Peer:
    return event.envelope.sender if isinstance(event, Received) else NOBODY
