"""The prefill book: which of the scheduler's requests are computed for which room. Pure.

A room opens with a request's first chunk, gets every chunk as it is scheduled, and is closed with
the prompt's last token. A finished request's blocks are held until every rank has said that its
room is released. A preempted request loses its blocks, and so its room; it is computed again in a
new one if nobody else has chosen the room.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import Room
from kvferry.connectors.vllm.metadata import OpenRoom, PrefillMetadata, PushTokens
from kvferry.connectors.vllm.paging import BlockCuts
from kvferry.connectors.vllm.params import for_decode


def new_room() -> Room:
    """A room that nobody else has."""
    return secrets.token_hex(16)


@dataclass
class SourceRequest:
    """A request that is computed here. Without a room it is computed for nobody."""

    room: Room | None
    num_tokens: int
    digest: bytes
    is_given: bool = False
    is_open: bool = False
    is_closed: bool = False
    computed: int = 0


class PrefillScheduler:
    """One scheduler's requests for other instances to decode. ``orders`` are taken each step."""

    def __init__(self, instance: str, cuts: BlockCuts, room: Callable[[], Room] = new_room) -> None:
        self._instance = instance
        self._cuts = cuts
        self._new_room = room
        self._requests: dict[str, SourceRequest] = {}
        # Rooms that were chosen elsewhere, until every rank has released them.
        self._given: dict[str, Room] = {}
        self._taken: set[Room] = set()
        self.orders = PrefillMetadata()

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: str, room: Room | None, num_tokens: int, digest: bytes) -> bool:
        """A request has come; False if the room it was given belongs to another one."""
        given = room is not None
        if room is not None:
            if room in self._taken:
                return False
            self._taken.add(room)
            self._given[request] = room
        taken = self._new_room() if room is None else room
        self._requests[request] = SourceRequest(taken, num_tokens, digest, given)
        return True

    def scheduled(self, request: str, end: int, blocks: Sequence[Sequence[int]]) -> None:
        """The next step computes the request up to token ``end``."""
        known = self._requests[request]
        if known.room is None or known.is_closed:
            return
        if not known.is_open:
            known.is_open = True
            self.orders.opened.append(OpenRoom(request, known.room, known.num_tokens))
        end = min(end, known.num_tokens)
        known.is_closed = end == known.num_tokens
        first = known.computed // self._cuts.block_tokens
        digest = known.digest if known.is_closed else None
        known.computed = end
        chunk = self._cuts.named(blocks, first, end)
        self.orders.pushed.append(PushTokens(known.room, end, first, chunk, digest))

    def preempted(self, request: str) -> None:
        """The request's blocks are gone. What was pushed of them must not be used."""
        known = self._requests.get(request)
        if known is None or not known.is_open or known.room is None:
            return
        self.orders.abandoned.append(known.room)
        fresh = None if known.is_given else self._new_room()
        self._requests[request] = SourceRequest(
            fresh, known.num_tokens, known.digest, known.is_given
        )

    def finished(self, request: str) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must be held, and what decode is to be asked with."""
        known = self._requests.pop(request)
        if known.room is None:
            self.released(request)
            return False, None
        if not known.is_closed:
            self._give_up(request, known)
        if not known.is_open:
            self.released(request)
            return False, None
        self.orders.held.append((request, known.room))
        answer = for_decode(known.room, self._instance, known.num_tokens)
        return True, answer if known.is_closed else None

    def _give_up(self, request: str, known: SourceRequest) -> None:
        """It will never be complete. Who waits in a given room hears so, even if it never began."""
        assert known.room is not None
        if known.is_given and not known.is_open:
            known.is_open = True
            self.orders.opened.append(OpenRoom(request, known.room, known.num_tokens))
        if known.is_open:
            self.orders.abandoned.append(known.room)

    def released(self, request: str) -> None:
        """No rank reads the request's blocks any more."""
        room = self._given.pop(request, None)
        if room is not None:
            self._taken.discard(room)

    def take_metadata(self) -> PrefillMetadata:
        """What has to be done, once."""
        orders, self.orders = self.orders, PrefillMetadata()
        return orders
