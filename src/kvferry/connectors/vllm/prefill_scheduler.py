"""Requests that this engine prefills for other instances, on the scheduler's side.

A room opens with the request's first chunk, receives every chunk as it is scheduled, and is closed
with the prompt's last token. The blocks of a finished request are held until every rank has
released the room. A preempted request loses its blocks and therefore its room. It is computed again
in a new room, unless the caller chose the room.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import Room
from kvferry.connectors.vllm.metadata import OpenRoom, PrefillMetadata, PushTokens
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.params import decode_params


def new_room() -> Room:
    """Return a unique room id."""
    return secrets.token_hex(16)


@dataclass
class SourceRequest:
    """A request that is prefilled here. With ``room`` None nobody will receive its cache."""

    room: Room | None
    num_tokens: int
    digest: bytes
    is_room_given: bool = False
    is_open: bool = False
    is_closed: bool = False
    num_computed: int = 0


class PrefillScheduler:
    """Requests to prefill for other instances, and the metadata of the next step."""

    def __init__(
        self, instance: str, selector: BlockSelector, room: Callable[[], Room] = new_room
    ) -> None:
        self._instance = instance
        self._selector = selector
        self._new_room = room
        self._requests: dict[str, SourceRequest] = {}
        # Rooms chosen by callers, by request, until every rank has released them.
        self._given: dict[str, Room] = {}
        self._metadata = PrefillMetadata()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(
        self, request_id: str, room: Room | None, num_tokens: int, digest: bytes
    ) -> bool:
        """Add a request; return False if its room belongs to another request."""
        if room is not None:
            if room in self._given.values():
                return False
            self._given[request_id] = room
        own_room = self._new_room() if room is None else room
        self._requests[request_id] = SourceRequest(own_room, num_tokens, digest, room is not None)
        return True

    def scheduled(self, request_id: str, end: int, blocks: Sequence[Sequence[int]]) -> None:
        """Push the tokens up to ``end``, which the next step computes."""
        request = self._requests[request_id]
        if request.room is None or request.is_closed:
            return
        self._open(request_id, request, request.room)
        end = min(end, request.num_tokens)
        request.is_closed = end == request.num_tokens
        first_block = request.num_computed // self._selector.block_tokens
        request.num_computed = end
        chunk = self._selector.select(blocks, first_block, end)
        digest = request.digest if request.is_closed else None
        self._metadata.pushed.append(PushTokens(request.room, end, first_block, chunk, digest))

    def preempted(self, request_id: str) -> None:
        """Abandon the room of a request that has lost its blocks."""
        request = self._requests.get(request_id)
        if request is None or not request.is_open or request.room is None:
            return
        self._metadata.abandoned.append(request.room)
        room = None if request.is_room_given else self._new_room()
        self._requests[request_id] = SourceRequest(
            room, request.num_tokens, request.digest, request.is_room_given
        )

    def request_finished(self, request_id: str) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to hold the request's blocks, and the parameters for decode."""
        request = self._requests.pop(request_id)
        if request.room is not None and not request.is_closed:
            self._abandon(request_id, request, request.room)
        if request.room is None or not request.is_open:
            self.released(request_id)
            return False, None
        self._metadata.held.append((request_id, request.room))
        params = decode_params(request.room, self._instance, request.num_tokens)
        return True, params if request.is_closed else None

    def _abandon(self, request_id: str, request: SourceRequest, room: Room) -> None:
        """Abandon an incomplete room. A decode may already wait in a room that it has chosen."""
        if request.is_room_given:
            self._open(request_id, request, room)
        if request.is_open:
            self._metadata.abandoned.append(room)

    def _open(self, request_id: str, request: SourceRequest, room: Room) -> None:
        if not request.is_open:
            request.is_open = True
            self._metadata.opened.append(OpenRoom(request_id, room, request.num_tokens))

    def released(self, request_id: str) -> None:
        """Forget the room of a request whose blocks no rank reads any more."""
        self._given.pop(request_id, None)

    def take_metadata(self) -> PrefillMetadata:
        """Return the metadata for the next step, and start a new one."""
        metadata, self._metadata = self._metadata, PrefillMetadata()
        return metadata
