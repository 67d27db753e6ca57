"""Rooms of one prefill rank: the scheduler's metadata as calls to a source endpoint.

Runs on the worker's thread. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvferry import KvferryError, LayerPushTuner, Outgoing, Room, SourceEndpoint, Waitable
from kvferry.connectors.first_token import encoded_token
from kvferry.connectors.vllm.metadata import OpenRoom, PrefillMetadata, PushTokens
from kvferry.connectors.vllm.paging import BlockTables, PagesByGroup, PushedPages
from kvferry.connectors.vllm.stats import RoomCounts

log = logging.getLogger("vllm.kvferry")

# How long to wait for the endpoint's loop thread to abort a room; that involves no peer.
ABANDON_S = 10.0


class LayerSteps:
    """Maps the caches that vLLM reports as computed to complete layers.

    A layer may have several caches, one in each group.
    """

    def __init__(self, groups: Iterable[Mapping[int, str]]) -> None:
        self._layer_of: dict[str, int] = {}
        self._caches: dict[int, set[str]] = {}
        for group in groups:
            for layer, name in group.items():
                self._layer_of[name] = layer
                self._caches.setdefault(layer, set()).add(name)
        self._missing: dict[int, set[str]] = {}

    def begin(self) -> None:
        """Begin a step, in which no cache is computed yet."""
        self._missing = {layer: set(names) for layer, names in self._caches.items()}

    def computed(self, name: str) -> int | None:
        """Record a computed cache; return its layer if that is now complete."""
        layer = self._layer_of.get(name)
        missing = self._missing.get(layer) if layer is not None else None
        if not missing:
            return None
        missing.discard(name)
        return None if missing else layer


class ComputedPrompt(NamedTuple):
    """The last chunk of a prompt, and what to wait for before reading it."""

    push: PushTokens
    computed: Waitable | None


@dataclass
class RoomAtSource:
    """One room of one rank.

    Its handle is None if the room could not be opened, or if it is late and the request runs.
    """

    request: str
    pages: PushedPages
    handle: Outgoing | None
    # The prompt of a room that is not opened or not closed yet.
    prompt: ComputedPrompt | None = None
    # Whether the room is closed with the first token of the answer.
    awaits_token: bool = False
    # Whether the scheduler holds the blocks until the room is released.
    is_held: bool = False
    is_abandoned: bool = False

    @property
    def is_released(self) -> bool:
        """Whether nothing reads the room's pages any more."""
        return self.handle is None or self.handle.released


class PrefillRankRooms:
    """Rooms of one prefill rank.

    A late room is opened and pushed when its request has ended, so that it does not delay the
    answer. Any other room is pushed while its prompt is computed.

    ``tuner`` chooses how many layers to push at a time while a step computes. Whether vLLM reports
    single layers is not known in advance, since captured graphs do not: layers that were not pushed
    during the step are pushed at its end.
    """

    def __init__(
        self,
        endpoint: SourceEndpoint,
        tables: BlockTables,
        counts: RoomCounts,
        tuner: LayerPushTuner,
    ) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._counts = counts
        self._tuner = tuner
        # State of the current step: what is pushed during it, layers per push, and the layers
        # computed and pushed so far.
        self._pushing: list[PushTokens] = []
        self._per_push = tuner.num_layers
        self._computed_to = self._pushed_to = tuner.first
        self._rooms: dict[Room, RoomAtSource] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def begin_step(self, metadata: PrefillMetadata) -> None:
        """Before the step computes: abandon overwritten rooms, and announce the new tokens."""
        for opened in metadata.opened:
            self._open(opened)
        for abandoned in metadata.abandoned:
            self._abandon(abandoned)
        for forgotten in metadata.forgotten:
            self._rooms.pop(forgotten, None)
        for held in metadata.held:
            self._hold(*held)
        for push in metadata.pushed:
            self._prepare(push)
        self._computed_to = self._pushed_to = self._tuner.first
        self._pushing = [push for push in metadata.pushed if self._rooms[push.room].handle]
        if self._pushing:
            chunks = [self._new_cells(push) for push in self._pushing]
            num_cells = sum(chunk[0][1] - chunk[0][0] for chunk in chunks if chunk is not None)
            self._tuner.begin(max(1, num_cells))
            link_cost = self._endpoint.link_cost
            self._per_push = self._tuner.per_push(num_cells, num_cells, link_cost)

    @property
    def is_pushing(self) -> bool:
        """Whether the current step's tokens are pushed by its end."""
        return bool(self._pushing)

    def layer_computed(self, layer: int, event: Callable[[], Waitable | None]) -> None:
        """Push the layers computed so far, if enough of them wait.

        ``event`` returns what to wait for before reading the layer. Layers that are computed out of
        order wait for the end of the step.
        """
        if layer != self._computed_to:
            return
        self._computed_to = end = layer + 1
        is_last = end == self._tuner.end
        if is_last:
            self._tuner.finish()
        pushes_whole_step = self._per_push >= self._tuner.num_layers
        if pushes_whole_step or (end - self._pushed_to < self._per_push and not is_last):
            return
        computed = event()
        for push in self._pushing:
            self._push_layers(push, computed, (self._pushed_to, end))
        self._pushed_to = end

    def end_step(self, metadata: PrefillMetadata, computed: Waitable | None) -> None:
        """Push the rest of the step's tokens, which may be read once ``computed`` has happened."""
        for push in metadata.pushed:
            room = self._rooms[push.room]
            if push.digest is not None and (room.handle is None or room.awaits_token):
                room.prompt = ComputedPrompt(push, computed)
            if room.handle is not None:
                self._push_rest(push, computed)

    def take_sent(self) -> set[str]:
        """Return the requests whose blocks have become free. Each is returned once."""
        ended = {
            name: room
            for name, room in self._rooms.items()
            if room.is_released and (room.is_held or room.is_abandoned)
        }
        for name, room in ended.items():
            del self._rooms[name]
            if room.handle is not None:
                self._counts.sent(room.handle)
        return {room.request for room in ended.values() if room.is_held}

    def _open(self, opened: OpenRoom) -> None:
        pages = PushedPages(self._tables, opened.tokens)
        handle = self._open_handle(opened.room) if not opened.is_late else None
        room = RoomAtSource(opened.request, pages, handle, awaits_token=opened.awaits_token)
        self._rooms[opened.room] = room

    def _open_handle(self, name: Room) -> Outgoing | None:
        try:
            return self._endpoint.open(name)
        except KvferryError as error:
            # The request is computed anyway. Decode waits for this room until its deadline.
            log.warning("room-refused room=%r reason=%r", name, str(error))
            return None

    def _hold(self, request: str, name: Room, token: int | None = None) -> None:
        """Hold a request's blocks until its room is released.

        Open a late room, and close a room that awaits the request's first token.
        """
        unknown = RoomAtSource(request, PushedPages(self._tables, 0), None)
        room = self._rooms.setdefault(name, unknown)
        room.is_held = True
        prompt, room.prompt = room.prompt, None
        if prompt is None:
            return
        if room.handle is None:
            room.handle = self._open_handle(name)
            self._push_layers(*prompt, layers=None)
        self._close(*prompt, b"" if token is None else encoded_token(token))

    def _abandon(self, name: Room) -> None:
        """Abort a room whose blocks are about to be reused.

        Wait until the abort has taken effect: from then on the room can't become Done at a target,
        so that it does not matter what a write in flight still reads.
        """
        room = self._rooms.get(name)
        if room is None:
            return
        room.is_abandoned, room.prompt = True, None
        room.handle = room.handle or self._open_handle(name)
        if room.handle is None:
            return
        room.handle.abort()
        try:
            room.handle.wait(ABANDON_S)
        except TimeoutError:
            log.error("not-abandoned room=%r: kvferry's loop thread does not answer", name)

    def _prepare(self, push: PushTokens) -> None:
        room = self._rooms[push.room]
        room.pages.extend(push.first_block, push.blocks)
        chunk = self._new_cells(push)
        if room.handle is not None and chunk is not None:
            room.handle.prepare(*chunk)

    def _new_cells(self, push: PushTokens) -> tuple[tuple[int, int], PagesByGroup] | None:
        """Return the cells that the step completes, and their pages."""
        return self._rooms[push.room].pages.new_cells(push.end, last=push.digest is not None)

    def _push_layers(
        self, push: PushTokens, computed: Waitable | None, layers: tuple[int, int] | None
    ) -> None:
        handle, chunk = self._rooms[push.room].handle, self._new_cells(push)
        if handle is not None and chunk is not None:
            handle.push(*chunk, after=computed, layers=layers)

    def _push_rest(self, push: PushTokens, computed: Waitable | None) -> None:
        """Push the layers that were not pushed during the step, and close a complete room."""
        first, end = self._pushed_to, self._tuner.end
        if first < end:
            layers = None if first == self._tuner.first else (first, end)
            self._push_layers(push, computed, layers)
        chunk = self._new_cells(push)
        if chunk is not None:
            self._rooms[push.room].pages.end = chunk[0][1]
        if push.digest is not None and not self._rooms[push.room].awaits_token:
            self._close(push, computed)

    def _close(self, push: PushTokens, computed: Waitable | None, metadata: bytes = b"") -> None:
        handle = self._rooms[push.room].handle
        if handle is not None:
            handle.close(
                metadata,
                tokens=self._tables.paging.cells(push.end),
                states=self._tables.rows(push.blocks),
                after=computed,
                digest=push.digest or b"",
            )

    def handles(self) -> list[Outgoing]:
        """Return the handles of all rooms."""
        return [room.handle for room in self._rooms.values() if room.handle is not None]
