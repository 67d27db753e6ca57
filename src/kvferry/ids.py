"""Distinct types for the ids that would otherwise all be integers and strings."""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec

MAX_NAME = 256
MAX_ID = (1 << 63) - 1

# Id of one request's transfer, chosen by the caller and equal on both sides.
Room = (
    Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
)

# Number of a target's attempt at a room; tells two attempts at one room apart.
Generation = NewType("Generation", int)

# Number of a credit, counted per source and room.
Serial = NewType("Serial", int)

# Index of a slot in a staging pool.
SlotIndex = NewType("SlotIndex", int)

# Number of a write or scatter, counted by the machine that started it.
Op = NewType("Op", int)

# Number of a ``Choose`` action, counted by the source machine.
Ticket = NewType("Ticket", int)


class Peer(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One rank of one instance. Each data-parallel replica is its own instance."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]

    def __repr__(self) -> str:
        return f"{self.instance}/{self.rank}"


Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


class Session(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Id of one handshake: the incarnation of each side and a counter of each side.

    The source's half (``source``, ``answer``) is 0 in a Hello and is filled in by the Welcome.
    A delayed frame of an earlier session, or of an earlier incarnation, therefore never
    matches the current session.
    """

    target: Id
    number: Id
    source: Id = 0
    answer: Id = 0

    @property
    def greeting(self) -> Session:
        """The session id as the Hello carried it, without the source's half."""
        return Session(self.target, self.number)

    def __repr__(self) -> str:
        return f"{self.target:x}.{self.number}-{self.source:x}.{self.answer}"
