"""The rooms that an engine's ranks have open.

A room follows what all ranks agree on: one failure aborts it on the others, and its pages may be
used otherwise once every rank has released them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvferry import Failure, RankAgreement, TransferMode
from kvferry.reference.engine.requests import Noted
from kvferry.reference.transfer.extensions import (
    AbortCommand,
    EndedNote,
    OfferedNote,
    ReleasedNote,
    RoomCommand,
    decode_note,
    encode,
)


@dataclass(slots=True, eq=False)
class EngineRoom:
    """A room of every rank, and what to do about it: each at most once, ``failed`` first.

    ``offered``: the other side has pages for it. ``released``: no rank touches its pages any more.
    """

    agreement: RankAgreement
    failed: Callable[[Failure], None]
    released: Callable[[RankAgreement], None]
    offered: Callable[[], None] | None = None


class EngineRooms:
    """All rooms of an engine, by the name that its commands give them.

    ``post`` sends a command to every rank with the next step. Belongs to the service's event loop.
    """

    def __init__(self, num_ranks: int, post: Callable[[bytes], None]) -> None:
        self._num_ranks = num_ranks
        self._post = post
        self._open: dict[str, EngineRoom] = {}
        # Bytes sent in rooms that have ended, by transfer mode.
        self.carried = Counter(dict.fromkeys(map(str, TransferMode), 0))

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def open(
        self,
        command: RoomCommand,
        failed: Callable[[Failure], None],
        released: Callable[[RankAgreement], None],
        offered: Callable[[], None] | None = None,
    ) -> None:
        """Open a room at every rank."""
        agreement = RankAgreement(self._num_ranks)
        self._open[command.request] = EngineRoom(agreement, failed, released, offered)
        self._post(encode(command))

    def abort(self, name: str) -> None:
        """Fail a room at every rank where it has not ended."""
        self._post(encode(AbortCommand(name)))

    def take(self, noted: Noted) -> None:
        """Take a rank's note about its part of a room."""
        note = decode_note(noted.note)
        room = self._open.get(note.request)
        if room is None:
            return
        match note:
            case OfferedNote():
                # Other ranks' offers change nothing.
                if room.offered is not None:
                    offered, room.offered = room.offered, None
                    offered()
            case EndedNote():
                had_failed = room.agreement.failure is not None
                room.agreement.end(noted.rank, note.outcome)
                failure = room.agreement.failure
                if failure is not None and not had_failed:
                    # One rank's failure is that of all.
                    self.abort(note.request)
                    room.failed(failure)
            case ReleasedNote():
                room.agreement.release(noted.rank, note.carried)
                if room.agreement.is_released:
                    del self._open[note.request]
                    self.carried.update(room.agreement.carried)
                    room.released(room.agreement)
