"""Rooms of pulls on one rank. Runs on the worker's thread. Imports neither vLLM nor torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import (
    Incoming,
    KvferryError,
    Outgoing,
    Room,
    SourceEndpoint,
    TargetEndpoint,
    Waitable,
)
from kvferry.connectors.vllm.metadata import PullMetadata, PullPrefix, SendPrefix
from kvferry.connectors.vllm.paging import BlockTables, PushedPages
from kvferry.connectors.vllm.pulls.lookup_channel import LookupClient
from kvferry.connectors.vllm.stats import RoomCounts

log = logging.getLogger("vllm.kvferry")


class SentPrefixes:
    """Prefixes that one rank sends to other instances.

    vLLM may list blocks as cached that a step has yet to compute. They are sent after the step in
    which the scheduler found them.
    """

    def __init__(self, endpoint: SourceEndpoint, tables: BlockTables, counts: RoomCounts) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._counts = counts
        self._found: list[SendPrefix] = []
        self._rooms: dict[Room, Outgoing | None] = {}
        self._lookups = LookupClient()

    def answer_pulls(self) -> None:
        """Let this rank, the lead, answer pulls. A cell of several tokens can't be cut exactly."""
        if not self._tables.paging.whole_pages:
            self._endpoint.on_pull(self._lookups.holds)

    def begin_step(self, metadata: PullMetadata) -> None:
        """Take a step's orders."""
        self._lookups.address = metadata.address
        self._found += metadata.sent

    @property
    def is_waiting(self) -> bool:
        """Whether prefixes wait for ``send``."""
        return bool(self._found)

    def send(self, computed: Waitable | None) -> None:
        """Send what is computed once ``computed`` has happened."""
        found, self._found = self._found, []
        for order in found:
            try:
                self._rooms[order.room] = self._open(order, computed)
            except KvferryError as error:
                log.warning("prefix-not-sent room=%r reason=%r", order.room, str(error))
                self._rooms[order.room] = None

    def _open(self, order: SendPrefix, computed: Waitable | None) -> Outgoing:
        handle = self._endpoint.open(order.room, deadline_s=order.deadline_s)
        pages = PushedPages(self._tables, order.tokens)
        pages.extend(0, order.blocks)
        cells = pages.new_cells(order.tokens, last=True)
        if cells is not None:
            handle.push(*cells, after=computed)
        handle.close(tokens=order.tokens, after=computed, digest=order.digest)
        return handle

    def take_released(self) -> list[Room]:
        """Return the rooms whose blocks are not read any more. Each is returned once."""
        over = [name for name, room in self._rooms.items() if room is None or room.released]
        for name in over:
            handle = self._rooms.pop(name)
            if handle is not None:
                self._counts.sent(handle)
        return over


@dataclass
class PulledRoom:
    """A pull of one rank. Its handle is None if it was refused."""

    handle: Incoming | None
    since: float
    is_reported: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the room has an outcome."""
        return self.handle is None or self.handle.outcome is not None

    @property
    def is_released(self) -> bool:
        """Whether nothing writes into the blocks any more."""
        if self.handle is None or self.handle.released:
            return True
        return self.is_done and self.handle.failure is None


class PulledPrefixes:
    """Prefixes that one rank receives from other instances, within ``deadline_s``."""

    def __init__(
        self, endpoint: TargetEndpoint, tables: BlockTables, counts: RoomCounts, deadline_s: float
    ) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._counts = counts
        self._deadline_s = deadline_s
        self._rooms: dict[Room, PulledRoom] = {}

    def begin_step(self, asked: Iterable[PullPrefix], aborted: Iterable[Room]) -> None:
        """Ask for prefixes, and abort rooms."""
        for order in asked:
            self._rooms[order.room] = PulledRoom(self._pull(order), time.monotonic())
        for name in aborted:
            room = self._rooms.get(name)
            if room is not None and room.handle is not None:
                room.handle.abort()

    def _pull(self, order: PullPrefix) -> Incoming | None:
        if self._tables.paging.whole_pages:
            return None
        try:
            return self._endpoint.pull(
                order.room,
                holder=order.holder,
                chain=order.chain,
                prefix=order.prefix,
                pages=self._tables.wanted(order.blocks, order.chain.num_tokens, order.prefix),
                deadline_s=self._deadline_s,
            )
        except KvferryError as error:
            log.warning("not-pulled room=%r reason=%r", order.room, str(error))
            return None

    def take_pulled(self) -> dict[Room, int | None]:
        """Return the tokens of rooms that have ended; None after a failure.

        Each is returned once.
        """
        pulled: dict[Room, int | None] = {}
        for name, room in self._rooms.items():
            if not room.is_reported and room.is_done:
                room.is_reported = True
                pulled[name] = self._ended(room)
        return pulled

    def _ended(self, room: PulledRoom) -> int | None:
        if room.handle is None:
            return None
        failure = room.handle.failure
        self._counts.received(failure, time.monotonic() - room.since)
        if failure is None:
            return room.handle.num_tokens
        reason = f"{failure.code}: {failure.message}"
        log.warning("not-pulled room=%r reason=%r", room.handle.room, reason)
        return None

    def take_released(self) -> list[Room]:
        """Return the rooms whose blocks are not written any more. Each is returned once."""
        over = [name for name, room in self._rooms.items() if room.is_reported and room.is_released]
        for name in over:
            del self._rooms[name]
        return over
