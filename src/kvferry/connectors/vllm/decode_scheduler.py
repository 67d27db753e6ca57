"""The decode book: which of the scheduler's requests wait for which room. Pure.

A request is asked for once: after a failure it is computed here, or fails, as vLLM's policy says.
A request that ends before it was asked for, or that has all of its prompt cached, still tells
prefill, so that it lets go of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import Room
from kvferry.connectors.vllm.metadata import DecodeMetadata, ReceiveRoom
from kvferry.connectors.vllm.paging import BlockCuts
from kvferry.connectors.vllm.params import DecodeParams


@dataclass
class TargetRequest:
    """A request whose prompt's cache comes from elsewhere."""

    asked: DecodeParams
    num_tokens: int
    digest: bytes
    is_asked_for: bool = False
    is_waiting: bool = False


class DecodeScheduler:
    """One scheduler's requests that others compute. ``orders`` are taken each step."""

    def __init__(self, cuts: BlockCuts) -> None:
        self._cuts = cuts
        self._requests: dict[str, TargetRequest] = {}
        self._rooms: set[Room] = set()
        self.orders = DecodeMetadata()

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: str, asked: DecodeParams, num_tokens: int, digest: bytes) -> bool:
        """A request has come, whose first ``num_tokens`` tokens are in that room.

        False if another one waits for the same room: several answers to one prompt are several
        requests with the same parameters.
        """
        if asked.room in self._rooms:
            return False
        self._rooms.add(asked.room)
        self._requests[request] = TargetRequest(asked, num_tokens, digest)
        return True

    def missing(self, request: str, num_computed: int) -> int:
        """How many tokens its room would bring beyond those that are cached here."""
        known = self._requests.get(request)
        if known is None or known.is_asked_for:
            return 0
        return max(0, known.num_tokens - num_computed)

    def allocated(self, request: str, num_external: int, blocks: Sequence[Sequence[int]]) -> None:
        """The request has its blocks, and so many tokens of them come from its room."""
        known = self._requests.get(request)
        if known is None or known.is_asked_for:
            return
        known.is_asked_for = True
        if not num_external:
            self._receive_nothing(request, known)
            return
        known.is_waiting = True
        prefix = known.num_tokens - num_external
        self.orders.received.append(
            ReceiveRoom(
                *(request, known.asked.room, known.asked.prefill, known.num_tokens, prefix),
                self._cuts.named(blocks, 0, known.num_tokens),
                known.digest,
            )
        )

    def failed(self, request: str) -> None:
        """A rank has failed: the others need not go on."""
        known = self._requests.get(request)
        if known is not None and known.is_waiting:
            self.orders.aborted.append(request)

    def ended(self, request: str) -> None:
        """All ranks are done with its room."""
        known = self._requests.get(request)
        if known is not None:
            known.is_waiting = False

    def finished(self, request: str) -> None:
        """The request is over, whatever became of its room."""
        known = self._requests.pop(request, None)
        if known is None:
            return
        self._rooms.discard(known.asked.room)
        if known.is_waiting:
            self.orders.aborted.append(request)
        elif not known.is_asked_for:
            self.orders.declined.append((known.asked.room, known.asked.prefill))

    def _receive_nothing(self, request: str, known: TargetRequest) -> None:
        """Complete the room of a prompt that is all cached here, so that prefill frees it."""
        tokens, asked = known.num_tokens, known.asked
        self.orders.received.append(
            ReceiveRoom(request, asked.room, asked.prefill, tokens, tokens, (), known.digest)
        )

    def take_metadata(self) -> DecodeMetadata:
        """What has to be done, once."""
        orders, self.orders = self.orders, DecodeMetadata()
        return orders
