"""Messages between an engine's driver and its ranks about rooms.

Commands travel with a step's plan and notes with its results, both as bytes that the engine
does not read.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry import Done, Failure, Outcome, RankAgreement, Room
from kvferry.reference.engine.requests import Sample


class OpenCommand(msgspec.Struct, frozen=True, tag=True):
    """To sources: this request, about to be computed, belongs to that room."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes
    asked_as: str = ""
    traceparent: str = ""


class ReceiveCommand(msgspec.Struct, frozen=True, tag=True):
    """To targets: receive this request's cache into these pages."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes
    prefill: str
    tokens: int
    prefix: int
    pages: list[int]
    row: int | None
    asked_as: str = ""
    traceparent: str = ""


class AbortCommand(msgspec.Struct, frozen=True, tag=True):
    """To either side: abort the request's room if it has not ended."""

    request: str


class EndedNote(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its part of the request's room is done, or failed."""

    request: str
    failure: Failure | None = None
    metadata: bytes = b""

    @staticmethod
    def of(request: str, outcome: Outcome) -> EndedNote:
        """Return the note of a handle's outcome."""
        if isinstance(outcome, Failure):
            return EndedNote(request, outcome)
        return EndedNote(request, metadata=outcome.metadata)


class ReleasedNote(msgspec.Struct, frozen=True, tag=True):
    """From a rank: no transfer touches its pages of the request any more.

    ``moved`` are the bytes that the rank has written for the room by mode, ``carried`` those
    of all rooms so far, ``links`` the transport to each of its peers.
    """

    request: str
    moved: dict[str, int] = {}
    carried: dict[str, int] = {}
    links: dict[str, str] = {}


class FirstTokenNote(msgspec.Struct, frozen=True):
    """Metadata of a room: the first token, and the worker that knows how the room was written.

    ``life`` is the life of the worker at ``http`` for which questions to it are signed.
    """

    sample: Sample
    http: str = ""
    life: str = ""


Command = OpenCommand | ReceiveCommand | AbortCommand
Note = EndedNote | ReleasedNote
# A message as it travels, and back.
encode: Callable[[Command | Note | FirstTokenNote], bytes] = msgspec.msgpack.encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_note: Callable[[bytes], Note] = msgspec.msgpack.Decoder(Note).decode


def take_note(agreement: RankAgreement, rank: int, note: Note) -> None:
    """Add a rank's note to the agreement of its instance."""
    if isinstance(note, ReleasedNote):
        agreement.release(rank, note.moved)
    else:
        agreement.end(rank, note.failure or Done(note.metadata))
