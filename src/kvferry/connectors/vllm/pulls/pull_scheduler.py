"""Pulls of cached prefixes on the scheduler's side: what other instances ask for, and what we ask.

A pull is complete before vLLM schedules its request. The connector takes blocks from vLLM's pool,
the ranks receive the prefix into them, and the filled ones join vLLM's prefix cache, where vLLM
then finds them as if they had been computed here. Whatever the holder lacks, vLLM computes. Neither
side's blocks return to the pool before every rank has released its room.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry import PrefixChain, Room
from kvferry.connectors.vllm.metadata import PullMetadata, PullPrefix, RankReport, SendPrefix
from kvferry.connectors.vllm.prefill_scheduler import new_room
from kvferry.connectors.vllm.pulls.lookup_channel import LookupQuestion, LookupServer
from kvferry.connectors.vllm.pulls.prefix_cache import PrefixCache

log = logging.getLogger("vllm.kvferry")


class PrefixHolder:
    """Prefixes that other instances pull from here, by room."""

    def __init__(self, cache: PrefixCache, lookups: LookupServer) -> None:
        self.cache = cache
        self.lookups = lookups
        self._pinned: dict[Room, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    def answer_lookups(self) -> list[SendPrefix]:
        """Pin what is asked for, and return it for every rank to send."""
        sent = []
        while (pending := self.lookups.take()) is not None:
            order = self._pin(pending.question)
            if order is not None:
                sent.append(order)
            pending.held.set_result(0 if order is None else order.tokens)
        return sent

    def _pin(self, asked: LookupQuestion) -> SendPrefix | None:
        held = self.cache.pin(asked.chain)
        tokens = len(held.blocks) * self.cache.block_tokens
        if tokens <= asked.prefix or asked.room in self._pinned:
            self.cache.unpin(held.blocks)
            return None
        self._pinned[asked.room] = held.blocks
        blocks = (tuple(block.block_id for block in held.blocks),)
        return SendPrefix(asked.room, tokens, blocks, held.digest, asked.deadline_s)

    def released(self, room: Room) -> None:
        """Let vLLM evict a prefix that no rank reads any more."""
        self.cache.unpin(self._pinned.pop(room))


@dataclass
class PullRequest:
    """A request that waits for a pull. ``room`` is None until its prefix is asked for."""

    request: Any
    holder: str
    chain: PrefixChain
    room: Room | None = None
    is_over: bool = False


@dataclass
class PullRoom:
    """Blocks that ranks may write, of which the first ``num_cached`` were cached before.

    ``request`` is None once nobody wants them. ``pulled`` has the tokens of each rank that is done.
    """

    request: PullRequest | None
    blocks: list[Any]
    num_cached: int
    pulled: list[int | None] = field(default_factory=list)


class PrefixAsker:
    """Requests whose prompt another instance may have cached in part."""

    def __init__(
        self, cache: PrefixCache, num_ranks: int, room: Callable[[], Room] = new_room
    ) -> None:
        self._cache = cache
        self._num_ranks = num_ranks
        self._new_room = room
        self._requests: dict[str, PullRequest] = {}
        self._rooms: dict[Room, PullRoom] = {}
        self._orders: list[PullPrefix] = []
        self._aborted: list[Room] = []

    def __len__(self) -> int:
        return len(self._rooms)

    def add_request(self, request: Any, holder: str, chain: PrefixChain) -> None:
        """Add a request whose prompt has this chain."""
        self._requests[request.request_id] = PullRequest(request, holder, chain)

    def is_pulling(self, request: Any, num_computed: int) -> bool:
        """Whether a request must wait. ``num_computed`` of its tokens are cached here.

        The first call asks for the rest.
        """
        pull = self._requests.get(request.request_id)
        if pull is None or pull.is_over:
            return False
        return pull.room is not None or self._begin(pull, num_computed)

    def _begin(self, pull: PullRequest, num_computed: int) -> bool:
        # vLLM computes at least one token of a request.
        size = self._cache.block_tokens
        num_blocks = min(pull.chain.num_tokens, pull.request.num_tokens - 1) // size
        num_cached = num_computed // size
        blocks = self._cache.extend(pull.request, num_cached, num_blocks)
        if blocks is None:
            # Compute it. vLLM decides when there is room, and in which order.
            pull.is_over = True
            return False
        pull.room = self._new_room()
        self._rooms[pull.room] = PullRoom(pull, blocks, num_cached)
        ids = (tuple(block.block_id for block in blocks),)
        chain = pull.chain.first(num_blocks * size)
        self._orders.append(PullPrefix(pull.room, pull.holder, chain, num_cached * size, ids))
        return True

    def pulled(self, room: Room, tokens: Sequence[int | None]) -> None:
        """Record the tokens that some ranks have received; None after a failure.

        The request goes on when all ranks have them. If one has failed, the others give up.
        """
        asked = self._rooms[room]
        asked.pulled += tokens
        if None in tokens:
            self._aborted.append(room)
        if len(asked.pulled) < self._num_ranks or asked.request is None:
            return
        asked.request.is_over = True
        request, num_tokens = asked.request.request, min(each or 0 for each in asked.pulled)
        self._cache.add(request, asked.blocks, asked.num_cached, num_tokens)
        log.debug("pulled request=%s tokens=%d", request.request_id, num_tokens)

    def released(self, room: Room) -> None:
        """Return blocks that no rank writes any more."""
        self._cache.free(self._rooms.pop(room).blocks)

    def request_finished(self, request_id: str) -> None:
        """Abort the pull of a finished request if it has not ended."""
        pull = self._requests.pop(request_id, None)
        if pull is not None and pull.room is not None and not pull.is_over:
            self._rooms[pull.room].request = None
            self._aborted.append(pull.room)

    def take_orders(self) -> tuple[list[PullPrefix], list[Room]]:
        """Return the prefixes to pull and the rooms to abort since the last call."""
        orders, self._orders = self._orders, []
        aborted, self._aborted = self._aborted, []
        return orders, aborted


class PullScheduler:
    """Both directions of pulls. ``holder`` or ``asker`` is None if the engine lacks that role."""

    def __init__(
        self, num_ranks: int, holder: PrefixHolder | None, asker: PrefixAsker | None
    ) -> None:
        self.holder = holder
        self.asker = asker
        self._num_ranks = num_ranks
        self._released: Counter[Room] = Counter()

    def needs_step(self) -> bool:
        """Return whether the engine must step although it may have no request."""
        waits = self.holder is not None and (self.holder.lookups or self.holder)
        return bool(waits or self.asker)

    def report(self, report: RankReport) -> None:
        """Handle what ranks have received and released."""
        for room, tokens in report.pulled.items():
            if self.asker is not None:
                self.asker.pulled(room, tokens)
        for side, rooms in ((self.holder, report.sent), (self.asker, report.received)):
            for room in self._released_everywhere(rooms):
                if side is not None:
                    side.released(room)

    def _released_everywhere(self, rooms: Mapping[Room, int]) -> list[Room]:
        self._released.update(rooms)
        found = [room for room in rooms if self._released[room] == self._num_ranks]
        for room in found:
            del self._released[room]
        return found

    def take_metadata(self) -> PullMetadata:
        """Return the metadata for the next step, and start a new one."""
        address, sent = None, []
        if self.holder is not None:
            address, sent = self.holder.lookups.address, self.holder.answer_lookups()
        asked, aborted = ([], []) if self.asker is None else self.asker.take_orders()
        return PullMetadata(address, sent, asked, aborted)
