"""Names for things that would otherwise all be integers and strings."""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec

MAX_NAME = 256
MAX_ID = (1 << 63) - 1

# The id that both sides were given for one request's transfer.
Room = (
    Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
)

# Counts a target's offers, so that two attempts at one room can be told apart.
Generation = NewType("Generation", int)

# Counts the credits that one source was granted for one room.
Serial = NewType("Serial", int)

# A place in a staging pool.
SlotIndex = NewType("SlotIndex", int)

# One write or one scatter, counted by the endpoint that asked for it.
Op = NewType("Op", int)

# One question about transfer modes, counted by the source that asks.
Ticket = NewType("Ticket", int)


class Peer(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One rank of one instance. A data-parallel replica is an instance of its own."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]

    def __repr__(self) -> str:
        return f"{self.instance}/{self.rank}"


Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


class Session(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One handshake: both incarnations, and a count by each side.

    The source's half is 0 in a Hello, because only its answer can name it. A
    frame of an earlier session therefore never passes for one of this session,
    whatever was delayed, and whoever has restarted since.
    """

    target: Id
    number: Id
    source: Id = 0
    answer: Id = 0

    @property
    def greeting(self) -> Session:
        """The session as the Hello named it."""
        return Session(self.target, self.number)

    def __repr__(self) -> str:
        return f"{self.target:x}.{self.number}-{self.source:x}.{self.answer}"
