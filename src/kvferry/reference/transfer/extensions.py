"""An endpoint beside every rank of an engine: the part that an integration has to write.

The driver posts commands, which reach all ranks with the next step. Each rank notes how its
own part of a room ended and when its pages are free; the driver acts once all ranks agree.
Rooms are kept by request, so that a second request for a room cannot disturb the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvferry import (
    EndpointConfig,
    EventRecorder,
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    LayerPushTuner,
    Layers,
    Memory,
    Outgoing,
    SourceEndpoint,
    Span,
    TargetEndpoint,
    TransportSet,
    Waitable,
    make_transports,
    touched_pages,
)
from kvferry.http.listening import load_cluster_key
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import RequestWork, Sample, SampleFailed, StepPlan
from kvferry.reference.ranks.rank import Extension
from kvferry.reference.transfer.messages import (
    AbortCommand,
    Command,
    EndedNote,
    FirstTokenNote,
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
    """Settings of an instance's endpoints, sent to the ranks' processes.

    ``model`` is the checkpoint's fingerprint; ``http`` and ``life`` are the worker's address
    and life; ``layers`` is how many layers a source pushes at a time.
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
        """Return the transports of one rank."""
        return make_transports(self.transport, self.config.host, self.config.options)


@dataclass(slots=True)
class RankRoom(Generic[H]):
    """One room on one rank, until the driver was told that its pages are free."""

    handle: H
    digest: bytes
    begun: bool = False
    told_end: bool = False


class RoomExtension(Extension, ABC, Generic[H, E]):
    """What both sides' extensions have in common."""

    def __init__(self, kind: type[E], settings: EndpointSettings, rank: int) -> None:
        self._kind: type[E] = kind
        self.settings = settings
        self.rank = rank
        self.transports = settings.make_transports()
        # Called from an endpoint's thread when there is something to note; must not block.
        self.on_news: Callable[[], None] = lambda: None
        self.rooms: dict[str, RankRoom[H]] = {}
        self._endpoint: E | None = None
        self._refused: list[Note] = []

    def start(self, cache: RankCache) -> None:
        """Make the endpoint over the rank's cache."""
        settings = self.settings
        self._device = cache.memory.device
        self._endpoint = self._kind(
            cache.layout,
            Memory.at(cache.pools.map, [cache.region]),
            name=settings.name,
            rank=self.rank,
            model=settings.model,
            transport=self.transports,
            discovery=settings.discovery,
            key=load_cluster_key(settings.key_file),
            config=settings.config,
        )

    @property
    def endpoint(self) -> E:
        """The rank's endpoint, once it has started."""
        assert self._endpoint is not None
        return self._endpoint

    @abstractmethod
    def _begin(self, command: OpenCommand | ReceiveCommand) -> H:
        """Open a room, or receive one."""

    def before(self, plan: StepPlan) -> None:
        """Run the driver's commands."""
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
            # A room that cannot begin fails its own request and nothing else.
            failure = Failure.of(FailureCode.REFUSED, str(error))
            self._refused.append(EndedNote(command.request, failure))
            self._refused.append(self._released(command.request, {}))
            return
        self.rooms[command.request] = RankRoom(handle, command.digest)
        handle.on_end(lambda _: self.on_news())
        handle.on_release(self.on_news)

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """Note rooms that have ended and pages that are free, each once."""
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
        """Return the bytes that this rank wrote for a room by mode; a target writes none."""
        return {}

    def _released(self, request: str, moved: dict[str, int]) -> ReleasedNote:
        stats = self.endpoint.stats
        carried = {str(mode): one.num_bytes for mode, one in stats.modes.items()}
        return ReleasedNote(request, moved, carried, stats.links)

    def close(self) -> None:
        """Close the endpoint, which aborts every room."""
        if self._endpoint is None:
            self.transports.close()
        else:
            self._endpoint.close()


class DecodeExtension(RoomExtension[Incoming, TargetEndpoint]):
    """A target endpoint beside a decode rank: offers pages that sources fill."""

    def __init__(self, settings: EndpointSettings, rank: int) -> None:
        super().__init__(TargetEndpoint, settings, rank)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that sources can write into."""
        return self.transports.allocate(num_bytes)

    def _begin(self, command: OpenCommand | ReceiveCommand) -> Incoming:
        assert isinstance(command, ReceiveCommand), command
        if self._device.type == "cuda":
            # The GPU's queue may still hold steps of a previous request that write these pages.
            torch.cuda.current_stream(self._device).synchronize()
        return self.endpoint.receive(
            command.room,
            prefill=command.prefill,
            tokens=command.tokens,
            prefix=command.prefix,
            pages=command.pages,
            states=command.row,
            deadline_s=command.deadline_s,
            digest=command.digest,
            request=command.asked_as,
            traceparent=command.traceparent,
        )


class PrefillExtension(RoomExtension[Outgoing, SourceEndpoint]):
    """A source endpoint beside a prefill rank: pushes each chunk once it is computed.

    Where that pays, it pushes groups of layers while the layers above are computed.
    """

    def __init__(self, settings: EndpointSettings, rank: int) -> None:
        super().__init__(SourceEndpoint, settings, rank)
        self._layers_per_push = 0

    def start(self, cache: RankCache) -> None:
        """See the base class."""
        self._page_tokens = cache.layout.page_tokens
        self._recorder = EventRecorder(cache.memory.device)
        now = self._recorder.now
        self.tuner = LayerPushTuner(self.settings.layers, cache.layout, self.rank, now)
        super().start(cache)

    def _begin(self, command: OpenCommand | ReceiveCommand) -> Outgoing:
        return self.endpoint.open(
            command.room,
            deadline_s=command.deadline_s,
            request=command.asked_as,
            traceparent=command.traceparent,
        )

    def _moved(self, handle: Outgoing) -> dict[str, int]:
        return {str(mode): num_bytes for mode, num_bytes in handle.carried.items()}

    def before(self, plan: StepPlan) -> None:
        """Announce what this step computes, so that credits are there in time."""
        super().before(plan)
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is None:
                continue
            if not room.begun:
                room.begun = True
                if work.first:
                    # The cached prefix, which an earlier request computed.
                    pages = self._pages(work, 0, work.first)
                    room.handle.push((0, work.first), pages, after=self._recorder.computed())
            room.handle.prepare((work.first, work.end), self._pages(work, work.first, work.end))
        if plan.works:
            num_tokens = sum(len(work.tokens) for work in plan.works)
            num_sent = sum(len(work.tokens) for work in plan.works if work.request in self.rooms)
            self.tuner.begin(num_tokens)
            link_cost = self.endpoint.link_cost
            self._layers_per_push = self.tuner.per_push(num_tokens, num_sent, link_cost)

    def computed(self, plan: StepPlan, layer: int) -> None:
        """Push the group of layers that ends with this one, unless it is all layers."""
        end = layer + 1
        if end == self.tuner.end:
            self.tuner.finish()
        place = (layer - self.tuner.first) % self._layers_per_push
        if place != self._layers_per_push - 1 and end != self.tuner.end:
            return
        layers = (layer - place, end)
        if layers == (self.tuner.first, self.tuner.end):
            return
        event = self._recorder.computed()
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is not None:
                self._push(room.handle, work, event, layers)

    def _push(
        self,
        room: Outgoing,
        work: RequestWork,
        event: Waitable | None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        pages = self._pages(work, work.first, work.end)
        # A layer's state goes with the last chunk, because decode begins with it.
        states = None if work.sampling is None else work.row
        room.push((work.first, work.end), pages, after=event, layers=layers, states=states)

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """Push the step's chunks, and close a room with its first token after the last chunk.

        Without a first token decode cannot go on, so the room is aborted.
        """
        event = self._recorder.computed()
        firsts = {sample.request: sample for sample in samples}
        failed = {failure.request for failure in failures}
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is None:
                continue
            if work.request in failed:
                room.handle.abort()
                continue
            if self._layers_per_push >= self.tuner.num_layers:
                self._push(room.handle, work, event)
            if work.sampling is not None:
                first = firsts.get(work.request)
                http, life = self.settings.http, self.settings.life
                room.handle.close(
                    encode(FirstTokenNote(first, http, life)) if first else b"",
                    states=work.row,
                    tokens=work.end,
                    after=event,
                    digest=room.digest,
                )
        return super().after(plan, samples, failures)

    def _pages(self, work: RequestWork, first: int, end: int) -> list[int]:
        touched = touched_pages(Span(first, end), self._page_tokens)
        return work.pages[touched.first : touched.end]
