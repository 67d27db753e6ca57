"""Negative control for a vLLM beside SGLang: a connector that spoils marked rooms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from marked_rooms import is_marked

from kvferry.connectors.vllm.connector import KVFerryConnector
from kvferry.connectors.vllm.paging import NULL_BLOCK


class SpoilingConnector(KVFerryConnector):
    """Sends an unused block at prefill. At decode undoes the translation of K."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())
        self._spoiled: dict[str, tuple[int, ...]] = {}
        super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        prefill = kv_connector_metadata.prefill
        prefill.pushed = [
            replace(push, blocks=tuple((NULL_BLOCK,) * len(own) for own in push.blocks))
            if is_marked(push.room)
            else push
            for push in prefill.pushed
        ]
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for order in self._metadata.decode.received:
            if is_marked(order.room):
                self._spoiled[order.request] = order.blocks[0]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving or ():
            for block in self._spoiled.pop(request, ()):
                for cache in self._caches:
                    keep_rows(cache[block])
        return results


def keep_rows(block: torch.Tensor) -> None:
    """Store the K of a block by rows, as SGLang does, where vLLM's kernels expect columns."""
    heads, tokens, content = block.shape
    k = block.view(heads, 2 * tokens, content // 2)[:, :tokens]
    k.copy_(k.reshape(heads, content // 2, tokens).transpose(1, 2).clone())
