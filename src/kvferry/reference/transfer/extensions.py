"""Endpoints beside every rank of an engine: the part that an integration has to write.

The driver posts commands, which reach all ranks with the next step's plan. With its results each
rank notes how its own part of a room ended and when its pages are free; the driver acts once all
ranks agree. The engine reads neither. Rooms are kept by the driver's own name for them, which is
the request's, so that a second request for a room cannot disturb the first.

Prefill ranks have a source endpoint and decode ranks a target endpoint. With a prefix cache each
has both, because any instance may then pull a prefix from any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry import (
    Done,
    EventRecorder,
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    LayerPushTuner,
    Memory,
    Misuse,
    Outcome,
    Outgoing,
    Room,
    SourceEndpoint,
    Span,
    Status,
    TargetEndpoint,
    TransportSet,
    Waitable,
    make_transports,
    prefix_chain,
    touched_pages,
)
from kvferry.http.listening import load_cluster_key
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import RequestWork, Sample, StepPlan
from kvferry.reference.options import InstanceOptions
from kvferry.reference.ranks.rank import Extension
from kvferry.router.worker_pool import WorkerRole

# A prefill rank's pull waits this long for a holder that discovery does not know.
UNKNOWN_S = 0.2
H = TypeVar("H", bound=Outgoing | Incoming)


class OpenCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every prefill rank: send this request's cache to that room during its computation."""

    request: str
    room: Room
    deadline_s: float
    digest: bytes
    trace: tuple[str, str]


class LendCommand(OpenCommand, frozen=True, kw_only=True, tag=True):
    """To every rank: send ``tokens`` cached tokens in these pages to that room."""

    tokens: int
    pages: list[int]


class ReceiveCommand(OpenCommand, frozen=True, kw_only=True, tag=True):
    """To every decode rank: receive that room into these pages."""

    prefill: str
    tokens: int
    prefix: int
    pages: list[int]


class PullCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every rank: pull into these pages what a holder has of these tokens."""

    request: str
    room: Room
    deadline_s: float
    trace: tuple[str, str]
    holder: str
    tokens: list[int]
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
    pulled: int | None = None

    @classmethod
    def of(cls, request: str, outcome: Outcome) -> EndedNote:
        """Return the note about an outcome."""
        if isinstance(outcome, Failure):
            return cls(request, outcome)
        return cls(request, None, outcome.metadata, outcome.pulled)

    @property
    def outcome(self) -> Outcome:
        """The outcome that the rank's handle had."""
        return self.failure or Done(self.metadata, self.pulled)


class ReleasedNote(msgspec.Struct, frozen=True, tag=True):
    """From a rank: no transfer touches its pages; it has sent these bytes by mode."""

    request: str
    carried: dict[str, int] = {}


class FirstTokenNote(msgspec.Struct, frozen=True):
    """Metadata of a room: the first token, and the prompt's tokens that were not computed."""

    sample: Sample
    cached: int = 0


RoomCommand = OpenCommand | LendCommand | ReceiveCommand | PullCommand
Command = RoomCommand | AbortCommand | DeclineCommand
Note = OfferedNote | EndedNote | ReleasedNote
# A message as it travels, and back.
encode: Callable[[Command | Note | FirstTokenNote], bytes] = msgspec.msgpack.encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_note: Callable[[bytes], Note] = msgspec.msgpack.Decoder(Note).decode


@dataclass(slots=True)
class RankRoom(Generic[H]):
    """One room on one rank, until the driver was told that its pages are free."""

    handle: H
    digest: bytes = b""
    begun: bool = False
    cached: int = 0
    told_offer: bool = False
    told_end: bool = False


class RoomExtension(Extension):
    """The endpoints of a decode rank, and what a prefill rank has in common with it."""

    def __init__(self, options: InstanceOptions, rank: int) -> None:
        super().__init__(rank)
        self.options = options
        self.model = options.fingerprint
        self._config = replace(options.endpoint, host=options.reached_at)
        # For the endpoint of the rank's role, which others write to if it is a target.
        self.transports = self.make_transports()
        # Called from an endpoint's thread when there is something to note; must not block.
        self.on_news: Callable[[], None] = lambda: None
        self.rooms: dict[str, RankRoom[Any]] = {}
        self.source: SourceEndpoint | None = None
        self.target: TargetEndpoint | None = None
        self._refused: list[Note] = []

    @property
    def is_prefill(self) -> bool:
        """Whether the rank sends prompts as it computes them."""
        return self.options.role is WorkerRole.PREFILL

    @property
    def _is_target(self) -> bool:
        """Whether others write into the rank's cache."""
        return self.options.engine.prefix_cache or not self.is_prefill

    def make_transports(self) -> TransportSet:
        """Return transports for one endpoint of this rank."""
        return make_transports(self.options.transport, self._config.host, self._config.options)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that sources can write into if this rank is a target."""
        return (
            self.transports.allocate(num_bytes) if self._is_target else super().allocate(num_bytes)
        )

    def start(self, cache: RankCache) -> None:
        """Make the endpoints over the rank's cache."""
        self._device = cache.memory.device
        self._page_tokens = cache.layout.page_tokens
        self._recorder = EventRecorder(self._device)
        memory = Memory.at(cache.pools.map, [cache.region])
        settings: dict[str, Any] = {
            "name": self.options.name,
            "rank": self.rank,
            "model": self.model,
            "discovery": self.options.discovery,
            "key": load_cluster_key(self.options.key_file),
        }
        # A rank has one status at the discovery service: that of its role's endpoint. A room may
        # wait for its prefill instance to start, and a pull not for a holder that does not exist.
        usual = self._config
        quiet = replace(usual, trace_events=0, discovery_timeout_s=UNKNOWN_S)
        if self._is_target:
            config = quiet if self.is_prefill else usual
            self.target = TargetEndpoint(
                cache.layout, memory, transport=self.transports, config=config, **settings
            )
        if self.is_prefill or self.options.engine.prefix_cache:
            others = self.make_transports() if self._is_target else self.transports
            config = usual if self.is_prefill else quiet
            self.source = SourceEndpoint(
                cache.layout, memory, transport=others, config=config, **settings
            )

    @property
    def links(self) -> dict[str, str]:
        """The transport of each link that is up, by peer."""
        endpoints = (self.target, self.source)
        return {peer: name for one in endpoints if one for peer, name in one.stats.links.items()}

    def before(self, plan: StepPlan) -> None:
        """Run the driver's commands."""
        for command in map(decode_command, plan.commands):
            if isinstance(command, DeclineCommand):
                self._decline(command)
            elif not isinstance(command, AbortCommand):
                self._add_room(command)
            elif room := self.rooms.get(command.request):
                room.handle.abort()

    def _decline(self, command: DeclineCommand) -> None:
        """Tell the prefill instance of a room that it is not wanted."""
        assert self.target is not None
        # Another request may be receiving the room: then it is not declined.
        with suppress(Misuse):
            self.target.decline(
                command.room, prefill=command.prefill, deadline_s=command.deadline_s
            )

    def _add_room(self, command: RoomCommand) -> None:
        try:
            room = self._begin(command)
        except KvferryError as error:
            # A room that cannot begin fails its own request and nothing else.
            failure = Failure.of(FailureCode.REFUSED, str(error))
            self._refused += [EndedNote(command.request, failure), ReleasedNote(command.request)]
            return
        self.rooms[command.request] = room
        room.handle.on_end(lambda _: self.on_news())
        room.handle.on_release(self.on_news)

    def _begin(self, command: RoomCommand) -> RankRoom[Any]:
        """Open, receive or pull a room."""
        asked_as, traceparent = command.trace
        about: dict[str, Any] = {
            "deadline_s": command.deadline_s,
            "request": asked_as,
            "traceparent": traceparent,
        }
        if isinstance(command, ReceiveCommand | PullCommand):
            return RankRoom(self._fill(command, about))
        assert self.source is not None
        out = self.source.open(command.room, **about)
        if isinstance(command, LendCommand):
            out.push((0, command.tokens), command.pages, after=self._recorder.computed())
            out.close(digest=command.digest)
        return RankRoom(out, command.digest)

    def _fill(self, command: ReceiveCommand | PullCommand, about: dict[str, Any]) -> Incoming:
        """Have sources write into a room's pages."""
        assert self.target is not None
        if self._device.type == "cuda":
            # The GPU's queue may still hold steps of a previous request that write these pages.
            torch.cuda.current_stream(self._device).synchronize()
        about |= {"prefix": command.prefix, "pages": command.pages}
        if isinstance(command, PullCommand):
            dtype = str(self.options.engine.dtype)
            chain = prefix_chain(command.tokens, model=self.model, dtype=dtype)
            return self.target.pull(command.room, holder=command.holder, chain=chain, **about)
        return self.target.receive(
            command.room,
            prefill=command.prefill,
            tokens=command.tokens,
            digest=command.digest,
            **about,
        )

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
                notes.append(EndedNote.of(request, outcome))
            if handle.released and room.told_end:
                del self.rooms[request]
                carried = handle.carried if isinstance(handle, Outgoing) else {}
                notes.append(ReleasedNote(request, {str(m): size for m, size in carried.items()}))
        return [encode(note) for note in notes]

    def close(self) -> None:
        """Close the endpoints, which aborts every room."""
        if self.source is None and self.target is None:
            self.transports.close()
        for endpoint in (self.source, self.target):
            if endpoint is not None:
                endpoint.close()


class PrefillExtension(RoomExtension):
    """The endpoints of a prefill rank, which pushes each chunk once it is computed.

    Where that pays, it pushes groups of layers while the layers above are computed.
    """

    _layers_per_push = 0

    def start(self, cache: RankCache) -> None:
        """See the base class."""
        super().start(cache)
        now = self._recorder.now
        self.tuner = LayerPushTuner(self.options.layers, cache.layout, self.rank, now)

    def before(self, plan: StepPlan) -> None:
        """Announce what this step computes, so that credits are there in time."""
        super().before(plan)
        for work, room in self._sent(plan):
            if work.first and not room.begun:
                # The cached prefix, which an earlier request computed or pulled.
                room.cached = work.first
                pages = self._pages(work, 0, work.first)
                room.handle.push((0, work.first), pages, after=self._recorder.computed())
            room.begun = True
            room.handle.prepare((work.first, work.end), self._pages(work, work.first, work.end))
        if plan.works:
            num_tokens = sum(len(work.tokens) for work in plan.works)
            num_sent = sum(len(work.tokens) for work, _ in self._sent(plan))
            self.tuner.begin(num_tokens)
            assert self.source is not None
            link_cost = self.source.link_cost
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
                metadata = encode(FirstTokenNote(first, room.cached)) if first else b""
                room.handle.close(metadata, tokens=work.end, after=event, digest=room.digest)
        return super().after(plan, samples)

    def _sent(self, plan: StepPlan) -> list[tuple[RequestWork, RankRoom[Outgoing]]]:
        """Return the step's works whose cache is sent."""
        rooms = self.rooms
        return [(work, rooms[work.request]) for work in plan.works if work.request in rooms]

    def _pages(self, work: RequestWork, first: int, end: int) -> list[int]:
        touched = touched_pages(Span(first, end), self._page_tokens)
        return work.pages[touched.first : touched.end]
