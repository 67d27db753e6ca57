"""Rooms in an engine: what the driver tells its ranks, what they answer, how they agree.

Every rank has an endpoint in its extension (``transfer_prefill.py``,
``transfer_decode.py``). The driver posts commands, which reach all ranks with the
next step; each rank notes how its own part of a room ended and when its pages
are free. The driver acts once all have spoken: that is how ranks agree. Requests,
not rooms, name things here, so a second request for a room can't disturb the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from kvferry.errors import KvferryError
from kvferry.ids import Room
from kvferry.protocol.outcome import Failure, FailureCode, Outcome, Status
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.incoming import Incoming
from kvferry.runtime.keys import ClusterKey
from kvferry.runtime.memory import Memory
from kvferry.runtime.outgoing import Outgoing
from kvferry.runtime.setup import make_transport
from kvferry.runtime.source import SourceEndpoint
from kvferry.runtime.target import TargetEndpoint
from kvferry.serve.cache import Cache
from kvferry.serve.listening import key_in
from kvferry.serve.steps import Sample, StepPlan
from kvferry.serve.worker import Extension
from kvferry.transport.base import Transport

H = TypeVar("H", bound=Outgoing | Incoming)
E = TypeVar("E", SourceEndpoint, TargetEndpoint)

# ---------------------------------------------------------------- from the driver


class Open(msgspec.Struct, frozen=True, tag=True):
    """To sources: this request is about to be computed and belongs to that room."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes


class Receive(msgspec.Struct, frozen=True, tag=True):
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


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To either: give the request's room up, if it has not ended."""

    request: str


Command = Open | Receive | Abort
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

# ---------------------------------------------------------------- from a rank


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of the request's room is done, or failed."""

    request: str
    failure: Failure | None = None
    metadata: bytes = b""


class Released(msgspec.Struct, frozen=True, tag=True):
    """No transfer touches the rank's pages of the request any more.

    ``moved`` are the bytes that the rank has written for it by each path, ``carried``
    those of all rooms since it started.
    """

    request: str
    moved: dict[str, int] = {}
    carried: dict[str, int] = {}


Note = Ended | Released
_NOTES: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


class First(msgspec.Struct, frozen=True):
    """What the lead source adds to a room: the first token, and who can say how it went.

    ``life`` is that of the worker at ``http``, which takes signed questions for it alone.
    """

    sample: Sample
    http: str = ""
    life: str = ""


def encode(message: Command | Note | First) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(message)


def decode_note(note: bytes) -> Note:
    """A rank's note, on the driver."""
    return _NOTES.decode(note)


class Agreement:
    """How a room stands on all ranks of this instance, from their notes."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ends: dict[int, Ended] = {}
        self._released: set[int] = set()
        # What all ranks have written, by path; complete when all have released.
        self.moved: Counter[str] = Counter()

    def take(self, rank: int, note: Note) -> None:
        """A rank has spoken."""
        if isinstance(note, Released):
            self._released.add(rank)
            self.moved.update(note.moved)
        else:
            self._ends.setdefault(rank, note)

    @property
    def status(self) -> Status:
        """Failed as soon as one rank has, done when all are."""
        if self.failure is not None:
            return Status.FAILED
        return Status.DONE if len(self._ends) == self._num_ranks else Status.MOVING

    @property
    def failure(self) -> Failure | None:
        """Why it failed. Ranks that only followed another's failure say less, so they come last."""
        failures = [end.failure for end in self._ends.values() if end.failure is not None]
        return min(failures, key=lambda f: f.code is FailureCode.ABORTED, default=None)

    @property
    def released(self) -> bool:
        """Whether the pages are free on every rank."""
        return len(self._released) == self._num_ranks

    @property
    def metadata(self) -> bytes:
        """What the lead source said; only the targets that it writes to have heard it."""
        return max((end.metadata for end in self._ends.values()), key=len, default=b"")


# ---------------------------------------------------------------- on every rank


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoints of one instance have in common. Sent to the ranks' processes.

    ``model`` is the checkpoint's fingerprint, ``http`` where the worker itself is reached,
    in its ``life``.
    """

    name: str
    model: str
    transport: str = "shm"
    rendezvous: str | None = None
    key_file: str | None = None
    http: str = ""
    life: str = ""
    config: EndpointConfig = EndpointConfig()

    def make_transport(self) -> Transport:
        """A transport for one rank."""
        return make_transport(self.transport, self.config.host, self.config.options)

    def key(self) -> ClusterKey | None:
        """The cluster's key, if there is one."""
        return key_in(self.key_file)


class Part(Generic[H]):
    """One room on one rank, until it was told that its pages are free."""

    def __init__(self, handle: H, digest: bytes) -> None:
        self.handle = handle
        self.digest = digest
        self.told_end = False


class RoomExtension(Extension, ABC, Generic[H, E]):
    """What both sides' extensions do alike: rooms by request, commands in, notes out."""

    def __init__(self, kind: type[E], settings: EndpointSettings, rank: int) -> None:
        self._kind: type[E] = kind
        self.settings = settings
        self.rank = rank
        self.transport = settings.make_transport()
        # Called from an endpoint's thread when there is something to note; must not wait.
        self.on_news: Callable[[], None] = lambda: None
        self.parts: dict[str, Part[H]] = {}
        self._endpoint: E | None = None
        self._refused: list[Note] = []

    def start(self, cache: Cache) -> None:
        """Make the endpoint over the rank's cache."""
        settings = self.settings
        self._endpoint = self._kind(
            cache.layout,
            Memory.at(cache.pools.map, [cache.region]),
            name=settings.name,
            rank=self.rank,
            model=settings.model,
            transport=self.transport,
            rendezvous=settings.rendezvous,
            key=settings.key(),
            config=settings.config,
        )

    @property
    def endpoint(self) -> E:
        """The rank's, once it has started."""
        assert self._endpoint is not None
        return self._endpoint

    @abstractmethod
    def _begin(self, command: Open | Receive) -> H:
        """Take a room on."""

    def before(self, plan: StepPlan) -> None:
        """Do what the driver says."""
        for data in plan.commands:
            self._do(_COMMANDS.decode(data))

    def _do(self, command: Command) -> None:
        if isinstance(command, Abort):
            if command.request in self.parts:
                self.parts[command.request].handle.abort()
            return
        try:
            handle = self._begin(command)
        except KvferryError as error:
            # What can't begin fails its own request, and nothing else.
            failure = Failure.of(FailureCode.REFUSED, str(error))
            self._refused += [Ended(command.request, failure), self._released(command.request, {})]
            return
        self.parts[command.request] = Part(handle, command.digest)
        handle.on_end(lambda _: self.on_news())
        handle.on_release(self.on_news)

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        """Say what has ended and what is free, each once."""
        notes, self._refused = self._refused, []
        for request, part in list(self.parts.items()):
            outcome = part.handle.outcome
            if outcome is not None and not part.told_end:
                part.told_end = True
                notes.append(_end(request, outcome))
            if part.handle.released and part.told_end:
                del self.parts[request]
                notes.append(self._released(request, self._moved(part.handle)))
        return [encode(note) for note in notes]

    def _moved(self, handle: H) -> dict[str, int]:
        """What this rank has written for a room; a target writes nothing."""
        return {}

    def _released(self, request: str, moved: dict[str, int]) -> Released:
        paths = self.endpoint.stats.paths
        carried = {str(path): stats.num_bytes for path, stats in paths.items()}
        return Released(request, moved, carried)

    def close(self) -> None:
        """Abort every room and end the endpoint."""
        if self._endpoint is None:
            self.transport.close()
        else:
            self._endpoint.close()


def _end(request: str, outcome: Outcome) -> Ended:
    if isinstance(outcome, Failure):
        return Ended(request, outcome)
    return Ended(request, metadata=outcome.metadata)
