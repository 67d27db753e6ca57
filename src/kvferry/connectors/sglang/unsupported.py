"""Configurations that the backend does not support, rejected when a server starts.

Each message names the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

from kvferry import InputError
from kvferry.connectors.sglang.compat import allocates_early, num_dp_ranks, shards_kv_cache

# SGLang's name for Mamba and delta-net state, one row per request.
ROWS = "mamba"
# Sliding-window layers with their own pool.
WINDOWS = "swa"
# Index keys of sparse attention and block scales, in the same pages as K and V.
INDEX_KEYS, BLOCK_SCALES = "dsa", "block_scale"
# Supported combinations of state beside K and V.
SUPPORTED: tuple[list[str], ...] = ([], [ROWS], [WINDOWS], [INDEX_KEYS], [BLOCK_SCALES])
# SGLang does not pass the scales of these dtypes to a backend.
FOUR_BITS = ("nvfp4", "fp4_mx_block16", "fp4_e2m1")
# In pages of this size SGLang stores scales in another order than tokens.
SHUFFLED_PAGE_TOKENS = 128


def check_supported(kv_args: Any, *, is_mla: bool) -> None:
    """Raise ``InputError`` if the configuration has an unsupported feature."""
    kinds = [str(kind.value) for kind in kv_args.state_types]
    for unsupported, remedy in (
        *_of_server(),
        *_of_state(kv_args, kinds, is_mla=is_mla),
        *_of_draft(kv_args, kinds),
    ):
        if unsupported:
            raise InputError(f"kvferry's SGLang backend does not support {remedy}")


def _of_server() -> Iterator[tuple[bool, str]]:
    parallel = get_parallel()
    yield parallel.attn_cp_size > 1, "attention context parallelism: use --attn-cp-size 1"
    yield shards_kv_cache(parallel), "--enable-kv-cache-sharding: leave it out"
    yield (
        not allocates_early(get_disagg()),
        "--disaggregation-decode-allocation-policy other than early",
    )
    yield (
        not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, which reuses pages that may "
        "still be written: unset it",
    )
    yield (
        num_dp_ranks(parallel) > 1 and parallel.load_balance_method != "follow_bootstrap_room",
        "--load-balance-method other than follow_bootstrap_room with data parallelism",
    )


def _of_state(kv_args: Any, kinds: list[str], *, is_mla: bool) -> Iterator[tuple[bool, str]]:
    yield (
        kinds not in SUPPORTED,
        f"state beside K and V of the kinds {', '.join(kinds)}: use another backend",
    )
    beside = kv_args.num_draft_entries > 0 or kinds not in ([], [ROWS])
    yield (
        get_parallel().attn_dcp_size > 1 and beside,
        "decode context parallelism beside a draft model, windows, index keys or block scales, of "
        "which each rank has all tokens: use --dcp-size 1",
    )
    yield (
        kv_args.kv_cache_dtype_str in FOUR_BITS,
        f"--kv-cache-dtype {kv_args.kv_cache_dtype_str}: use fp8_e4m3",
    )
    yield (
        bool(kv_args.mla_compression_ratios),
        "compressed MLA caches (DeepSeek V4): use another backend",
    )
    yield (
        torch.version.hip is not None and envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower() != "nhd",
        "SGLANG_AITER_KV_CACHE_LAYOUT other than nhd: unset it",
    )
    yield (
        is_mla and WINDOWS in kinds,
        "sliding windows beside an MLA latent: use --disable-hybrid-swa-memory",
    )
    yield (
        get_parallel().pp_size > 1 and bool(kv_args.kv_layer_ids) and ROWS not in kinds,
        "pipeline parallelism of layers without K and V: use --pp-size 1",
    )
    yield (
        INDEX_KEYS in kinds and torch.version.hip is not None and kv_args.page_size > 1,
        "the order of index keys in ROCm's pages: use --page-size 1",
    )
    yield (
        BLOCK_SCALES in kinds and kv_args.page_size == SHUFFLED_PAGE_TOKENS,
        f"block scales in pages of {SHUFFLED_PAGE_TOKENS} tokens, whose order differs from the "
        f"tokens': use another --page-size, or --kv-cache-dtype fp8_e4m3",
    )


def _of_draft(kv_args: Any, kinds: list[str]) -> Iterator[tuple[bool, str]]:
    drafts = kv_args.num_draft_entries > 0
    yield (
        drafts and get_parallel().pp_size > 1 and INDEX_KEYS in kinds,
        "index keys and a draft model's cache with pipeline parallelism: use --pp-size 1",
    )
    yield (
        drafts and bool({WINDOWS, BLOCK_SCALES}.intersection(kinds)),
        "a draft model's cache beside a pool of sliding-window layers or block scales: "
        "disable speculative decoding",
    )
    yield (
        drafts and bool(get_memory().enable_unified_memory),
        "a draft model's cache with --enable-unified-memory: leave it out",
    )
