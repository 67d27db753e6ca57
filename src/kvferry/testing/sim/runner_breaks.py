"""Drivers and their parts that break a rule (``breaks`` has the list)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.endpoint.runner.runner import (
    MachineRunner,
    SourcePorts,
    SourceRunner,
    TargetRunner,
)
from kvferry.endpoint.runner.sessions import SessionRecord, Sessions
from kvferry.ids import Op, Peer
from kvferry.protocol.events import Action, Event, OwnStall, SendFailed, Sent, Write, WriteFate
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.target import TargetMachine

# ---------------------------------------------------------------- the book of sessions


class ForgetsDoubt(Sessions):
    """Takes a write of unknown fate for one that has ended."""

    def end(self, op: Op, *, doubtful: bool) -> SessionRecord | None:  # noqa: D102
        return super().end(op, doubtful=False)


class BuriesTheLiving(Sessions):
    """Takes the end of one life of a peer for the end of all."""

    def confirm_dead(self, peer: Peer, incarnation: int) -> list[SessionRecord]:  # noqa: D102
        lives = {one.incarnation for one in self.records() if one.peer == peer}
        confirm_dead = super().confirm_dead
        return [one for life in lives | {incarnation} for one in confirm_dead(peer, life)]


class ProvesTooEarly(Sessions):
    """Calls a session that was given up quiet with writes still in flight."""

    def settle(self) -> tuple[list[SessionRecord], list[SessionRecord]]:  # noqa: D102
        for record in self.ending.values():
            record.in_flight.clear()
        return super().settle()


# ---------------------------------------------------------------- ports


class Through:
    """A port that hands everything on to the real one."""

    def __init__(self, port: Any) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class _AsksNobody(Through):
    def start_probing(self, record: SessionRecord) -> None:
        """Give a session up and never ask whether its peer is gone."""


def asks_nobody(ports: Any) -> Any:
    """Nobody asks after lost peers."""
    return ports._replace(peers=_AsksNobody(ports.peers))


class _NotesFirst(Through):
    def __init__(self, ports: SourcePorts) -> None:
        super().__init__(ports.data)
        self._control = ports.control

    def write(self, action: Write) -> None:
        """Send a write's note when it is asked for, and not when it has landed."""
        self._control.send(action.transfer.peer, action.note)
        self.port.write(action)


def notes_first(ports: Any) -> Any:
    """A source's notes overtake their data."""
    return ports._replace(data=_NotesFirst(ports)) if isinstance(ports, SourcePorts) else ports


# ---------------------------------------------------------------- runners


class _LeavesInTheMiddle(MachineRunner[Any, Any]):
    """Tells others of its end although its memory is not free."""

    @property
    def holds_no_memory(self) -> bool:
        """At any time."""
        return True


class SourceLeavesInTheMiddle(_LeavesInTheMiddle, SourceRunner):
    """A source that does."""


class TargetLeavesInTheMiddle(_LeavesInTheMiddle, TargetRunner):
    """A target that does."""


class _TakesTimeFirst(MachineRunner[Any, Any]):
    """Looks at the clock before it reads what has come."""

    def turn(self, arrived: Iterable[Event], now: float) -> None:
        """Time, then frames."""
        self.advance_time(now)
        super().turn(arrived, now)


class SourceTakesTimeFirst(_TakesTimeFirst, SourceRunner):
    """A source that does."""


class TargetTakesTimeFirst(_TakesTimeFirst, TargetRunner):
    """A target that does."""


class _Oversleeps(MachineRunner[Any, Any]):
    """Wakes up half a second late."""

    def wakeup(self) -> float:
        """Later than anything is due."""
        return super().wakeup() + 0.5


class SourceOversleeps(_Oversleeps, SourceRunner):
    """A source that does."""


class TargetOversleeps(_Oversleeps, TargetRunner):
    """A target that does."""


class SuspectsTheBusy(SourceRunner):
    """Takes a full transport for the sign of a death."""

    def take(self, event: Event, now: float) -> None:
        """Ask after everybody when a write was not submitted."""
        super().take(event, now)
        if isinstance(event, SendFailed) and event.fate is WriteFate.BUSY:
            self.probe_links()


# ---------------------------------------------------------------- what machines are told


class KeepsAnEnd(SourceMachine):
    """Is not told of every tenth write that has ended."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        if isinstance(event, Sent) and event.op % 10 == 0:
            return []
        return super().handle(event, now)


class SourceCountsOwnSleep(SourceMachine):
    """Calls targets silent for the time in which it did not run itself."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        return [] if isinstance(event, OwnStall) else super().handle(event, now)


class TargetCountsOwnSleep(TargetMachine):
    """Calls sources silent for the time in which it did not run itself."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        return [] if isinstance(event, OwnStall) else super().handle(event, now)
