"""Drivers that break a rule. The simulator must notice each of them (``breaks`` has the list)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.ids import Op, Session
from kvferry.protocol.events import Event, Fate, Send, SendFailed, Sent, Write
from kvferry.runtime.driver.driver import Driver, PeerGone
from kvferry.runtime.driver.sessions import Record


class ForgetsDoubt(Driver[Any]):
    """Takes a write of unknown fate for one that has ended."""

    def _end(self, op: Op, fate: Fate | None) -> Record | None:
        return super()._end(op, Fate.FAILED if fate is Fate.UNKNOWN else fate)


class BuriesTheLiving(Driver[Any]):
    """Takes the end of one life of a peer for the end of all."""

    def _bury(self, event: PeerGone) -> None:
        lives = {
            link.incarnation for link in self.machine.links.values() if link.peer == event.peer
        }
        for incarnation in lives | {event.incarnation}:
            super()._bury(PeerGone(event.peer, incarnation))


class LeavesInTheMiddle(Driver[Any]):
    """Tells others of its end although its memory is not free."""

    @property
    def may_leave(self) -> bool:
        """At any time."""
        return True


class TakesTimeFirst(Driver[Any]):
    """Looks at the clock before it reads what has come."""

    def turn(self, arrived: Iterable[Event], now: float) -> None:
        """Time, then frames."""
        self.pass_time(now)
        super().turn(arrived, now)


class CountsOwnSleep(Driver[Any]):
    """Calls peers silent for the time in which it did not run itself."""

    def _count_stall(self, now: float) -> None:
        pass


class AsksNobody(Driver[Any]):
    """Gives a session up and never asks whether its peer is gone."""

    def _disconnect(self, session: Session) -> None:
        if self.sessions.cut(session) is not None:
            self.ports.data.cut(session)


class SuspectsTheBusy(Driver[Any]):
    """Takes a full transport for the sign of a death."""

    def _step(self, event: Event, now: float) -> None:
        record = self.sessions.flying(event.op) if isinstance(event, SendFailed) else None
        super()._step(event, now)
        if record is not None:
            self._sign(record)


class KeepsAnEnd(Driver[Any]):
    """Does not tell the machine of every tenth write that has ended."""

    def _handle(self, event: Event, now: float) -> None:
        if not isinstance(event, Sent) or event.op % 10:
            super()._handle(event, now)


class NotesFirst(Driver[Any]):
    """Sends a write's note when it is asked for, and not when it has landed."""

    def _write(self, action: Write) -> None:
        self._frames.append(Send(action.peer, action.note))
        super()._write(action)


class ProvesTooEarly(Driver[Any]):
    """Calls a session that was given up quiet with writes still in flight."""

    def _settle(self) -> None:
        for record in self.sessions.ending():
            record.flying.clear()
        super()._settle()


class Oversleeps(Driver[Any]):
    """Sleeps until what was due when it last ticked."""

    def _handle(self, event: Event, now: float) -> None:
        planned = self._tick_at
        super()._handle(event, now)
        self._tick_at = max(self._tick_at, min(planned, now + 1.0))
