"""Messages of an engine's rooms: what the driver tells its ranks, and what they answer.

Commands travel with a step's plan, notes with its answer, both as bytes that the engine passes
on without reading them. Pure.
"""

from __future__ import annotations

import msgspec

from kvferry import Done, Failure, Outcome, RankAgreement, Room
from kvferry.reference.engine.steps import Sample

# ---------------------------------------------------------------- from the driver


class OpenCommand(msgspec.Struct, frozen=True, tag=True):
    """To sources: this request is about to be computed and belongs to that room."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes
    asked_as: str = ""
    traceparent: str = ""


class ReceiveCommand(msgspec.Struct, frozen=True, tag=True):
    """To targets: have this request's cache written into these pages, and no other's."""

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
    """To either: give the request's room up, if it has not ended."""

    request: str


Command = OpenCommand | ReceiveCommand | AbortCommand
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

# ---------------------------------------------------------------- from a rank


class EndedNote(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of the request's room is done, or failed."""

    request: str
    failure: Failure | None = None
    metadata: bytes = b""

    @staticmethod
    def of(request: str, outcome: Outcome) -> EndedNote:
        """The end of a request's room, as its handle has it."""
        if isinstance(outcome, Failure):
            return EndedNote(request, outcome)
        return EndedNote(request, metadata=outcome.metadata)

    @property
    def outcome(self) -> Outcome:
        """As an agreement takes it."""
        return self.failure or Done(self.metadata)


class ReleasedNote(msgspec.Struct, frozen=True, tag=True):
    """No transfer touches the rank's pages of the request any more.

    ``moved`` are the bytes that the rank has written for it by each mode, ``carried``
    those of all rooms since it started, ``links`` the transport to each of its peers.
    """

    request: str
    moved: dict[str, int] = {}
    carried: dict[str, int] = {}
    links: dict[str, str] = {}


Note = EndedNote | ReleasedNote
_NOTES: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


class FirstTokenNote(msgspec.Struct, frozen=True):
    """What the lead source adds to a room: the first token, and who can say how it went.

    ``life`` is that of the worker at ``http``, which takes signed questions for it alone.
    """

    sample: Sample
    http: str = ""
    life: str = ""


def encode(message: Command | Note | FirstTokenNote) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(message)


def decode_note(note: bytes) -> Note:
    """A rank's note, on the driver."""
    return _NOTES.decode(note)


def decode_command(command: bytes) -> Command:
    """What the driver says, on a rank."""
    return _COMMANDS.decode(command)


def take_note(agreement: RankAgreement, rank: int, note: Note) -> None:
    """A rank has spoken of a room."""
    if isinstance(note, ReleasedNote):
        agreement.release(rank, note.moved)
    else:
        agreement.end(rank, note.outcome)
