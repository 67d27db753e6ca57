"""A decode rank's rooms: the scheduler's orders as calls to a target endpoint.

Belongs to the worker's thread. Imports neither vLLM nor torch.

A room that is done is told of at once. One that has failed is told of when nothing can write into
its blocks any more, because vLLM then computes into them, or gives them away. Where a failure
fails the request, vLLM may know before that, and answers while the blocks are still held.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

from kvferry import (
    Failure,
    FailureCode,
    Incoming,
    KvferryError,
    Room,
    Span,
    TargetEndpoint,
    touched_pages,
)
from kvferry.connectors.vllm.metadata import DecodeMetadata, ReceiveRoom
from kvferry.connectors.vllm.paging import BlockTables
from kvferry.connectors.vllm.stats import RoomCounts

log = logging.getLogger("vllm.kvferry")


@dataclass
class RoomAtTarget:
    """One request's room on one rank. Without a handle it could not begin."""

    order: ReceiveRoom
    handle: Incoming | None
    since: float
    refusal: Failure | None = None
    is_told: bool = False

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None if it did not, or not yet."""
        return self.refusal if self.handle is None else self.handle.failure

    @property
    def is_over(self) -> bool:
        """Whether vLLM may have the blocks."""
        if self.handle is None or self.handle.released:
            return True
        return self.handle.outcome is not None and self.handle.failure is None


class Arrivals(NamedTuple):
    """What has ended since the last look: requests, those of them that failed, bad blocks."""

    received: set[str]
    failed: set[str]
    bad_blocks: set[int]
    reasons: dict[str, str]


class DecodeRankRooms:
    """All rooms of one decode rank. ``fails_early``: vLLM's policy "fail", one cache group."""

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

    def __len__(self) -> int:
        return len(self._rooms)

    def take(self, orders: DecodeMetadata) -> None:
        """Do what a step says."""
        for order in orders.received:
            self._receive(order)
        for room, prefill in orders.declined:
            self._decline(room, prefill)
        for request in orders.aborted:
            known = self._rooms.get(request)
            if known is not None and known.handle is not None:
                known.handle.abort()

    def _decline(self, room: Room, prefill: str) -> None:
        try:
            self._endpoint.decline(room, prefill=prefill)
        except KvferryError as error:
            log.warning("not-declined room=%r reason=%r", room, str(error))

    def _receive(self, order: ReceiveRoom) -> None:
        known = RoomAtTarget(order, None, time.monotonic())
        try:
            known.handle = self._begin(order)
        except KvferryError as error:
            # What can't begin fails its own request, and nothing else.
            known.refusal = Failure.of(FailureCode.REFUSED, str(error))
        if order.blocks:
            self._rooms[order.request] = known
        elif known.refusal is not None:
            log.warning("not-completed room=%r reason=%r", order.room, known.refusal.message)

    def _begin(self, order: ReceiveRoom) -> Incoming:
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

    def arrivals(self) -> Arrivals:
        """What vLLM may be told, each thing once."""
        found = Arrivals(set(), set(), set(), {})
        for request, known in list(self._rooms.items()):
            if known.failure is not None and not known.is_told:
                known.is_told = True
                found.reasons[request] = f"{known.failure.code}: {known.failure.message}"
                if self._fails_early:
                    found.bad_blocks.update(self._unfilled(known.order))
            if known.is_over:
                self._end(known, found)
                del self._rooms[request]
        return found

    def _end(self, known: RoomAtTarget, found: Arrivals) -> None:
        found.received.add(known.order.request)
        if known.failure is not None:
            found.failed.add(known.order.request)
        self._counts.received(known.failure, time.monotonic() - known.since)

    def _unfilled(self, order: ReceiveRoom) -> tuple[int, ...]:
        """Only asked for where vLLM has one cache group: elsewhere blocks' numbers say nothing."""
        blocks = touched_pages(Span(order.prefix, order.tokens), self._tables.paging.block_tokens)
        return order.blocks[0][blocks.first : blocks.end]

    def handles(self) -> list[Incoming]:
        """Of all rooms that are awaited here."""
        return [known.handle for known in self._rooms.values() if known.handle is not None]
