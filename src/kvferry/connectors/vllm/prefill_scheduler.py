"""Requests that this engine prefills for other instances, on the scheduler's side.

A room opens with the request's first chunk, receives every chunk as it is scheduled, and is closed
with the prompt's last token. Workers push a late room when the request has ended (``held``), but
not in an idle step right after that: vLLM's output thread needs the GIL then, to send the answer.
The blocks of a finished request are held until every rank has released the room. A preempted
request loses its blocks and therefore its room. It is computed again in a new room, unless the
caller chose the room.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import Room
from kvferry.connectors.vllm.metadata import HeldRoom, OpenRoom, PrefillMetadata, PushTokens
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
    sends_token: bool = False
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
        # Late rooms that are not pushed yet, and whether they have waited for a step.
        self._answered: list[HeldRoom] = []
        self._has_waited = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(
        self,
        request_id: str,
        room: Room | None,
        num_tokens: int,
        digest: bytes,
        *,
        sends_token: bool = False,
    ) -> bool:
        """Add a request; return False if its room belongs to another request.

        ``sends_token``: the room's metadata has the first token of the answer.
        """
        if room is not None:
            if room in self._given.values():
                return False
            self._given[request_id] = room
        own_room = self._new_room() if room is None else room
        self._requests[request_id] = SourceRequest(
            own_room, num_tokens, digest, room is not None, sends_token
        )
        return True

    def scheduled(
        self,
        request_id: str,
        end: int,
        blocks: Sequence[Sequence[int]],
        *,
        may_repeat: bool = False,
    ) -> None:
        """Push the tokens up to ``end``, which the next step computes.

        ``may_repeat``: vLLM may compute the step's new requests again.
        """
        request = self._requests[request_id]
        if request.room is None or request.is_closed:
            return
        self._open(request_id, request, request.room, may_repeat=may_repeat)
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
        self._lose(request, request.room)
        room = None if request.is_room_given else self._new_room()
        self._requests[request_id] = SourceRequest(
            room, request.num_tokens, request.digest, request.is_room_given, request.sends_token
        )

    def request_finished(
        self, request_id: str, *, is_answered: bool, token: int | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to hold the request's blocks, and the parameters for decode.

        ``is_answered``: the request was not aborted, so that its answer can reach a decode.
        ``token``: the first token of the answer.
        """
        request = self._requests.pop(request_id)
        room = request.room
        if room is None:
            self.released(request_id)
            return False, None
        if not request.is_room_given:
            return self._own_room_finished(request_id, request, room, is_answered, token)
        if not request.is_closed or (request.sends_token and token is None):
            self._abandon(request_id, request, room)
        self._metadata.held.append(HeldRoom(request_id, room, token))
        params = decode_params(room, self._instance, request.num_tokens)
        return True, params if request.is_closed else None

    def _own_room_finished(
        self,
        request_id: str,
        request: SourceRequest,
        room: Room,
        is_answered: bool,
        token: int | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Push a room that only the answer names, or forget it: nobody waits for it."""
        if is_answered and request.is_closed:
            self._answered.append(HeldRoom(request_id, room, token))
            return True, decode_params(room, self._instance, request.num_tokens)
        if request.is_open:
            self._lose(request, room)
        return False, None

    def _abandon(self, request_id: str, request: SourceRequest, room: Room) -> None:
        """Abandon an incomplete room that the caller chose."""
        self._open(request_id, request, room)
        self._lose(request, room)

    def _lose(self, request: SourceRequest, room: Room) -> None:
        lost = self._metadata.abandoned if request.is_room_given else self._metadata.forgotten
        lost.append(room)

    def _open(
        self, request_id: str, request: SourceRequest, room: Room, *, may_repeat: bool = False
    ) -> None:
        if not request.is_open:
            request.is_open = True
            is_late = may_repeat or not request.is_room_given
            awaits_token = request.sends_token
            opened = OpenRoom(request_id, room, request.num_tokens, is_late, awaits_token)
            self._metadata.opened.append(opened)

    def released(self, request_id: str) -> None:
        """Forget the room of a request whose blocks no rank reads any more."""
        self._given.pop(request_id, None)

    def take_metadata(self, *, may_wait: bool = False) -> PrefillMetadata:
        """Return the metadata for the next step, and start a new one.

        ``may_wait``: the step computes nothing, so that the next one follows soon.
        """
        metadata, self._metadata = self._metadata, PrefillMetadata()
        if not may_wait or self._has_waited:
            metadata.held += self._answered
            self._answered = []
        self._has_waited = bool(self._answered)
        return metadata
