"""Rooms of one decode rank: the scheduler's metadata as calls to a target endpoint.

Runs on the worker's thread. Imports neither vLLM nor torch.

A completed room is reported to vLLM at once. A failed room is reported when nothing can write into
its blocks any more, because vLLM then reuses them. If vLLM's policy fails the request, it is told
earlier through the list of bad blocks, so that it can answer while the blocks are still held.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from kvferry import (
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    Room,
    TargetEndpoint,
)
from kvferry.connectors.vllm.metadata import DecodeMetadata, ReceiveRoom
from kvferry.connectors.vllm.paging import BlockTables
from kvferry.connectors.vllm.stats import RoomCounts

log = logging.getLogger("vllm.kvferry")


@dataclass
class RoomAtTarget:
    """One request's room on one rank. Its handle is None if ``receive`` was refused."""

    order: ReceiveRoom
    handle: Incoming | None
    since: float
    refusal: Failure | None = None
    is_reported: bool = False

    @property
    def failure(self) -> Failure | None:
        """Why the room has failed, if it has."""
        return self.refusal if self.handle is None else self.handle.failure

    @property
    def is_over(self) -> bool:
        """Whether vLLM may use the blocks."""
        if self.handle is None or self.handle.released:
            return True
        return self.handle.outcome is not None and self.handle.failure is None


class Arrivals(NamedTuple):
    """Results since the last call: ended requests, the failed ones, bad blocks, failure reasons."""

    received: set[str]
    failed: set[str]
    bad_blocks: set[int]
    reasons: dict[str, str]


class DecodeRankRooms:
    """Rooms of one decode rank.

    ``fails_early``: report bad blocks before they are free. It requires vLLM's policy "fail" and a
    single cache group.
    """

    def __init__(
        self,
        endpoint: TargetEndpoint,
        tables: BlockTables,
        counts: RoomCounts,
        *,
        fails_early: bool,
    ) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._counts = counts
        self._fails_early = fails_early
        self._rooms: dict[str, RoomAtTarget] = {}
        # Set when a room has ended or is released, or its opening was refused.
        self._changed = threading.Event()

    def __len__(self) -> int:
        return len(self._rooms)

    def begin_step(self, metadata: DecodeMetadata) -> None:
        """Receive, decline and abort rooms as the metadata says."""
        for order in metadata.received:
            self._receive(order)
        for name, prefill in metadata.declined:
            self._decline(name, prefill)
        for request in metadata.aborted:
            room = self._rooms.get(request)
            if room is not None and room.handle is not None:
                room.handle.abort()

    def _decline(self, name: Room, prefill: str) -> None:
        try:
            self._endpoint.decline(name, prefill=prefill)
        except KvferryError as error:
            log.warning("not-declined room=%r reason=%r", name, str(error))

    def _receive(self, order: ReceiveRoom) -> None:
        room = RoomAtTarget(order, None, time.monotonic())
        try:
            room.handle = self._open(order)
        except KvferryError as error:
            # Fail this request only.
            room.refusal = Failure.of(FailureCode.REFUSED, str(error))
        if order.blocks:
            self._rooms[order.request] = room
            self._watch(room.handle)
        elif room.refusal is not None:
            log.warning("not-completed room=%r reason=%r", order.room, room.refusal.message)

    def _open(self, order: ReceiveRoom) -> Incoming:
        paging = self._tables.paging
        num_cells = paging.cells(order.tokens)
        cached = paging.full_cells(order.prefix) if order.blocks else num_cells
        return self._endpoint.receive(
            order.room,
            prefill=order.prefill,
            tokens=num_cells,
            prefix=cached,
            pages=self._tables.wanted(order.blocks, num_cells, cached),
            states=self._tables.rows(order.blocks),
            digest=order.digest,
        )

    def _watch(self, handle: Incoming | None) -> None:
        if handle is None:
            self._changed.set()
            return
        handle.on_end(lambda _: self._changed.set())
        handle.on_release(self._changed.set)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until a room may have ended, if there are rooms.

        This also leaves the GIL to the endpoint's threads, which a busy engine delays.
        """
        if self._rooms:
            self._changed.wait(timeout_s)

    def take_arrivals(self) -> Arrivals:
        """Return the results since the last call. Each is returned once."""
        self._changed.clear()
        arrivals = Arrivals(set(), set(), set(), {})
        for request, room in list(self._rooms.items()):
            if room.failure is not None and not room.is_reported:
                room.is_reported = True
                arrivals.reasons[request] = f"{room.failure.code}: {room.failure.message}"
                if self._fails_early:
                    arrivals.bad_blocks.update(self._unfilled_blocks(room.order))
            if room.is_over:
                del self._rooms[request]
                arrivals.received.add(request)
                if room.failure is not None:
                    arrivals.failed.add(request)
                self._counts.received(room.failure, time.monotonic() - room.since)
        return arrivals

    def _unfilled_blocks(self, order: ReceiveRoom) -> tuple[int, ...]:
        """Return the blocks to fill. With several cache groups, block ids would be ambiguous."""
        blocks = self._tables.paging.blocks_of(order.prefix, order.tokens)
        return order.blocks[0][blocks.first : blocks.end]

    def handles(self) -> list[Incoming]:
        """Return the handles of all rooms."""
        return [room.handle for room in self._rooms.values() if room.handle is not None]
