"""The negative control: a connector that says of some rooms that they came, and moves nothing.

Of some others it moves all but the recurrent state, which it puts where nobody reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.connectors.vllm.connector import KVFerryConnector
from kvferry.connectors.vllm.metadata import BlocksByGroup
from kvferry.connectors.vllm.paging import NULL_BLOCK
from tests_vllm.servers import SKIPPED, STATELESS


class SkippingConnector(KVFerryConnector):
    """Takes a room whose id begins with the prefix for received."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._orders.decode
        skipped = [order for order in orders.received if str(order.room).startswith(SKIPPED)]
        # Prefill hears that nobody comes, or it would hold its blocks, and vLLM would step for
        # them, until the room's deadline.
        orders.received = [
            replace(order, prefix=order.tokens, blocks=()) if order in skipped else order
            for order in orders.received
        ]
        orders.received = [
            replace(order, blocks=self._stateless(order.blocks))
            if str(order.room).startswith(STATELESS)
            else order
            for order in orders.received
        ]
        self._skipped: set[str] = {order.request for order in skipped}
        super().start_load_kv(forward_context, **kwargs)

    def _stateless(self, blocks: BlocksByGroup) -> BlocksByGroup:
        return tuple(
            own if group.state is None else (NULL_BLOCK,)
            for own, group in zip(blocks, self._kept, strict=True)
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving |= self._skipped
        self._skipped = set()
        return results
