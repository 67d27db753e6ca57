"""Requests whose prompt was prefilled elsewhere, on the scheduler's side.

The cache of a request is requested once. After a failure vLLM recomputes or fails the request,
depending on its policy. A request that ends before its cache was requested, or whose prompt is
already cached, still notifies prefill, so that prefill can free its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvferry import Room
from kvferry.connectors.vllm.metadata import DecodeMetadata, ReceiveRoom
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.params import DecodeParams

# How long a step that computes nothing waits for a room to end. vLLM sleeps 1 ms after it. If the
# step asks for computed prompts, it waits for the transfer of short ones.
IDLE_WAIT_S, COMPUTED_WAIT_S = 1e-3, 4e-3


@dataclass
class TargetRequest:
    """A request whose prompt's cache comes from another instance."""

    params: DecodeParams
    num_tokens: int
    digest: bytes
    is_requested: bool = False
    is_waiting: bool = False
    num_external: int = 0


class DecodeScheduler:
    """Requests that another instance prefills, and the metadata of the next step.

    ``max_rooms`` and ``max_tokens`` limit the rooms that are received at a time, and their tokens.
    """

    def __init__(
        self,
        selector: BlockSelector,
        max_rooms: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._selector = selector
        self._max_rooms = inf if max_rooms is None else max_rooms
        self._max_tokens = inf if max_tokens is None else max_tokens
        self._requests: dict[str, TargetRequest] = {}
        self._rooms: set[Room] = set()
        self._metadata = DecodeMetadata()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(
        self, request_id: str, params: DecodeParams, num_tokens: int, digest: bytes
    ) -> bool:
        """Add a request; return False if another request waits for the same room.

        That happens with ``n`` > 1: each completion is a request with the same parameters.
        """
        if params.room in self._rooms:
            return False
        self._rooms.add(params.room)
        self._requests[request_id] = TargetRequest(params, num_tokens, digest)
        return True

    def num_external_tokens(self, request_id: str, num_computed: int) -> int | None:
        """Return how many tokens the room has beyond those that are cached here.

        None if it must wait until another room has ended. One room may always be received.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_requested:
            return 0
        num_external = max(0, request.num_tokens - num_computed)
        return None if num_external and self._exceeds_limits(num_external) else num_external

    def _exceeds_limits(self, num_external: int) -> bool:
        received = [each.num_external for each in self._requests.values() if each.is_waiting]
        too_many = len(received) >= self._max_rooms
        too_long = sum(received) + num_external > self._max_tokens
        return bool(received) and (too_many or too_long)

    def blocks_allocated(
        self, request_id: str, num_external: int, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Request the cache of the last ``num_external`` tokens into the allocated blocks.

        If all tokens are cached here, the room is completed without data, so that prefill can
        free its blocks.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_requested:
            return
        request.is_requested = True
        request.is_waiting = num_external > 0
        request.num_external = num_external
        num_tokens, room, prefill = request.num_tokens, request.params.room, request.params.prefill
        chosen = self._selector.select(blocks, 0, num_tokens) if num_external else ()
        prefix = num_tokens - num_external
        # Only prefill's answer says how many tokens the room has.
        is_computed = request.params.tokens is not None
        order = (request_id, room, prefill, num_tokens, prefix, chosen, request.digest)
        self._metadata.received.append(ReceiveRoom(*order, is_computed))

    def failed(self, request_id: str) -> None:
        """Abort the room on all ranks after one of them has failed."""
        request = self._requests.get(request_id)
        if request is not None and request.is_waiting:
            self._metadata.aborted.append(request_id)

    def ended(self, request_id: str) -> None:
        """Record that all ranks have ended the room."""
        request = self._requests.get(request_id)
        if request is not None:
            request.is_waiting = False

    def request_finished(self, request_id: str) -> None:
        """Abort or decline the room of a finished request if it has not ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._rooms.discard(request.params.room)
        if request.is_waiting:
            self._metadata.aborted.append(request_id)
        elif not request.is_requested:
            self._metadata.declined.append((request.params.room, request.params.prefill))

    def take_metadata(self, *, may_wait: bool = False) -> DecodeMetadata:
        """Return the metadata for the next step, and start a new one.

        ``may_wait``: the step computes nothing.
        """
        metadata, self._metadata = self._metadata, DecodeMetadata()
        if may_wait:
            is_near = any(order.is_computed for order in metadata.received)
            metadata.wait_s = COMPUTED_WAIT_S if is_near else IDLE_WAIT_S
        return metadata
