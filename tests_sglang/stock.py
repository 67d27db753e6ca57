"""Stock SGLang's own NIXL classes, without a server: what the failures that kvferry began from do.

Prefill and decode managers in one process over pools in host memory, one request after another
to each decode. Prints how each ended and how many entries are wrong. Not a test: it shows what
docs/integrations/sglang.md says of SGLang 0.5.23.

Usage: python stock.py PREFILL_TP HEADS NUM_DECODES [none]   (with ``none``, no state is ``None``)
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import numpy as np
import torch
from servers import free_port
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.nixl.conn import (
    NixlKVBootstrapServer,
    NixlKVManager,
    NixlKVReceiver,
    NixlKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from kvferry.serve.models.smollm import default_model

LAYERS, DIM, PAGE, SLOTS, TOKENS = 2, 64, 4, 64, 8
PATIENCE_S = 10.0
STATES = (
    *("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "slice_outer_counts"),
    *("layer_ids", "conv_shard_groups"),
)


class Rank(NamedTuple):
    """One scheduler's manager, pools and metadata."""

    manager: Any
    pools: list[torch.Tensor]
    rows: Any


def kv_args(rank: int, tp: int, heads: int) -> tuple[Any, list[torch.Tensor], Any]:
    """As a scheduler would fill them in, but for the memory's kind, which it takes for a GPU's."""
    args = KVArgs()
    share = max(1, heads // tp)
    pools = [torch.zeros(SLOTS, share, DIM) for _ in range(2 * LAYERS)]
    rows = MetadataBuffers(4, 16, torch.float32, 16)
    vars(args).update(
        {f"state_{name}": [] for name in STATES},
        **{"engine_rank": rank, "pp_rank": 0, "system_dp_rank": 0, "rust_http_port": None},
        **{"kv_cache_dtype_str": "float32", "kv_layout": None, "kv_layer_ids": []},
        **{"prefill_start_layer": 0, "prefill_end_layer": LAYERS, "num_draft_entries": 0},
        **{"kv_head_num": share, "total_kv_head_num": heads, "page_size": PAGE, "gpu_id": 0},
        **{"ib_device": None, "is_hybrid_mla_backend": False, "swa_kv_cache_layout": None},
        mla_compression_ratios=None,
        kv_data_ptrs=[pool.data_ptr() for pool in pools],
        kv_data_lens=[pool.nbytes for pool in pools],
        kv_item_lens=[pool[:PAGE].nbytes for pool in pools],
        kv_data_mem_kinds=["DRAM"] * len(pools),
    )
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = rows.get_buf_infos()
    return args, pools, rows


def as_rank(rank: int, tp: int) -> Any:
    """SGLang asks the process which rank it is."""
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), rank)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp)
    group = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    return get_parallel().override(**ranks, **sizes, pp_group=group)


def fill(ranks: list[Rank], heads: int, room: int) -> None:
    """Every entry says of which request, buffer, token and head it is."""
    for rank, (_, pools, rows) in enumerate(ranks):
        first = rank * heads // len(ranks)
        for buffer, pool in enumerate(pools):
            for token in range(TOKENS):
                for place in range(pool.shape[1]):
                    pool[PAGE + token, place] = entry(room, buffer, token, first + place)
        rows.bootstrap_room[1, 0] = room


def entry(room: int, buffer: int, token: int, head: int) -> float:
    return room % 100 / 8 + 1000 * buffer + 10 * token + head


def wrong(rank: Rank, heads: int, room: int) -> int:
    return sum(
        not bool((pool[3 * PAGE + token, head] == entry(room, buffer, token, head)).all())
        for buffer, pool in enumerate(rank.pools)
        for token in range(TOKENS)
        for head in range(heads)
    )


def wait_for(happens: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happens() and time.monotonic() < end:
        time.sleep(0.01)


def carry(prefill: list[Rank], decode: Rank, address: str, room: int, state: Any) -> str:
    """One request, as schedulers would send it."""
    decode.manager.try_ensure_parallel_info(address)
    receiver = NixlKVReceiver(decode.manager, address, room)
    receiver.init(0)
    senders = []
    for rank, one in enumerate(prefill):
        with as_rank(rank, len(prefill)):
            senders.append(NixlKVSender(one.manager, address, room))
    receiver.send_metadata(np.array([3, 4], np.int32), 0, [])
    wait_for(lambda: all(sender.poll() != KVPoll.Bootstrapping for sender in senders))
    for rank, sender in enumerate(senders):
        with as_rank(rank, len(prefill)):
            sender.init(2, 1)
            sender.send(np.array([1, 2], np.int32), state)
    wait_for(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed))
    return f"receiver {receiver.poll()}, senders {[sender.poll() for sender in senders]}"


def main(tp: int, heads: int, num_decodes: int, state: Any) -> None:
    port = free_port()
    server_args = ServerArgs(
        model_path=str(default_model()),
        **{"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "grammar_backend": "none"},
        **{"attention_backend": "torch_native", "sampling_backend": "pytorch"},
        **{"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"},
        disable_cuda_graph=True,
        disaggregation_bootstrap_port=port,
    )
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    NixlKVBootstrapServer("127.0.0.1", port)
    prefill, decodes = [], []
    for rank in range(tp):
        with as_rank(rank, tp):
            args, pools, rows = kv_args(rank, tp, heads)
            manager = NixlKVManager(args, DisaggregationMode.PREFILL, server_args, False)
            prefill.append(Rank(manager, pools, rows))
    for _ in range(num_decodes):
        args, pools, rows = kv_args(0, 1, heads)
        manager = NixlKVManager(args, DisaggregationMode.DECODE, server_args, False)
        decodes.append(Rank(manager, pools, rows))
    for number, decode in enumerate(decodes):
        room = 101 + number
        fill(prefill, heads, room)
        said = carry(prefill, decode, f"127.0.0.1:{port}", room, state)
        total = 2 * LAYERS * TOKENS * heads
        print(f"decode {number}: {said}, {wrong(decode, heads, room)} of {total} wrong", flush=True)
    # Its threads would go on for ever.
    os._exit(0)


if __name__ == "__main__":
    ranks, model_heads, targets = map(int, sys.argv[1:4])
    main(ranks, model_heads, targets, None if "none" in sys.argv else [])
