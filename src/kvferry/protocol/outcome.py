"""Status, failures and outcome of a room.

``Status`` is ordered so that the ranks of an instance can agree on a room by taking the minimum:
one failed rank fails the room, and it is done when all ranks are.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

MAX_TEXT = 1024


class Status(IntEnum):
    """Progress of a room."""

    FAILED = 0
    CONNECTING = 1
    WAITING = 2
    MOVING = 3
    DONE = 4


class FailureCode(StrEnum):
    """Why a room failed."""

    ABORTED = "aborted"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    PEER_SILENT = "peer-silent"
    PEER_RESTARTED = "peer-restarted"
    PEER_GONE = "peer-gone"
    SESSION_REPLACED = "session-replaced"
    UNKNOWN_ROOM = "unknown-room"
    ROOM_TAKEN = "room-taken"
    TOO_MANY_ROOMS = "too-many-rooms"
    QUARANTINE_FULL = "quarantine-full"
    BAD_OFFER = "bad-offer"
    BAD_NOTE = "bad-note"
    TOKENS_DIFFER = "tokens-differ"
    CONTENT_DIFFERS = "content-differs"
    CONTENT_CORRUPT = "content-corrupt"
    NOT_ALL_PUSHED = "not-all-pushed"
    TRANSPORT = "transport"
    INTERNAL = "internal"


class Failure(msgspec.Struct, frozen=True):
    """A typed reason for routers, with a message for people."""

    code: FailureCode
    message: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""

    @staticmethod
    def of(code: FailureCode, message: str) -> Failure:
        """Return a failure with its message cut to the length that a frame allows."""
        return Failure(code, message[:MAX_TEXT])

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else str(self.code)


class Done(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Everything has arrived. ``metadata`` was sent by the lead source with its Close.

    ``pulled``: the tokens that a pull's room was about; 0 if the source held none.
    """

    metadata: bytes = b""
    pulled: int | None = None


Outcome = Done | Failure
