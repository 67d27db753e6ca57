"""Facts of a running SGLang scheduler, as settings: the one place that asks SGLang about itself.

Written against the version that ``plugin`` names. What this backend can't carry is refused here,
with a sentence, before anything is sent.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

from kvferry import (
    ClusterKey,
    DeviceMarks,
    DType,
    EndpointConfig,
    InputError,
)
from kvferry.integrations.sglang.geometry import Buffers, Cache, Heads, Place, WindowPool
from kvferry.integrations.sglang.instances import Replica
from kvferry.integrations.sglang.rows import MetadataRows
from kvferry.integrations.sglang.settings import (
    HOST,
    RankSettings,
    dtype_of,
    model_of,
    nothing_waits,
    transport_in,
)
from kvferry.integrations.sglang.states import StateBuffer

# One row a request, of Mamba or delta-net layers: SGLang's name for it.
ROWS = "mamba"
# Pages of sliding-window layers in a pool of their own.
WINDOWS = "swa"
# What may stand beside K and V.
CARRIED: tuple[list[str], ...] = ([], [ROWS], [WINDOWS])
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def settings_of(kv_args: Any, server_args: Any, *, is_mla: bool, is_prefill: bool) -> RankSettings:
    """Everything that an endpoint of this scheduler needs."""
    demand_supported(kv_args, is_mla=is_mla)
    model = ModelConfig.from_server_args(server_args)
    key = ClusterKey.from_environment()
    host = _host(key)
    gpu = _gpu()
    return RankSettings(
        cache=_cache(kv_args, model, is_mla=is_mla, gpu=gpu),
        replica=_replica(host, is_prefill=is_prefill),
        rows=MetadataRows(
            kv_args.aux_data_ptrs,
            kv_args.aux_data_lens,
            kv_args.aux_item_lens,
            checksums=bool(get_disagg().disaggregation_enable_kv_checksum),
        ),
        model=model_of(model, server_args, os.environ),
        dtype=dtype_of(model),
        transport=transport_in(os.environ),
        bootstrap_s=float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
        waiting_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
        config=EndpointConfig(host=host),
        rendezvous=_rendezvous() if is_prefill else None,
        key=key,
        computed=DeviceMarks(_device(gpu)).computed,
        settled=nothing_waits if gpu is None else _settled,
    )


def demand_supported(kv_args: Any, *, is_mla: bool) -> None:
    """Refuse what this backend does not carry, each with its remedy."""
    parallel, disagg = get_parallel(), get_disagg()
    kinds = [str(kind.value) for kind in kv_args.state_types]
    for unsupported, remedy in (
        (parallel.attn_cp_size > 1, "attention context parallelism: use --attn-cp-size 1"),
        (parallel.attn_dcp_size > 1, "decode context parallelism: use --dcp-size 1"),
        (parallel.enable_kv_cache_sharding, "--enable-kv-cache-sharding: leave it out"),
        (kv_args.num_draft_entries > 0, "a draft model's cache: leave speculative decoding out"),
        (
            disagg.disaggregation_decode_allocation_policy != "early",
            "--disaggregation-decode-allocation-policy other than early",
        ),
        (
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, which reuses pages that may "
            "still be written: unset it",
        ),
        (
            parallel.num_dp_ranks > 1 and parallel.load_balance_method != "follow_bootstrap_room",
            "--load-balance-method other than follow_bootstrap_room with data parallelism",
        ),
        (
            kinds not in CARRIED,
            f"state beside K and V of the kinds {', '.join(kinds)}: use another backend",
        ),
        (
            is_mla and WINDOWS in kinds,
            "sliding windows beside an MLA latent: use --disable-hybrid-swa-memory",
        ),
        (
            parallel.pp_size > 1 and bool(kv_args.state_types or kv_args.kv_layer_ids),
            "pipeline parallelism of a model with state: use --pp-size 1",
        ),
    ):
        if unsupported:
            raise InputError(f"kvferry's SGLang backend does not support {remedy}")


def _cache(kv_args: Any, model: Any, *, is_mla: bool, gpu: int | None) -> Cache:
    parallel = get_parallel()
    num_layers = model.num_hidden_layers
    spans = [
        get_pp_indices(num_layers, stage, parallel.pp_size) for stage in range(parallel.pp_size)
    ]
    first, end = spans[parallel.pp_rank]
    window = _window(kv_args, model, gpu)
    listed = tuple(
        dict.fromkeys(model.full_attention_layer_ids if window else kv_args.kv_layer_ids)
    )
    layers = listed or tuple(range(first, end))
    return Cache(
        num_layers=num_layers,
        layers=tuple(sorted(listed)) or tuple(range(num_layers)),
        stages=tuple(end - first for first, end in spans),
        place=Place(
            tp=parallel.attn_tp_size,
            tp_rank=parallel.attn_tp_rank,
            pp=parallel.pp_size,
            pp_rank=parallel.pp_rank,
        ),
        heads=None if is_mla else _heads(model, padded=gpu is None),
        buffers=Buffers(
            addresses=kv_args.kv_data_ptrs,
            lengths=kv_args.kv_data_lens,
            page_lengths=kv_args.kv_item_lens,
            layers=layers,
            page_tokens=kv_args.page_size,
            dtype=_cache_dtype(kv_args, model),
            device="cpu" if gpu is None else f"cuda:{gpu}",
        ),
        states=_states(kv_args),
        window=window,
    )


def _window(kv_args: Any, model: Any, gpu: int | None) -> WindowPool | None:
    """The pool of sliding-window layers, if there is one."""
    if not kv_args.state_types or kv_args.state_types[0].value != WINDOWS:
        return None
    layers, num_tokens = model.swa_attention_layer_ids, model.sliding_window_size
    if not (layers and num_tokens and model.full_attention_layer_ids):
        raise InputError(
            "SGLang does not say which of this model's layers have a sliding window, or how long "
            "it is, so kvferry's backend can't carry it; use --disable-hybrid-swa-memory"
        )
    return WindowPool(
        num_tokens=num_tokens,
        buffers=Buffers(
            addresses=kv_args.state_data_ptrs[0],
            lengths=kv_args.state_data_lens[0],
            page_lengths=kv_args.state_item_lens[0],
            layers=tuple(layers),
            page_tokens=kv_args.page_size,
            dtype=_cache_dtype(kv_args, model),
            device="cpu" if gpu is None else f"cuda:{gpu}",
        ),
    )


def _states(kv_args: Any) -> tuple[StateBuffer, ...]:
    """The rows of linear-attention layers; SGLang names the first kind of state so, if any."""
    if not kv_args.state_types or kv_args.state_types[0].value != ROWS:
        return ()
    if len(kv_args.state_layer_ids[0]) != len(kv_args.state_data_ptrs[0]):
        raise InputError(
            "SGLang does not say which layers this model's state belongs to, so kvferry's "
            "backend can't carry it; use another backend for this model"
        )
    rows = zip(
        kv_args.state_data_ptrs[0],
        kv_args.state_data_lens[0],
        kv_args.state_item_lens[0],
        kv_args.state_layer_ids[0],
        kv_args.state_dim_per_tensor[0],
        kv_args.state_slice_outer_counts[0],
        kv_args.state_conv_shard_groups[0],
        strict=True,
    )
    return tuple(
        StateBuffer(
            address=address,
            length=length,
            row_bytes=row_bytes,
            layer=layer,
            dim=dim,
            outer=outer,
            blocks=tuple(blocks or ()),
        )
        for address, length, row_bytes, layer, dim, outer, blocks in rows
    )


def _heads(model: Any, *, padded: bool) -> Heads:
    # Where SGLang pads heads, it writes down how many there were.
    total = getattr(model.hf_text_config, "original_total_num_kv_heads", None)
    return Heads(
        total=total or model.get_total_num_kv_heads(),
        k_dim=model.head_dim,
        v_dim=model.v_head_dim,
        padded=padded,
    )


def _cache_dtype(kv_args: Any, model: Any) -> DType:
    named = kv_args.kv_cache_dtype_str
    return _dtype(str(model.dtype) if named in (None, "auto") else str(named))


def _dtype(name: str) -> DType:
    return DType.parse(name)


def _replica(host: str, *, is_prefill: bool) -> Replica:
    parallel = get_parallel()
    port = get_disagg().disaggregation_bootstrap_port if is_prefill else get_serving().port
    address = f"{host}:{port}" if is_prefill else f"decode-{host}:{port}"
    if parallel.attn_dp_size > 1:
        return Replica(address, parallel.attn_dp_rank, parallel.attn_dp_size)
    return Replica(address, parallel.dp_rank or 0, parallel.dp_size)


def _rendezvous() -> str:
    """Where this server's bootstrap server listens."""
    where = get_parallel().dist_init_addr
    host = NetworkAddress.parse(where).resolved().host if where else get_serving().host
    port = get_disagg().disaggregation_bootstrap_port
    url: str = NetworkAddress(LOOPBACK.get(host, host), port).to_url()
    return url


def _host(key: ClusterKey | None) -> str:
    """Where peers reach this rank; without a key, nobody from another machine does."""
    if HOST in os.environ:
        return os.environ[HOST]
    return "127.0.0.1" if key is None else str(get_local_ip_auto())


def _gpu() -> int | None:
    """The GPU of this scheduler; None on a CPU."""
    device = get_device()
    return int(device.gpu_id) if str(device.device).startswith("cuda") else None


def _device(gpu: int | None) -> torch.device:
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def _settled() -> None:
    """Whoever had the pages before may have left kernels in the queue that write them."""
    torch.cuda.current_stream().synchronize()
