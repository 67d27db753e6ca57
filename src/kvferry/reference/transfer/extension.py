"""An endpoint beside every rank of an engine: commands in, notes out.

Every rank has an endpoint in its extension (``prefill.py``, ``decode.py``). The driver posts
commands, which reach all ranks with the next step; each rank notes how its own part of a room
ended and when its pages are free. The driver acts once all have spoken (``Agreement``). Requests,
not rooms, name things here, so a second request for a room can't disturb the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from kvferry import (
    ClusterKey,
    EndpointConfig,
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    Layers,
    Memory,
    Outgoing,
    SourceEndpoint,
    TargetEndpoint,
    TransportSet,
    make_transports,
)
from kvferry.http.listening import load_cluster_key
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.steps import Sample, SampleFailed, StepPlan
from kvferry.reference.ranks.rank import Extension
from kvferry.reference.transfer.messages import (
    AbortCommand,
    Command,
    EndedNote,
    Note,
    OpenCommand,
    ReceiveCommand,
    ReleasedNote,
    decode_command,
    encode,
)

H = TypeVar("H", bound=Outgoing | Incoming)
E = TypeVar("E", SourceEndpoint, TargetEndpoint)


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoints of one instance have in common. Sent to the ranks' processes.

    ``model`` is the checkpoint's fingerprint, ``http`` where the worker itself is reached,
    in its ``life``. ``layers`` is how many a source pushes at a time.
    """

    name: str
    model: str
    transport: str = "auto"
    discovery: str | None = None
    key_file: str | None = None
    http: str = ""
    life: str = ""
    layers: Layers = "auto"
    config: EndpointConfig = EndpointConfig()

    def make_transports(self) -> TransportSet:
        """The transports of one rank."""
        return make_transports(self.transport, self.config.host, self.config.options)

    def key(self) -> ClusterKey | None:
        """The cluster's key, if there is one."""
        return load_cluster_key(self.key_file)


class RankRoom(Generic[H]):
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
        self.transports = settings.make_transports()
        # Called from an endpoint's thread when there is something to note; must not wait.
        self.on_news: Callable[[], None] = lambda: None
        self.rooms: dict[str, RankRoom[H]] = {}
        self._endpoint: E | None = None
        self._refused: list[Note] = []

    def start(self, cache: RankCache) -> None:
        """Make the endpoint over the rank's cache."""
        settings = self.settings
        self._endpoint = self._kind(
            cache.layout,
            Memory.at(cache.pools.map, [cache.region]),
            name=settings.name,
            rank=self.rank,
            model=settings.model,
            transport=self.transports,
            discovery=settings.discovery,
            key=settings.key(),
            config=settings.config,
        )

    @property
    def endpoint(self) -> E:
        """The rank's, once it has started."""
        assert self._endpoint is not None
        return self._endpoint

    @abstractmethod
    def _begin(self, command: OpenCommand | ReceiveCommand) -> H:
        """Take a room on."""

    def before(self, plan: StepPlan) -> None:
        """Do what the driver says."""
        for data in plan.commands:
            self._do(decode_command(data))

    def _do(self, command: Command) -> None:
        if isinstance(command, AbortCommand):
            if command.request in self.rooms:
                self.rooms[command.request].handle.abort()
            return
        try:
            handle = self._begin(command)
        except KvferryError as error:
            # What can't begin fails its own request, and nothing else.
            failure = Failure.of(FailureCode.REFUSED, str(error))
            self._refused += [
                EndedNote(command.request, failure),
                self._released(command.request, {}),
            ]
            return
        self.rooms[command.request] = RankRoom(handle, command.digest)
        handle.on_end(lambda _: self.on_news())
        handle.on_release(self.on_news)

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """Say what has ended and what is free, each once."""
        notes, self._refused = self._refused, []
        for request, room in list(self.rooms.items()):
            outcome = room.handle.outcome
            if outcome is not None and not room.told_end:
                room.told_end = True
                notes.append(EndedNote.of(request, outcome))
            if room.handle.released and room.told_end:
                del self.rooms[request]
                notes.append(self._released(request, self._moved(room.handle)))
        return [encode(note) for note in notes]

    def _moved(self, handle: H) -> dict[str, int]:
        """What this rank has written for a room; a target writes nothing."""
        return {}

    def _released(self, request: str, moved: dict[str, int]) -> ReleasedNote:
        stats = self.endpoint.stats
        carried = {str(mode): one.num_bytes for mode, one in stats.modes.items()}
        return ReleasedNote(request, moved, carried, stats.links)

    def close(self) -> None:
        """AbortCommand every room and end the endpoint."""
        if self._endpoint is None:
            self.transports.close()
        else:
            self._endpoint.close()
