"""Settings of this backend, read from a running SGLang scheduler.

``unsupported`` rejects configurations that the backend does not support.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving, get_spec
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

from kvferry import (
    ClusterKey,
    DType,
    EventRecorder,
    InputError,
)
from kvferry.connectors.sglang.index_keys import with_index_keys
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.metadata import MetadataRows
from kvferry.connectors.sglang.pools import (
    DRAFT,
    SCALES,
    AuxiliaryPool,
    Buffers,
    KvHeads,
    RankPosition,
    SglangCache,
    WindowPool,
)
from kvferry.connectors.sglang.settings import (
    RankSettings,
    dtype_of,
    model_of,
    no_synchronization,
    read_settings,
)
from kvferry.connectors.sglang.states import StateBuffer
from kvferry.connectors.sglang.unsupported import (
    BLOCK_SCALES,
    INDEX_KEYS,
    ROWS,
    WINDOWS,
    check_supported,
)

# Elements of K or V per block scale.
SCALE_BLOCK = 32
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def settings_of(kv_args: Any, server_args: Any, *, is_mla: bool, is_prefill: bool) -> RankSettings:
    """Return the settings of this scheduler's endpoint."""
    check_supported(kv_args, is_mla=is_mla)
    model = ModelConfig.from_server_args(server_args)
    draft = _draft_model(kv_args, server_args)
    given = read_settings(os.environ)
    key = given.key()
    config = given.endpoint_config(host=_host(key), deadline_s=_deadline_s(is_prefill=is_prefill))
    gpu = _gpu()
    return RankSettings(
        cache=_cache(kv_args, model, draft, is_mla=is_mla, gpu=gpu),
        replica=_replica(config.host, is_prefill=is_prefill),
        rows=MetadataRows(
            kv_args.aux_data_ptrs,
            kv_args.aux_data_lens,
            kv_args.aux_item_lens,
            checksums=bool(get_disagg().disaggregation_enable_kv_checksum),
        ),
        model=model_of(model, server_args, given.model, draft=draft),
        dtype=dtype_of(model),
        transport=given.transport,
        config=config,
        discovery=given.discovery or (_discovery() if is_prefill else None),
        key=key,
        record_event=EventRecorder(_device(gpu)).computed,
        synchronize=no_synchronization if gpu is None else _synchronize,
    )


def _cache(kv_args: Any, model: Any, draft: Any, *, is_mla: bool, gpu: int | None) -> SglangCache:
    parallel = get_parallel()
    num_layers = model.num_hidden_layers
    spans = [
        get_pp_indices(num_layers, stage, parallel.pp_size) for stage in range(parallel.pp_size)
    ]
    first, end = spans[parallel.pp_rank]
    own = _kv_buffers(kv_args, model, gpu)
    window = _window(kv_args, model, own, spans, parallel.pp_rank)
    states = _states(kv_args)
    linear: tuple[int, ...] = ()
    listed = tuple(
        dict.fromkeys(model.full_attention_layer_ids if window else _target_layer_ids(kv_args))
    )
    if states and parallel.pp_size > 1:
        listed, linear = _hybrid_layers(model, spans)
    layers = tuple(sorted(listed)) or tuple(range(num_layers))
    heads = None if is_mla else _heads(model, gpu)
    is_last = parallel.pp_rank == parallel.pp_size - 1
    drafts = _draft(kv_args, num_layers, draft, own, gpu, has_cache=is_last)
    num_draft = sum(len(pool.layers) for pool in drafts)
    stages = [end - first for first, end in spans]
    stages[-1] += num_draft
    here = _of_stage(listed, spans[parallel.pp_rank]) or tuple(range(first, end))
    return SglangCache(
        num_layers=num_layers + num_draft,
        layers=layers,
        stages=tuple(stages),
        position=RankPosition(
            tp=parallel.attn_tp_size,
            tp_rank=parallel.attn_tp_rank,
            pp=parallel.pp_size,
            pp_rank=parallel.pp_rank,
            dcp=parallel.attn_dcp_size,
        ),
        heads=heads,
        buffers=replace(own, layers=here),
        states=states,
        state_layers=linear,
        window=window,
        auxiliary=(*_scales(kv_args, layers, here, heads, own), *drafts),
        index=_index(kv_args, here, drafts, own),
    )


def _kv_buffers(kv_args: Any, model: Any, gpu: int | None) -> Buffers:
    """Return the model's own K and V buffers; a draft's follow them in SGLang's lists."""
    end = len(kv_args.kv_data_ptrs) - kv_args.num_draft_entries
    return Buffers(
        addresses=kv_args.kv_data_ptrs[:end],
        lengths=kv_args.kv_data_lens[:end],
        page_lengths=kv_args.kv_item_lens[:end],
        layers=(),
        page_tokens=kv_args.page_size,
        dtype=_cache_dtype(kv_args, model),
        device="cpu" if gpu is None else f"cuda:{gpu}",
    )


def _target_layer_ids(kv_args: Any) -> list[int]:
    ids: list[int] = kv_args.kv_layer_ids
    return ids[: len(ids) - kv_args.num_draft_entries] if ids else ids


def _state_buffers(kv_args: Any, kind: str, like: Buffers) -> Buffers | None:
    """Return the buffers of a kind of state, if the model has it."""
    if not kv_args.state_types or kv_args.state_types[0].value != kind:
        return None
    return replace(
        like,
        addresses=kv_args.state_data_ptrs[0],
        lengths=kv_args.state_data_lens[0],
        page_lengths=kv_args.state_item_lens[0],
    )


def _of_stage(layers: Sequence[int], span: tuple[int, int]) -> tuple[int, ...]:
    """Return those of some layers that a pipeline stage has."""
    return tuple(layer for layer in layers if span[0] <= layer < span[1])


def _hybrid_layers(
    model: Any, spans: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers of the whole model with attention and with state.

    Every pipeline stage must have both, because it describes the groups of both.
    """
    try:
        from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: PLC0415
    except ImportError:
        raise InputError(
            "this SGLang does not say which layers of other pipeline stages have state; use 0.5.23 "
            "or --pp-size 1"
        ) from None
    config = mambaish_config(model)
    kinds = tuple(config.full_attention_layer_ids), tuple(config.mamba2_cache_params.layers)
    for span in spans:
        if not all(_of_stage(layers, span) for layers in kinds):
            raise InputError(
                f"the pipeline stage of the layers {span[0]} to {span[1] - 1} has no layer with "
                f"attention, or none with state; use another --pp-size"
            )
    return kinds


def _window(
    kv_args: Any, model: Any, own: Buffers, spans: Sequence[tuple[int, int]], stage: int
) -> WindowPool | None:
    """Return the pool of sliding-window layers, if there is one.

    ``spans`` are the layers of each pipeline stage. A stage with layers of one kind would not
    report the other kind, and its layout would differ from those of the other stages.
    """
    buffers = _state_buffers(kv_args, WINDOWS, own)
    if buffers is None:
        return None
    layers, num_tokens = model.swa_attention_layer_ids, model.sliding_window_size
    if not (layers and num_tokens and model.full_attention_layer_ids):
        raise InputError(
            "SGLang does not report this model's sliding-window layers or the window's length; "
            "use --disable-hybrid-swa-memory"
        )
    for span in spans:
        if not (_of_stage(layers, span) and _of_stage(model.full_attention_layer_ids, span)):
            raise InputError(
                f"the pipeline stage of the layers {span[0]} to {span[1] - 1} has only layers with "
                f"sliding windows, or none; use another --pp-size"
            )
    buffers = replace(buffers, layers=_of_stage(layers, spans[stage]))
    return WindowPool(num_tokens=num_tokens, layers=tuple(layers), buffers=buffers)


def _scales(
    kv_args: Any,
    layers: tuple[int, ...],
    here: tuple[int, ...],
    heads: KvHeads | None,
    own: Buffers,
) -> tuple[AuxiliaryPool, ...]:
    """Return the block scales of K and V, if any; ``here`` are this stage's layers."""
    buffers = _state_buffers(kv_args, BLOCK_SCALES, own)
    if buffers is None or heads is None:
        return ()
    scaled = replace(heads, k_dim=heads.k_dim // SCALE_BLOCK, v_dim=heads.v_dim // SCALE_BLOCK)
    buffers = replace(buffers, layers=here, dtype=DType.UINT8)
    return (AuxiliaryPool(name=SCALES, layers=layers, heads=scaled, buffers=buffers),)


def _draft(
    kv_args: Any, num_layers: int, model: Any, own: Buffers, gpu: int | None, *, has_cache: bool
) -> tuple[AuxiliaryPool, ...]:
    """Return a draft model's cache; its layer numbers follow the model's.

    Every pipeline stage has memory for it, but only the last one computes it (``has_cache``).
    """
    num_entries = kv_args.num_draft_entries
    if num_entries == 0:
        return ()
    heads = None if model.attention_arch == AttentionArch.MLA else _heads(model, gpu)
    num_draft = num_entries if heads is None else num_entries // 2
    layers = tuple(range(num_layers, num_layers + num_draft))
    buffers = replace(
        own,
        addresses=kv_args.kv_data_ptrs[-num_entries:],
        lengths=kv_args.kv_data_lens[-num_entries:],
        page_lengths=kv_args.kv_item_lens[-num_entries:],
        layers=layers,
        dtype=_cache_dtype(kv_args, model),
    )
    if not has_cache:
        buffers = replace(buffers, addresses=(), lengths=(), layers=())
    return (AuxiliaryPool(name=DRAFT, layers=layers, heads=heads, buffers=buffers),)


def _index(
    kv_args: Any, here: tuple[int, ...], drafts: tuple[AuxiliaryPool, ...], own: Buffers
) -> Buffers | None:
    """Return the index keys, if any; a draft's follow the model's."""
    buffers = _state_buffers(kv_args, INDEX_KEYS, own)
    if buffers is None:
        return None
    every = (*here, *(layer for pool in drafts for layer in pool.layers))
    num = len(buffers.addresses)
    if num not in (len(here), len(every)):
        raise InputError(
            f"SGLang has {num} buffers of index keys for {len(every)} layers; this pool is not "
            f"supported"
        )
    staged = get_parallel().pp_size > 1
    return with_index_keys(replace(buffers, layers=every[:num]), staged=staged)


def _states(kv_args: Any) -> tuple[StateBuffer, ...]:
    """Return the state rows of linear-attention layers, if any."""
    if not kv_args.state_types or kv_args.state_types[0].value != ROWS:
        return ()
    if len(kv_args.state_layer_ids[0]) != len(kv_args.state_data_ptrs[0]):
        raise InputError(
            "SGLang does not report the layers of this model's state; use another transfer "
            "backend for this model"
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


def _heads(model: Any, gpu: int | None) -> KvHeads:
    # Set by SGLang if it padded the heads.
    total = getattr(model.hf_text_config, "original_total_num_kv_heads", None)
    return KvHeads(
        total=total or model.get_total_num_kv_heads(),
        k_dim=model.head_dim,
        v_dim=model.v_head_dim,
        padded_for=get_parallel().tp_size if gpu is None else 1,
    )


def _cache_dtype(kv_args: Any, model: Any) -> DType:
    named = kv_args.kv_cache_dtype_str
    if named == "mxfp8":
        return DType.FLOAT8_E4M3
    return DType.parse(str(model.dtype) if named in (None, "auto") else str(named))


def _draft_model(kv_args: Any, server_args: Any) -> Any:
    """Return SGLang's configuration of the draft model; None without one."""
    if kv_args.num_draft_entries == 0:
        return None
    return ModelConfig.from_server_args(
        server_args,
        model_path=get_spec().speculative_draft_model_path,
        model_revision=get_spec().speculative_draft_model_revision,
        is_draft_model=True,
    )


def _replica(host: str, *, is_prefill: bool) -> Replica:
    parallel = get_parallel()
    port = get_disagg().disaggregation_bootstrap_port if is_prefill else get_serving().port
    address = f"{host}:{port}" if is_prefill else f"decode-{host}:{port}"
    if parallel.attn_dp_size > 1:
        return Replica(address, parallel.attn_dp_rank, parallel.attn_dp_size)
    return Replica(address, parallel.dp_rank or 0, parallel.dp_size)


def _discovery() -> str:
    """Return the URL of this server's bootstrap server."""
    where = get_parallel().dist_init_addr
    host = NetworkAddress.parse(where).resolved().host if where else get_serving().host
    port = get_disagg().disaggregation_bootstrap_port
    url: str = NetworkAddress(LOOPBACK.get(host, host), port).to_url()
    return url


def _deadline_s(*, is_prefill: bool) -> float:
    """Return SGLang's time limit of a room; at prefill it covers bootstrap and prefill too."""
    bootstrap_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
    waiting_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
    return bootstrap_s + waiting_s if is_prefill else waiting_s


def _host(key: ClusterKey | None) -> str:
    """Return the address where peers reach this rank; loopback without a cluster key."""
    return "127.0.0.1" if key is None else str(get_local_ip_auto())


def _gpu() -> int | None:
    """Return this scheduler's GPU; None on a CPU."""
    device = get_device()
    return int(device.gpu_id) if str(device.device).startswith("cuda") else None


def _device(gpu: int | None) -> torch.device:
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def _synchronize() -> None:
    """Wait for kernels of earlier requests that may still write to the offered pages."""
    torch.cuda.current_stream().synchronize()
