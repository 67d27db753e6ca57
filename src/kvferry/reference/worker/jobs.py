"""Jobs of a worker: a request, its state, and the answer that its caller waits for.

A ``ServeJob`` belongs to the engine's thread until it is answered. Its caller waits for
``events``: tokens, the last of which has a ``finish``, or one ``JobFailed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry import MAX_NAME, RankAgreement, Room
from kvferry.reference.engine.requests import EngineRequest, Produced
from kvferry.telemetry.logs.context import current

MAX_ENDS = 1024


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
    """Decode's report of a request's transfer.

    ``prefix`` tokens were cached, ``num_bytes`` came by ``mode`` within ``seconds`` after the
    pages were offered; ``room`` is None if no transfer was tried.
    """

    room: Room | None
    source: Origin | None = None
    mode: str | None = None
    prefix: int = 0
    num_bytes: int | None = msgspec.field(default=None, name="bytes")
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


class JobFailed(msgspec.Struct, frozen=True):
    """There is no answer, or no more of it."""

    trouble: Trouble
    message: str


class Ask(NamedTuple):
    """A request as the engine takes it, and the form of its answer.

    ``is_local``: the prompt is computed here although a transfer would have been possible.
    """

    request: EngineRequest
    ticket: Ticket | None = None
    chat: bool = False
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    is_local: bool = False


@dataclass(slots=True, eq=False)
class ServeJob:
    """One request in the engine's hands; make it on the event loop of its caller.

    ``agreement`` is set while ranks have a room of it. ``answered``: nobody waits for more.
    ``over``: nothing is left to do, not even to release. ``report`` is complete with the last
    token. ``prefill`` is the URL and the life of the worker that knows the room's ``RoomEnd``.
    ``trace`` is the caller's request id and trace.
    """

    ask: Ask
    deadline: float
    transfer_deadline: float
    report: TransferAccount | None = None
    prefill: tuple[str, str] | None = None
    admitted_at: float | None = None
    agreement: RankAgreement | None = None
    aborted: bool = False
    recomputed: bool = False
    answered: bool = False
    over: bool = False
    prefix: int = 0
    trace: tuple[str, str] = field(default_factory=current)
    events: asyncio.Queue[Produced | JobFailed] = field(default_factory=asyncio.Queue)
    _here: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @staticmethod
    def begin(ask: Ask, *, deadline_s: float, request_s: float) -> ServeJob:
        """Return a job that begins now."""
        now = time.monotonic()
        wanted_s = ask.ticket.deadline_s if ask.ticket else None
        return ServeJob(
            ask,
            deadline=now + request_s,
            # No caller holds the worker's pages for longer than a request may take.
            transfer_deadline=now + min(wanted_s or deadline_s, request_s),
            report=TransferAccount(room=None, source=Origin.RECOMPUTED) if ask.is_local else None,
        )

    @property
    def id(self) -> str:
        """The request's id."""
        return self.ask.request.id

    @property
    def room(self) -> Room:
        """The room of a job with a ticket."""
        assert self.ask.ticket is not None
        return self.ask.ticket.room

    def send(self, event: Produced | JobFailed) -> None:
        """Pass an event to the caller, unless nobody waits for it."""
        if self.answered:
            return
        self.answered = isinstance(event, JobFailed) or event.finish is not None
        # The caller's server may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._here.call_soon_threadsafe(self.events.put_nowait, event)

    def fail(self, trouble: Trouble, message: str) -> None:
        """Report that no answer comes."""
        self.send(JobFailed(trouble, message))


class RoomEnds:
    """How the last rooms of a worker ended. Thread-safe and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, Future[RoomEnd]] = OrderedDict()

    def wait_for(self, room: str) -> Future[RoomEnd]:
        """Return the end of a room, which may be in the future."""
        with self._lock:
            return self._get(room)

    def record(self, end: RoomEnd) -> None:
        """Record how a room ended."""
        with self._lock:
            if self._get(str(end.room)).done():
                # The same room was used before.
                del self._ends[str(end.room)]
            self._get(str(end.room)).set_result(end)

    def _get(self, room: str) -> Future[RoomEnd]:
        end = self._ends.setdefault(room, Future())
        self._ends.move_to_end(room)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return end
