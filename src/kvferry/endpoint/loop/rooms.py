"""The table of an endpoint's rooms, and the port through which a runner reports their ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from kvferry.endpoint.handles import Handle
from kvferry.errors import InputError, Misuse
from kvferry.ids import MAX_ID, MAX_NAME, Peer, Room
from kvferry.plan.binding_cache import BindingCache
from kvferry.protocol.events import Event, LookUp, Received, Report, Tick
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.telemetry.logs.context import about
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import NO_TAG, StepKind

log = logging.getLogger("kvferry.endpoint")

H = TypeVar("H", bound=Handle)


class RoomId(msgspec.Struct, array_like=True):
    """A room's id as ``msgspec`` checks it: of a struct, it analyses the type only once."""

    room: Room


class RoomTable(Generic[H]):
    """Handles of the rooms whose memory is held, and the bindings of these rooms to their pages."""

    def __init__(self, me: Peer, observer: Observer) -> None:
        self._me = me
        self._observer = observer
        self._handles: dict[Room, H] = {}
        self._lock = threading.Lock()
        # Why no room can be opened any more.
        self._refusal = ""
        # Threads of this endpoint that are overdue, and by how many seconds.
        self.stalled: dict[str, float] = {}
        self.bindings = BindingCache()
        # At a source: lets the engine look up a prefix.
        self.look_up: Callable[[LookUp], None] = unanswered

    # ------------------------------------------------------------ for any thread

    def add(self, handle: H) -> None:
        """Add a room. Raises ``InputError`` for an invalid id, and ``Misuse`` if it is refused."""
        _check_room(handle.room)
        with self._lock:
            if self._refusal:
                raise Misuse(f"room {handle.room!r} can't be opened: {self._refusal}")
            if handle.room in self._handles:
                raise Misuse(f"room {handle.room!r} is open already; use another id")
            self._handles[handle.room] = handle

    def check_unused(self, room: Room) -> None:
        """Raise ``Misuse`` if a room is in the table."""
        _check_room(room)
        if room in self._handles:
            raise Misuse(f"room {room!r} is being received here; abort its handle instead")

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Return the status of each room; None for a room that is not in the table."""
        found = (self._handles.get(room) for room in rooms)
        return [handle.status if handle else None for handle in found]

    def refuse_new(self, reason: str) -> None:
        """Let ``add`` raise from now on."""
        with self._lock:
            self._refusal = self._refusal or reason

    def fail_overdue(self, now: float, reason: str) -> None:
        """Fail rooms that are past their deadline. For the watchdog, when the loop hangs."""
        for handle in list(self._handles.values()):
            if now >= handle.deadline:
                handle.end(Failure.of(FailureCode.INTERNAL, reason))

    # ------------------------------------------------------------ for the loop

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[H]:
        return iter(list(self._handles.values()))

    def get(self, room: Room) -> H | None:
        """Return the handle of a room, if its memory is held."""
        return self._handles.get(room)

    def holds(self, handle: H) -> bool:
        """Return whether this handle is the current one of its room."""
        return self._handles.get(handle.room) is handle

    def report(self, action: Report) -> None:
        """Give a room's outcome to its handle."""
        outcome, handle = action.outcome, self._handles.get(action.room)
        if isinstance(outcome, Failure):
            outcome = with_stalls(outcome, self.stalled)
            self._log(action.room, handle, outcome)
        if handle:
            handle.unusable = action.unusable
            self._observer.room_ended(handle, outcome)
            handle.end(outcome)

    def _log(self, room: Room, handle: H | None, failure: Failure) -> None:
        with about(*(handle.tag if handle else NO_TAG)):
            if failure.code is FailureCode.ABORTED:
                # An engine changed its mind, which is not a fault.
                log.info(
                    "room-aborted endpoint=%s room=%r reason=%r", self._me, room, failure.message
                )
            else:
                log.warning(
                    "room-failed endpoint=%s room=%r code=%s reason=%r",
                    *(self._me, room, failure.code, failure.message),
                )

    def release(self, room: Room) -> None:
        """Remove a room and tell its handle that the memory is free."""
        self.bindings.forget(room)
        handle = self._handles.pop(room, None)
        if handle:
            if handle.failure is not None:
                self._observer.step(room, StepKind.RELEASED)
            handle.release()

    def fail_all(self, reason: str) -> None:
        """Fail all rooms after a bug, and refuse new ones. Releases no memory."""
        self.refuse_new(reason)
        for handle in self:
            handle.end(Failure.of(FailureCode.INTERNAL, reason))

    def refresh(self, event: Event, status: Callable[[Room], Status | None]) -> None:
        """Update the status of the handles that an event may have changed."""
        body = event.envelope.body if isinstance(event, Received) else event
        room = getattr(body, "room", None)
        if room is not None:
            handle = self._handles.get(room)
            # After MOVING comes the end, which is reported.
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


def unanswered(action: LookUp) -> None:
    """Refuse a look-up: only sources have them."""
    raise AssertionError(action)


def with_stalls(failure: Failure, stalled: Mapping[str, float]) -> Failure:
    """Name stalled local threads in a failure, so that a local hang does not blame the peer."""
    if not stalled:
        return failure
    threads = " and ".join(f"the {thread} thread for {s:.0f} s" for thread, s in stalled.items())
    return Failure.of(failure.code, f"{failure.message}; stalled here: {threads}")


def _check_room(room: Room) -> None:
    """Raise ``InputError`` for an id that no frame can carry."""
    try:
        msgspec.convert((room,), RoomId)
        if isinstance(room, str):
            # Python strings may hold lone surrogates, which UTF-8 can't encode.
            room.encode()
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise InputError(
            f"a room's id must be an integer from 0 to {MAX_ID} or a string of 1 to {MAX_NAME} "
            f"characters, not {room!r:.300}"
        ) from None
