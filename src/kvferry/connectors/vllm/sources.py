"""A prefill rank's rooms: the scheduler's orders as calls to a source endpoint.

Belongs to the worker's thread. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvferry import KvferryError, LayerPushTuner, Outgoing, Room, SourceEndpoint, Waitable
from kvferry.connectors.vllm.metadata import OpenRoom, PrefillMetadata, PushTokens
from kvferry.connectors.vllm.paging import BlockTables, PagesByGroup, PushedPages
from kvferry.connectors.vllm.stats import RoomCounts

log = logging.getLogger("vllm.kvferry")

# How long the owner's thread may take to hear that a room is given up; it needs no peer for that.
ABANDON_S = 10.0


@dataclass
class RoomAtSource:
    """One room of one rank. Without a handle it could not be opened, and holds nothing."""

    request: str
    pages: PushedPages
    handle: Outgoing | None
    # The scheduler waits until the blocks are free, or does not care any more.
    is_held: bool = False
    is_abandoned: bool = False

    @property
    def is_released(self) -> bool:
        """Whether nothing reads its pages any more."""
        return self.handle is None or self.handle.released


class PrefillRankRooms:
    """All rooms of one prefill rank.

    ``pace`` says how many layers are pushed at a time while a step computes. Whether the engine
    tells of its layers is not known before (a captured graph does not): what was not pushed by
    the end of the step is pushed then.
    """

    def __init__(
        self,
        endpoint: SourceEndpoint,
        tables: BlockTables,
        counts: RoomCounts,
        pace: LayerPushTuner,
    ) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._counts = counts
        self._pace = pace
        # Of the step that computes: how many layers to push at a time, and up to which they were.
        self._per_push = pace.num_layers
        self._computed_to = self._pushed_to = pace.first
        self._rooms: dict[Room, RoomAtSource] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def before(self, orders: PrefillMetadata) -> None:
        """Before the step computes: give up what is overwritten, announce what is computed."""
        for order in orders.opened:
            self._open(order)
        for room in orders.abandoned:
            self._abandon(room)
        for push in orders.pushed:
            self._prepare(push)
        self._computed_to = self._pushed_to = self._pace.first
        if orders.pushed:
            self._begin_step(orders)

    def _begin_step(self, orders: PrefillMetadata) -> None:
        new = [self._ahead(push) for push in orders.pushed]
        cells = sum(ahead[0][1] - ahead[0][0] for ahead in new if ahead is not None)
        self._pace.begin(max(1, cells))
        self._per_push = self._pace.per_push(cells, cells, self._endpoint.link_cost)

    def computed(
        self, orders: PrefillMetadata, layer: int, event: Callable[[], Waitable | None]
    ) -> None:
        """While the step computes: a layer is in its blocks once ``event`` has happened.

        Layers that do not come one after another wait for the end of the step.
        """
        if not orders.pushed or layer != self._computed_to:
            return
        self._computed_to = end = layer + 1
        if end == self._pace.end:
            self._pace.finish()
        whole = self._per_push >= self._pace.num_layers
        if whole or (end - self._pushed_to < self._per_push and end != self._pace.end):
            return
        computed = event()
        for push in orders.pushed:
            self._push_cells(push, computed, (self._pushed_to, end))
        self._pushed_to = end

    def after(self, orders: PrefillMetadata, computed: Waitable | None) -> None:
        """The step's tokens are in their blocks once ``computed`` has happened."""
        for push in orders.pushed:
            self._push(push, computed)
        for request, room in orders.held:
            known = self._rooms.setdefault(
                room, RoomAtSource(request, PushedPages(self._tables, 0), None)
            )
            known.is_held = True

    def sent(self) -> set[str]:
        """Requests whose blocks are free now, each once."""
        over = [
            (room, known)
            for room, known in self._rooms.items()
            if known.is_released and (known.is_held or known.is_abandoned)
        ]
        for room, known in over:
            del self._rooms[room]
            if known.handle is not None:
                self._counts.sent(known.handle)
        return {known.request for _, known in over if known.is_held}

    def _open(self, order: OpenRoom) -> None:
        handle = None
        try:
            handle = self._endpoint.open(order.room)
        except KvferryError as error:
            # Its request is computed all the same; who waits for the room hears nothing of it.
            log.warning("room-refused room=%r reason=%r", order.room, str(error))
        pages = PushedPages(self._tables, order.tokens)
        self._rooms[order.room] = RoomAtSource(order.request, pages, handle)

    def _abandon(self, room: Room) -> None:
        """Give up a room whose blocks are about to be somebody else's.

        Once the room has ended here nothing of it can become Done at a target any more, so
        whatever a write that is under way still reads does no harm.
        """
        known = self._rooms.get(room)
        if known is None or known.handle is None:
            return
        known.is_abandoned = True
        known.handle.abort()
        try:
            known.handle.wait(ABANDON_S)
        except TimeoutError:
            log.error("not-abandoned room=%r: kvferry's own thread does not answer", room)

    def _prepare(self, push: PushTokens) -> None:
        known = self._rooms[push.room]
        known.pages.extend(push.first_block, push.blocks)
        ahead = self._ahead(push)
        if known.handle is not None and ahead is not None:
            known.handle.prepare(*ahead)

    def _ahead(self, push: PushTokens) -> tuple[tuple[int, int], PagesByGroup] | None:
        """The cells that the step completes, and their pages."""
        return self._rooms[push.room].pages.ahead(push.end, last=push.digest is not None)

    def _push_cells(
        self, push: PushTokens, computed: Waitable | None, layers: tuple[int, int] | None
    ) -> None:
        handle, ahead = self._rooms[push.room].handle, self._ahead(push)
        if handle is not None and ahead is not None:
            handle.push(*ahead, after=computed, layers=layers)

    def _push(self, push: PushTokens, computed: Waitable | None) -> None:
        """Push what the step has not pushed while it computed."""
        known, (first, end) = self._rooms[push.room], (self._pushed_to, self._pace.end)
        if known.handle is None:
            return
        if first < end:
            some = None if first == self._pace.first else (first, end)
            self._push_cells(push, computed, some)
        ahead = self._ahead(push)
        if ahead is not None:
            known.pages.end = ahead[0][1]
        if push.digest is not None:
            known.handle.close(
                tokens=self._tables.paging.cells(push.end),
                states=self._tables.rows(push.blocks),
                after=computed,
                digest=push.digest,
            )

    def handles(self) -> list[Outgoing]:
        """Of all rooms that are held here."""
        return [known.handle for known in self._rooms.values() if known.handle is not None]
