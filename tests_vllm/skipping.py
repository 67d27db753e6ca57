"""Negative control: a connector that reports some rooms as received without transferring them.

For some other rooms it transfers everything except the recurrent state. Pulls from ``SKIPPED`` are
reported as complete, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.connectors.vllm.connector import KVFerryConnector, WorkerReport
from kvferry.connectors.vllm.metadata import BlocksByGroup, RankReport
from kvferry.connectors.vllm.paging import NULL_BLOCK
from tests_vllm.servers import SKIPPED, STATELESS


class SkippingConnector(KVFerryConnector):
    """Skips rooms whose id starts with one of the prefixes."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._metadata.decode
        skipped = [order for order in metadata.received if str(order.room).startswith(SKIPPED)]
        # Complete these rooms without data. Otherwise prefill would hold its blocks, and vLLM would
        # step for them, until the deadline.
        metadata.received = [
            replace(order, prefix=order.tokens, blocks=()) if order in skipped else order
            for order in metadata.received
        ]
        metadata.received = [
            replace(order, blocks=self._stateless(order.blocks))
            if str(order.room).startswith(STATELESS)
            else order
            for order in metadata.received
        ]
        self._skipped: set[str] = {order.request for order in skipped}
        pulls = self._metadata.pulls
        self._not_pulled = [order for order in pulls.asked if order.holder == SKIPPED]
        pulls.asked = [order for order in pulls.asked if order not in self._not_pulled]
        super().start_load_kv(forward_context, **kwargs)

    def _stateless(self, blocks: BlocksByGroup) -> BlocksByGroup:
        return tuple(
            own if group.state is None else (NULL_BLOCK,)
            for own, group in zip(blocks, self._groups, strict=True)
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving |= self._skipped
        self._skipped = set()
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = super().build_connector_worker_meta() or WorkerReport(RankReport())
        for order in self._not_pulled:
            report.own.pulled[order.room] = [order.chain.num_tokens]
            report.own.received[order.room] = 1
        self._not_pulled = []
        return report
