"""SGLang's pools for recurrent state beside K and V, without a server.

Transfers requests of the given lengths in two chunks from two pipeline stages with pages of 1 to
one rank with pages of 4, between ``HybridLinearKVPool`` with arguments as schedulers make them.
Prints a line of JSON for each request: final statuses, number of wrong rows, and number of other
rows at decode with data. ``test_7_recurrent.py`` runs it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import backends
import torch
from pooled import PooledRank, transfer
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

LAYERS, HEADS, SLOTS, STATES = 4, 2, 64, 3
MODEL = {
    **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    **{"num_hidden_layers": LAYERS, "full_attention_interval": 2, "hidden_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": HEADS, "head_dim": backends.DIM},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "vocab_size": 64},
    **{"intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1},
}


class HybridRank(PooledRank):
    """One stage's pools, and the manager for them."""

    def __init__(
        self, backend: backends.Backend, mode: Any, page: int, row: int, stages: tuple[int, int]
    ) -> None:
        self.page, self.row = page, row
        layers = range(*get_pp_indices(LAYERS, *stages))
        with backends.as_rank(0, 1, *stages):
            config = Qwen3NextConfig(**MODEL)
            params = config.mamba2_cache_params
            self.linear = [layer for layer in params.layers if layer in layers]
            self.full = [layer for layer in config.full_attention_layer_ids if layer in layers]
            self.states = MambaPool(
                size=STATES,
                spec_state_size=STATES,
                cache_params=params,
                mamba_layer_ids=self.linear,
                device="cpu",
            )
            self.pool = HybridLinearKVPool(
                *(SLOTS, torch.float32, page, HEADS, backends.DIM, self.full, "cpu"),
                mamba_pool=self.states,
            )
            args, _, self.rows = backends.kv_args(0, 1, HEADS)
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
                self.pool.get_contiguous_buf_infos()
            )
            args.kv_layer_ids = self.pool.get_kv_layer_ids()
            args.page_size, args.prefill_end_layer = page, layers.stop
            utils.setup_state_kv_args(args, self.pool, total_kv_layers=LAYERS)
        self.manager = backend.manager(args, mode, 0, 1, stages=stages)
        self.num_tokens, self.pages = 0, [0]

    def allocate(self, num_tokens: int, *, computes: bool) -> list[int]:
        """Allocate pages, in opposite orders on the two sides; page 0 is unused."""
        pages = range(1, SLOTS // self.page)
        self.num_tokens = num_tokens
        self.pages = list((pages if computes else pages[::-1])[: -(-num_tokens // self.page)])
        return self.pages

    def state(self) -> list[Any]:
        return [[self.row]]

    def free_between_chunks(self) -> None:
        """Do nothing: SGLang frees none of these pages."""

    def entries(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield each row of the request with its expected value."""
        full = self.pool.full_kv_pool
        for index, layer in enumerate(self.full):
            for kind, buffer in enumerate((full.k_buffer[index], full.v_buffer[index])):
                for token in range(self.num_tokens):
                    slot = self.pages[token // self.page] * self.page + token % self.page
                    yield buffer[slot], 1 + 1000 * (2 * layer + kind) + token
        cache = self.states.mamba_cache
        for index, layer in enumerate(self.linear):
            for kind, each in enumerate((*cache.conv, cache.temporal)):
                yield each[index, self.row], 1 + self.num_tokens + 8 * layer + kind

    def fill(self) -> None:
        for row, value in self.entries():
            row.fill_(value)

    def count_wrong(self) -> int:
        return sum(
            not torch.equal(row, torch.full_like(row, value)) for row, value in self.entries()
        )

    def count_touched(self) -> int:
        """Empty the request's rows, and count the buffers that still have data."""
        for row, _ in self.entries():
            row.zero_()
        full, cache = self.pool.full_kv_pool, self.states.mamba_cache
        buffers = (*full.k_buffer, *full.v_buffer, *cache.conv, cache.temporal)
        return sum(bool(buffer.any()) for buffer in buffers)


def main(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(MODEL))
    backend = backends.Backend("kvferry", HEADS, model, disable_radix_cache=True)
    prefill = [
        HybridRank(backend, DisaggregationMode.PREFILL, 1, 1, stages) for stages in ((0, 2), (1, 2))
    ]
    decode = HybridRank(backend, DisaggregationMode.DECODE, 4, 2, (0, 1))
    for num_tokens in map(int, sys.argv[1:]):
        result = {"tokens": num_tokens, **transfer(backend, prefill, decode, num_tokens)}
        result |= {"wrong": decode.count_wrong(), "touched": decode.count_touched()}
        backends.print_json(result)
        for rank in prefill:
            rank.count_touched()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
    # SGLang's threads do not end.
    os._exit(0)
