"""Jobs of a worker: a request, who waits for its answer, and its state.

A ``ServeJob`` belongs to the engine's thread. It reports through ``tell``: pieces, the last of
which has a ``finish``, or one ``JobFailed``; nothing after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry import MAX_NAME, RankAgreement, Room
from kvferry.reference.engine.requests import EngineRequest, FinishReason, Sample


class Fallback(StrEnum):
    """What decode does when a transfer fails: report it, or compute the prompt itself."""

    FAIL = auto()
    LOCAL = auto()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The field ``kvferry`` of a request's body: the room in which its cache travels.

    ``prefill`` names the source instance; only decode reads it.
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
    """What the caller is told about a request's transfer.

    Decode: ``prefix`` tokens were cached, ``num_bytes`` came by ``mode`` within ``seconds``
    after the pages were offered; ``room`` is None if no transfer was tried. Prefill, which
    does not wait for the transfer: the ``num_bytes`` of the prompt's whole cache, the
    ``prefix`` that was cached, and the ``chunks`` computed in ``seconds``.
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

    ENDED: the worker ends, unrelated to this job. LOST: a rank was lost in a step that ran
    this job. BROKE_WORKER: a step that ran this job raised an exception. SAMPLING: no token
    could be chosen for this job; the worker goes on.
    """

    INVALID = auto()
    TRANSFER = auto()
    TIMEOUT = auto()
    ENDED = auto()
    LOST = auto()
    BROKE_WORKER = auto()
    SAMPLING = auto()


class RoomEnd(msgspec.Struct, frozen=True):
    """How a room ended on a prefill worker.

    ``mode`` names all transfer modes used, the one with most bytes first (``staged+slices``).
    """

    room: Room
    failure: str | None = None
    mode: str | None = None
    num_bytes: int = msgspec.field(default=0, name="bytes")


class AnswerPiece(msgspec.Struct, frozen=True):
    """A token of the answer and its text; the last piece has a ``finish``.

    ``prefill`` is the URL and the life of the worker that knows the room's ``RoomEnd``.
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


@dataclass(slots=True, eq=False)
class ServeJob:
    """One request in the engine's hands.

    ``agreement`` is set while ranks have a room of it. ``answered``: nobody waits for more.
    ``over``: nothing is left to do, not even to release. ``asked_as`` and ``traceparent`` are
    the caller's request id and trace.
    """

    request: EngineRequest
    ticket: Ticket | None
    tell: Callable[[AnswerPiece | JobFailed], None]
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
    asked_as: str = ""
    traceparent: str = ""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    def say(self, piece: AnswerPiece) -> None:
        """Pass on a piece of the answer, unless nobody waits for it."""
        if not self.answered:
            self.answered = piece.finish is not None
            self.tell(piece)

    def fail(self, trouble: Trouble, message: str) -> None:
        """Report that no answer comes, unless nobody waits for it."""
        if not self.answered:
            self.answered = True
            self.tell(JobFailed(trouble, message))
