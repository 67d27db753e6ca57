"""An endpoint beside every rank of an engine: the part that an integration has to write.

The driver posts commands, which reach all ranks with the next step's plan. With its results each
rank notes how its own part of a room ended and when its pages are free; the driver acts once all
ranks agree. The engine reads neither. Rooms are kept by request, so that a second request for a
room cannot disturb the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry import (
    EventRecorder,
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    LayerPushTuner,
    Memory,
    Misuse,
    Outgoing,
    Room,
    SourceEndpoint,
    Span,
    Status,
    TargetEndpoint,
    TransportSet,
    Waitable,
    make_transports,
    touched_pages,
)
from kvferry.http.listening import load_cluster_key
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import RequestWork, Sample, StepPlan
from kvferry.reference.options import InstanceOptions
from kvferry.reference.ranks.rank import Extension

H = TypeVar("H", bound=Outgoing | Incoming)
E = TypeVar("E", SourceEndpoint, TargetEndpoint)


class OpenCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every rank: this request belongs to that room. Targets receive into ``pages``."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes
    trace: tuple[str, str]
    prefill: str
    tokens: int
    prefix: int
    pages: list[int]


class AbortCommand(msgspec.Struct, frozen=True, tag=True):
    """To every rank: abort the request's room if it has not ended."""

    request: str


class DeclineCommand(msgspec.Struct, frozen=True, tag=True):
    """To every target rank: a request of this room was refused; tell the prefill instance."""

    room: Room
    prefill: str
    deadline_s: float


class OfferedNote(msgspec.Struct, frozen=True, tag=True):
    """From a source rank: decode has pages for the request and has offered them."""

    request: str


class EndedNote(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its part of the request's room is done, or failed."""

    request: str
    failure: Failure | None = None
    metadata: bytes = b""


class ReleasedNote(msgspec.Struct, frozen=True, tag=True):
    """From a rank: no transfer touches its pages; it has sent these bytes by mode."""

    request: str
    carried: dict[str, int] = {}


class FirstTokenNote(msgspec.Struct, frozen=True):
    """Metadata of a room: the first token."""

    sample: Sample


Command = OpenCommand | AbortCommand | DeclineCommand
Note = OfferedNote | EndedNote | ReleasedNote
# A message as it travels, and back.
encode: Callable[[Command | Note | FirstTokenNote], bytes] = msgspec.msgpack.encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_note: Callable[[bytes], Note] = msgspec.msgpack.Decoder(Note).decode


@dataclass(slots=True)
class RankRoom(Generic[H]):
    """One room on one rank, until the driver was told that its pages are free."""

    handle: H
    digest: bytes
    begun: bool = False
    told_offer: bool = False
    told_end: bool = False


class RoomExtension(Extension, ABC, Generic[H, E]):
    """What both sides' extensions have in common; ``KIND`` makes the endpoint."""

    KIND: type[E]

    def __init__(self, options: InstanceOptions, rank: int) -> None:
        super().__init__(rank)
        self.options = options
        self.model = options.fingerprint
        self._config = replace(options.endpoint, host=options.reached_at)
        self.transports = self.make_transports()
        # Called from an endpoint's thread when there is something to note; must not block.
        self.on_news: Callable[[], None] = lambda: None
        self.rooms: dict[str, RankRoom[H]] = {}
        self._endpoint: E | None = None
        self._refused: list[Note] = []

    def make_transports(self) -> TransportSet:
        """Return the transports of this rank."""
        return make_transports(self.options.transport, self._config.host, self._config.options)

    def start(self, cache: RankCache) -> None:
        """Make the endpoint over the rank's cache."""
        self._device = cache.memory.device
        self._endpoint = self.KIND(
            cache.layout,
            Memory.at(cache.pools.map, [cache.region]),
            name=self.options.name,
            rank=self.rank,
            model=self.model,
            transport=self.transports,
            discovery=self.options.discovery,
            key=load_cluster_key(self.options.key_file),
            config=self._config,
        )

    @property
    def endpoint(self) -> E:
        """The rank's endpoint, once it has started."""
        assert self._endpoint is not None
        return self._endpoint

    @abstractmethod
    def _begin(self, command: OpenCommand) -> H:
        """Open a room, or receive one."""

    def before(self, plan: StepPlan) -> None:
        """Run the driver's commands."""
        for command in map(decode_command, plan.commands):
            if isinstance(command, OpenCommand):
                self._add_room(command)
            elif isinstance(command, DeclineCommand):
                self._decline(command)
            elif room := self.rooms.get(command.request):
                room.handle.abort()

    def _decline(self, command: DeclineCommand) -> None:
        """Tell the prefill instance of a room that it is not wanted. Only decode ranks can."""

    def _add_room(self, command: OpenCommand) -> None:
        try:
            handle = self._begin(command)
        except KvferryError as error:
            # A room that cannot begin fails its own request and nothing else.
            failure = Failure.of(FailureCode.REFUSED, str(error))
            self._refused += [EndedNote(command.request, failure), ReleasedNote(command.request)]
            return
        self.rooms[command.request] = RankRoom(handle, command.digest)
        handle.on_end(lambda _: self.on_news())
        handle.on_release(self.on_news)

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        """Note rooms that are offered or have ended, and pages that are free, each once."""
        notes, self._refused = self._refused, []
        for request, room in list(self.rooms.items()):
            handle, outcome = room.handle, room.handle.outcome
            if not room.told_offer and handle.status >= Status.WAITING:
                room.told_offer = True
                notes.append(OfferedNote(request))
            if outcome is not None and not room.told_end:
                room.told_end = True
                failure = outcome if isinstance(outcome, Failure) else None
                metadata = b"" if isinstance(outcome, Failure) else outcome.metadata
                notes.append(EndedNote(request, failure, metadata))
            if handle.released and room.told_end:
                del self.rooms[request]
                carried = handle.carried if isinstance(handle, Outgoing) else {}
                notes.append(ReleasedNote(request, {str(m): size for m, size in carried.items()}))
        return [encode(note) for note in notes]

    def close(self) -> None:
        """Close the endpoint, which aborts every room."""
        if self._endpoint is None:
            self.transports.close()
        else:
            self._endpoint.close()


class DecodeExtension(RoomExtension[Incoming, TargetEndpoint]):
    """A target endpoint beside a decode rank: offers pages that sources fill."""

    KIND = TargetEndpoint

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that sources can write into."""
        return self.transports.allocate(num_bytes)

    def _begin(self, command: OpenCommand) -> Incoming:
        if self._device.type == "cuda":
            # The GPU's queue may still hold steps of a previous request that write these pages.
            torch.cuda.current_stream(self._device).synchronize()
        return self.endpoint.receive(
            command.room,
            prefill=command.prefill,
            tokens=command.tokens,
            prefix=command.prefix,
            pages=command.pages,
            deadline_s=command.deadline_s,
            digest=command.digest,
            request=command.trace[0],
            traceparent=command.trace[1],
        )

    def _decline(self, command: DeclineCommand) -> None:
        """See the base class."""
        # Another request may be receiving the room: then it is not declined.
        with suppress(Misuse):
            self.endpoint.decline(
                command.room, prefill=command.prefill, deadline_s=command.deadline_s
            )


class PrefillExtension(RoomExtension[Outgoing, SourceEndpoint]):
    """A source endpoint beside a prefill rank: pushes each chunk once it is computed.

    Where that pays, it pushes groups of layers while the layers above are computed.
    """

    KIND = SourceEndpoint
    _layers_per_push = 0

    def start(self, cache: RankCache) -> None:
        """See the base class."""
        self._page_tokens = cache.layout.page_tokens
        self._recorder = EventRecorder(cache.memory.device)
        now = self._recorder.now
        self.tuner = LayerPushTuner(self.options.layers, cache.layout, self.rank, now)
        super().start(cache)

    def _begin(self, command: OpenCommand) -> Outgoing:
        asked_as, traceparent = command.trace
        return self.endpoint.open(
            command.room, deadline_s=command.deadline_s, request=asked_as, traceparent=traceparent
        )

    def before(self, plan: StepPlan) -> None:
        """Announce what this step computes, so that credits are there in time."""
        super().before(plan)
        for work, room in self._sent(plan):
            if work.first and not room.begun:
                # The cached prefix, which an earlier request computed.
                pages = self._pages(work, 0, work.first)
                room.handle.push((0, work.first), pages, after=self._recorder.computed())
            room.begun = True
            room.handle.prepare((work.first, work.end), self._pages(work, work.first, work.end))
        if plan.works:
            num_tokens = sum(len(work.tokens) for work in plan.works)
            num_sent = sum(len(work.tokens) for work, _ in self._sent(plan))
            self.tuner.begin(num_tokens)
            link_cost = self.endpoint.link_cost
            self._layers_per_push = self.tuner.per_push(num_tokens, num_sent, link_cost)

    def computed(self, plan: StepPlan, layer: int) -> None:
        """Push the group of layers that ends with this one, unless it is all layers."""
        end = layer + 1
        if end == self.tuner.end:
            self.tuner.finish()
        place = (layer - self.tuner.first) % self._layers_per_push
        layers = (layer - place, end)
        is_group = place == self._layers_per_push - 1 or end == self.tuner.end
        if is_group and layers != (self.tuner.first, self.tuner.end):
            event = self._recorder.computed()
            for work, room in self._sent(plan):
                self._push(room.handle, work, event, layers)

    def _push(
        self,
        room: Outgoing,
        work: RequestWork,
        event: Waitable | None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        pages = self._pages(work, work.first, work.end)
        room.push((work.first, work.end), pages, after=event, layers=layers)

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        """Push the step's chunks, and close a room with its first token after the last chunk.

        Without a first token decode cannot go on, so the room is aborted.
        """
        event = self._recorder.computed()
        firsts = {sample.request: sample for sample in samples}
        for work, room in self._sent(plan):
            if self._layers_per_push >= self.tuner.num_layers:
                self._push(room.handle, work, event)
            first = firsts.get(work.request)
            if work.sampling and self.rank == 0 and first is None:
                room.handle.abort()
            elif work.sampling:
                metadata = encode(FirstTokenNote(first)) if first else b""
                room.handle.close(metadata, tokens=work.end, after=event, digest=room.digest)
        return super().after(plan, samples)

    def _sent(self, plan: StepPlan) -> list[tuple[RequestWork, RankRoom[Outgoing]]]:
        """Return the step's works whose cache is sent."""
        rooms = self.rooms
        return [(work, rooms[work.request]) for work in plan.works if work.request in rooms]

    def _pages(self, work: RequestWork, first: int, end: int) -> list[int]:
        touched = touched_pages(Span(first, end), self._page_tokens)
        return work.pages[touched.first : touched.end]
