"""A worker's requests while they are on: what was asked, who listens, where it stands.

A ``ServeJob`` is made by whoever asks and belongs to the engine's thread from then on.
What becomes of it is told through ``tell``: pieces, the last of which has a
``finish``, or one ``JobFailed``. After that nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry import MAX_NAME, RankAgreement, Room
from kvferry.reference.engine.requests import EngineRequest, FinishReason
from kvferry.reference.engine.steps import Sample


class Fallback(StrEnum):
    """What decode does when a transfer fails: say so, or compute the prompt itself."""

    FAIL = auto()
    LOCAL = auto()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The field ``kvferry`` of a body: the room that a request's cache travels in.

    ``prefill`` names the instance that sends it; a prefill worker has no use for it.
    """

    room: Room
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    prefill: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None
    fallback: Fallback = Fallback.FAIL


class Origin(StrEnum):
    """Where the cache of a prompt came from."""

    TRANSFERRED = auto()
    RECOMPUTED = auto()


class TransferAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request's transfer, for its caller.

    ``room`` is None where the prompt was computed here without trying another way. Of
    decode: ``prefix`` tokens were there, ``num_bytes`` came by ``mode``, ``seconds``
    after the pages were offered. Of prefill, which does not wait for the transfer: the
    ``num_bytes`` of the whole prompt's cache, the ``prefix`` that was not computed and
    the ``chunks`` that were, in ``seconds``.
    """

    room: Room | None
    source: Origin | None = None
    mode: str | None = None
    prefix: int = 0
    num_bytes: int | None = msgspec.field(default=None, name="bytes")
    chunks: int | None = None
    seconds: float | None = None


class Trouble(StrEnum):
    """Why a job has no answer.

    ENDED: the worker ends, and this job has nothing to do with it. LOST: a rank was lost in a
    step that ran this job, for an unknown reason. BROKE_WORKER: a step that ran this job raised
    an exception. SAMPLING: no token could be chosen for this job; the worker goes on.
    """

    INVALID = auto()
    TRANSFER = auto()
    TIMEOUT = auto()
    ENDED = auto()
    LOST = auto()
    BROKE_WORKER = auto()
    SAMPLING = auto()


class RoomEnd(msgspec.Struct, frozen=True):
    """How a room ended here: why it failed, if it did, and what was written for it.

    ``mode`` names all that were taken, the one that carried most first (``staged+slices``).
    """

    room: Room
    failure: str | None = None
    mode: str | None = None
    num_bytes: int = msgspec.field(default=0, name="bytes")


class AnswerPiece(msgspec.Struct, frozen=True):
    """A token of the answer and the text that it brings; the last one has a ``finish``.

    ``prefill`` is where a ``RoomEnd`` of the transfer can be had, the URL of a worker and
    its life: only sources know by which mode they wrote.
    """

    sample: Sample
    text: str
    finish: FinishReason | None = None
    report: TransferAccount | None = None
    prefill: tuple[str, str] | None = None


class JobFailed(msgspec.Struct, frozen=True):
    """There is no answer, or no more of it."""

    trouble: Trouble
    message: str


Tell = Callable[[AnswerPiece | JobFailed], None]


@dataclass(slots=True, eq=False)
class ServeJob:
    """One request in the engine's hands.

    ``agreement`` is there while ranks have a room of it. ``answered``: nobody waits
    for anything more. ``over``: nothing is left to do, not even to release.
    """

    request: EngineRequest
    ticket: Ticket | None
    tell: Tell
    begun_at: float
    deadline: float
    transfer_deadline: float
    admitted_at: float | None = None
    agreement: RankAgreement | None = None
    aborted: bool = False
    recomputed: bool = False
    answered: bool = False
    over: bool = False
    prefix: int = 0
    chunks: int = 0
    report: TransferAccount | None = None
    # Whose it is, for logs and stories: the caller's id of the request, and its trace.
    asked_as: str = ""
    traceparent: str = ""

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    def say(self, piece: AnswerPiece) -> None:
        """Pass a piece of the answer on, unless nobody wants it."""
        if not self.answered:
            self.answered = piece.finish is not None
            self.tell(piece)

    def fail(self, trouble: Trouble, message: str) -> None:
        """Say that no answer comes, unless nobody wants it."""
        if not self.answered:
            self.answered = True
            self.tell(JobFailed(trouble, message))
