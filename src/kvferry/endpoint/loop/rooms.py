"""The rooms of an endpoint: handles by room, and what callers are told of them.

To a runner, the port that hears how rooms end. ``add`` and ``statuses`` are for any
thread, everything else for the owner's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from kvferry.endpoint.handles import Handle
from kvferry.errors import InputError, Misuse
from kvferry.ids import MAX_ID, MAX_NAME, Peer, Room
from kvferry.protocol.events import Event, Received, Tick
from kvferry.protocol.outcome import Failure, FailureCode, Outcome, Status
from kvferry.telemetry.logs.context import about
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import StepKind
from kvferry.telemetry.tags import NO_TAG

log = logging.getLogger("kvferry.endpoint")

H = TypeVar("H", bound=Handle)


class RoomTable(Generic[H]):
    """Every room whose memory is held, and why there may be no more."""

    def __init__(self, me: Peer, observer: Observer) -> None:
        self._me = me
        self._observer = observer
        self._handles: dict[Room, H] = {}
        self._lock = threading.Lock()
        # Why no room can begin.
        self._shut = ""
        # Threads of ours that show no life, and for how long.
        self.stalled: dict[str, float] = {}

    # ------------------------------------------------------------ for any thread

    def add(self, handle: H) -> None:
        """Take a room on. Raises ``Misuse``, and ``InputError`` for what is no room's id."""
        _demand_room(handle.room)
        with self._lock:
            if self._shut:
                raise Misuse(f"room {handle.room!r} can't begin: {self._shut}")
            if handle.room in self._handles:
                raise Misuse(f"room {handle.room!r} is open already; use another id")
            self._handles[handle.room] = handle

    def demand_unknown(self, room: Room) -> None:
        """Raise ``Misuse`` if a room's memory is held here."""
        _demand_room(room)
        if room in self._handles:
            raise Misuse(f"room {room!r} is being received here; abort its handle instead")

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Where rooms stand; None for those whose memory was released long ago."""
        found = (self._handles.get(room) for room in rooms)
        return [handle.status if handle else None for handle in found]

    def shut(self, why: str) -> None:
        """No more rooms."""
        with self._lock:
            self._shut = self._shut or why

    def end_overdue(self, now: float, why: str) -> None:
        """Nobody waits longer than a deadline, not even for an owner that hangs."""
        for handle in list(self._handles.values()):
            if now >= handle.deadline:
                handle.end(Failure.of(FailureCode.INTERNAL, why))

    # ------------------------------------------------------------ for the owner

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[H]:
        return iter(list(self._handles.values()))

    def get(self, room: Room) -> H | None:
        """A room whose memory is held."""
        return self._handles.get(room)

    def holds(self, handle: H) -> bool:
        """Whether the handle is the one of its room."""
        return self._handles.get(handle.room) is handle

    def report(self, room: Room, outcome: Outcome) -> None:
        """A room has ended for its caller."""
        if isinstance(outcome, Failure):
            outcome = with_stalls(outcome, self.stalled)
            self._log(room, outcome)
        handle = self._handles.get(room)
        if handle:
            self._observer.room_ended(handle, outcome)
            handle.end(outcome)

    def _log(self, room: Room, failure: Failure) -> None:
        handle = self._handles.get(room)
        with about(*(handle.tag if handle else NO_TAG)):
            if failure.code is FailureCode.ABORTED:
                # Somebody has changed their mind, which is nobody's fault.
                log.info(
                    "room-aborted endpoint=%s room=%r reason=%r", self._me, room, failure.message
                )
            else:
                log.warning(
                    "room-failed endpoint=%s room=%r code=%s reason=%r",
                    *(self._me, room, failure.code, failure.message),
                )

    def release(self, room: Room) -> None:
        """A room's memory is the caller's again."""
        handle = self._handles.pop(room, None)
        if handle:
            if handle.failure is not None:
                self._observer.step(room, StepKind.RELEASED)
            handle.release()

    def break_all(self, why: str) -> None:
        """A bug of ours: nobody may wait for ever because of it. No memory is released."""
        self.shut(why)
        for handle in self:
            handle.end(Failure.of(FailureCode.INTERNAL, why))

    def refresh(self, event: Event, status: Callable[[Room], Status | None]) -> None:
        """Bring the handles of the rooms that a step was about up to date."""
        body = event.envelope.body if isinstance(event, Received) else event
        room = getattr(body, "room", None)
        if room is not None:
            handle = self._handles.get(room)
            # One that moves goes on to its end, which is reported.
            if handle is not None and handle.status is not Status.MOVING:
                self._refresh(handle, status)
        elif isinstance(event, Received | Tick):
            # About a peer, so about many rooms.
            for handle in self:
                self._refresh(handle, status)

    def _refresh(self, handle: H, status: Callable[[Room], Status | None]) -> None:
        if handle.outcome is None:
            now = status(handle.room)
            handle.status = handle.status if now is None else now


def with_stalls(failure: Failure, stalled: Mapping[str, float]) -> Failure:
    """A hang of ours must not look like a slow peer."""
    if not stalled:
        return failure
    ours = " and ".join(f"the {thread} thread for {s:.0f} s" for thread, s in stalled.items())
    return Failure.of(failure.code, f"{failure.message}; no life here of {ours}")


def _demand_room(room: Room) -> None:
    """What no frame could carry would never be answered."""
    try:
        msgspec.convert(room, Room)
        if isinstance(room, str):
            # Half a surrogate is a character to Python and nothing to any encoding.
            room.encode()
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise InputError(
            f"a room's id is a whole number from 0 to {MAX_ID} or 1 to {MAX_NAME} characters, "
            f"not {room!r:.300}"
        ) from None
