"""SGLang's pools for sliding windows, without a server.

Transfers requests of the given lengths in two chunks between ``SWAKVPool`` of TP2 or of two
pipeline stages (``ranks`` or ``stages``) with pages of 1 and of TP1 with pages of 4, with arguments
and page lists as schedulers make them. Before the last chunk, prefill frees the pages in front of
the window. Prints a line of JSON for each request: final statuses, number of wrong entries, and
number of other slots at decode that changed. ``test_7_windows.py`` runs it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import backends
import torch
from pooled import PooledRank, transfer
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

LAYERS, HEADS, SLOTS, WINDOW = 4, 2, 64, 8
SLIDING, FULL = [0, 2], [1, 3]
# SGLang's models count the window without the current token.
NUM_EARLIER = WINDOW - 1


class WindowedRank(PooledRank):
    """One scheduler's two pools, and the manager for them."""

    window = NUM_EARLIER

    def __init__(
        self,
        backend: backends.Backend,
        mode: Any,
        rank: int,
        tp: int,
        page: int,
        stages: tuple[int, int] = (0, 1),
    ) -> None:
        share = HEADS // tp
        self.layers = range(*get_pp_indices(LAYERS, *stages))
        sliding, full = ([layer for layer in of if layer in self.layers] for of in (SLIDING, FULL))
        self.page, self.heads = page, range(rank * share, (rank + 1) * share)
        self.pool = SWAKVPool(
            *(SLOTS, SLOTS, page, torch.float32, share, backends.DIM, sliding, full, "cpu"),
        )
        self.allocator = SWATokenToKVPoolAllocator(
            *(SLOTS, SLOTS, page, torch.float32, "cpu", self.pool, False),
        )
        args, _, self.rows = backends.kv_args(rank, tp, HEADS)
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
            self.pool.get_contiguous_buf_infos()
        )
        args.page_size, args.prefill_end_layer = page, LAYERS
        utils.setup_state_kv_args(args, self.pool, total_kv_layers=LAYERS)
        self.manager = backend.manager(args, mode, rank, tp, stages=stages)
        self.slots = torch.empty(0, dtype=torch.int64)

    def allocate(self, num_tokens: int, *, computes: bool) -> list[int]:
        """Allocate slots for all tokens in the full pool, and for the kept ones in the other."""
        num_kept = num_tokens if computes else min(num_tokens, NUM_EARLIER)
        ceil = -(-num_tokens // self.page) * self.page
        begins = (num_tokens - num_kept) // self.page * self.page
        full: torch.Tensor = self.allocator.full_attn_allocator.alloc(ceil)
        kept = self.allocator.swa_attn_allocator.alloc(ceil - begins)
        self.allocator.set_full_to_swa_mapping(full[begins:], kept)
        self.slots = full[:num_tokens]
        return list(kv_to_page_indices(self.slots, self.page).tolist())

    def state(self) -> list[Any]:
        """Return the window's pages, as both schedulers list them."""
        begins = max(0, len(self.slots) - NUM_EARLIER) // self.page * self.page
        kept = self.allocator.translate_swa_indices_for_transfer(self.slots[begins:])
        return [kv_to_page_indices(kept, self.page)]

    def free_between_chunks(self) -> None:
        self.allocator.free_swa(self.slots[: max(0, len(self.slots) - NUM_EARLIER)])

    def entries(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of one layer, each with the slots of the tokens in it."""
        slots = self.slots
        if layer in SLIDING:
            slots = self.allocator.translate_loc_from_full_to_swa(slots)
        pool = self.pool
        return [(pool.get_key_buffer(layer), slots), (pool.get_value_buffer(layer), slots)]

    def fill(self) -> None:
        for layer in self.layers:
            for kind, (buffer, places) in enumerate(self.entries(layer)):
                for token, place in enumerate(places.tolist()):
                    for local, head in enumerate(self.heads):
                        buffer[place, local] = self.entry(layer, kind, token, head)

    def entry(self, layer: int, kind: int, token: int, head: int) -> float:
        """Return a value that identifies request, layer, token and head."""
        return len(self.slots) + 1000 * (2 * layer + kind) + 10 * token + head

    def attended(self, layer: int) -> range:
        """Return the tokens that the next one attends to."""
        num_tokens = len(self.slots)
        return range(max(0, num_tokens - NUM_EARLIER) if layer in SLIDING else 0, num_tokens)

    def count_wrong(self) -> int:
        return sum(
            not bool((buffer[places[token], head] == self.entry(layer, kind, token, head)).all())
            for layer in range(LAYERS)
            for kind, (buffer, places) in enumerate(self.entries(layer))
            for token in self.attended(layer)
            for head in self.heads
        )

    def count_touched(self) -> int:
        """Count the slots with data outside of the request's pages and page 0, which is unused."""
        found = 0
        for layer in range(LAYERS):
            for buffer, places in self.entries(layer):
                used = {0, *(places // self.page).tolist()}
                held = buffer.flatten(1).abs().sum(1).nonzero().flatten() // self.page
                found += sum(page not in used for page in held.tolist())
        return found

    def clear(self) -> None:
        for layer in self.layers:
            self.pool.get_key_buffer(layer).zero_()
            self.pool.get_value_buffer(layer).zero_()
        self.allocator.clear()


def main(model: Path) -> None:
    config = json.loads((backends.write_config(model, HEADS) / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "sliding_window": WINDOW, "is_hybrid_swa": True}
    config["hybrid_layer_pattern"] = [int(layer in SLIDING) for layer in range(LAYERS)]
    (model / "config.json").write_text(json.dumps(config))
    backend = backends.Backend("kvferry", HEADS, model)
    ranks = [(0, 2), (1, 2)]
    if sys.argv[1] == "stages":
        prefill = [
            WindowedRank(backend, DisaggregationMode.PREFILL, 0, 1, 1, stages) for stages in ranks
        ]
    else:
        prefill = [WindowedRank(backend, DisaggregationMode.PREFILL, *rank, 1) for rank in ranks]
    decode = WindowedRank(backend, DisaggregationMode.DECODE, 0, 1, 4)
    for num_tokens in map(int, sys.argv[2:]):
        result = {"tokens": num_tokens, **transfer(backend, prefill, decode, num_tokens)}
        result |= {"wrong": decode.count_wrong(), "touched": decode.count_touched()}
        backends.print_json(result)
        for rank in (*prefill, decode):
            rank.clear()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
    # SGLang's threads do not end.
    os._exit(0)
