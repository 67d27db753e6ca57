"""Reads what the connector needs from a ``VllmConfig``.

It only reads attributes. The one import of vLLM is the function that assigns layers to pipeline
stages, because that depends on vLLM's environment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvferry import InputError, model_fingerprint
from kvferry.connectors.vllm.caches import PLAIN, BlockGroup, EngineShape, EntryForm
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.states import StateSpec

# vLLM's cache specifications: for all tokens, for a window of them, and for recurrent state.
KEEP_ALL = ("FullAttentionSpec", "MLAAttentionSpec")
KEEP_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
# Parts of a packed latent of DeepSeek V4: FP8 values with the rotary part in BF16, and scales.
PACKED_V4 = (("latents", 576), ("scales", 8))
KEEP_STATE = "MambaSpec"
# Names in model configurations of the number of B and C groups of a Mamba-2 layer.
BC_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")


def block_groups(vllm_config: Any, kv_cache_config: Any) -> list[BlockGroup]:
    """Return vLLM's cache groups. Raises ``InputError`` if one is not supported."""
    groups = kv_cache_config.kv_cache_groups
    if _dcp(vllm_config) > 1:
        _check_divided([group.kv_cache_spec for group in groups])
    has_state = any(_kind(group) == KEEP_STATE for group in groups)
    sizes = {g.kv_cache_spec.block_size for g in groups if _kind(g) != KEEP_STATE}
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not has_state:
        found = [
            BlockGroup(frozenset(g.layer_names), forms=_entry_forms(g.layer_names, g.kv_cache_spec))
            for g in groups
        ]
    else:
        found = [_block_group(g.layer_names, g.kv_cache_spec) for g in groups]
    if len(sizes) > 1:
        found = [
            own if own.state is not None else own._replace(block_tokens=g.kv_cache_spec.block_size)
            for own, g in zip(found, groups, strict=True)
        ]
    if vllm_config.speculative_config is not None and has_state:
        raise InputError(
            "recurrent state (Mamba) can't be carried with speculative decoding yet; leave out "
            "--speculative-config"
        )
    if vllm_config.speculative_config is not None and any(g.window is not None for g in found):
        raise InputError(
            "windows can't be carried with speculative decoding yet; give vLLM "
            "--disable-hybrid-kv-cache-manager"
        )
    return found


def _kind(group: Any) -> str:
    return type(group.kv_cache_spec).__name__


def _check_divided(specs: Sequence[Any]) -> None:
    """Refuse groups of which every rank has all tokens, beside those that ranks share."""
    for spec in specs:
        kind = type(spec).__name__
        divided = kind not in KEEP_WINDOW and getattr(spec, "dcp_sharded", True)
        if kind != KEEP_STATE and not divided:
            raise InputError(
                "decode context parallelism can't be carried yet beside windows or a draft model, "
                "of which each rank has all tokens; leave out --decode-context-parallel-size or "
                "--speculative-config"
            )


def shared_block_tokens(vllm_config: Any) -> int:
    """Return the tokens in a block of vLLM's scheduler, over all ranks that share them."""
    return int(vllm_config.cache_config.block_size) * _dcp(vllm_config)


def _dcp(vllm_config: Any) -> int:
    return int(vllm_config.parallel_config.decode_context_parallel_size)


def block_selector(vllm_config: Any, groups: Sequence[BlockGroup]) -> BlockSelector:
    """Return what selects the blocks of a request, on the scheduler's side."""
    states = {place: group.state for place, group in enumerate(groups) if group.state is not None}
    dcp = _dcp(vllm_config)
    sizes = {p: group.block_tokens * dcp for p, group in enumerate(groups) if group.block_tokens}
    common = math.lcm(*sizes.values()) if sizes else shared_block_tokens(vllm_config)
    return BlockSelector(common, states, sizes)


def _block_group(names: Sequence[str], spec: Any) -> BlockGroup:
    if type(spec).__name__ != KEEP_STATE:
        forms = _entry_forms(names, spec)
        return BlockGroup(frozenset(names), _window(spec), forms=forms)
    state = StateSpec(
        spec.mamba_type.name,
        tuple(map(tuple, spec.shapes)),
        tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        spec.block_size,
        spec.tp_replicated,
    )
    return BlockGroup(frozenset(names), state=state)


def _entry_forms(names: Sequence[str], spec: Any) -> dict[str, EntryForm]:
    """Return the caches of a group whose entries stand for several tokens or have parts."""
    of_layers = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(names, spec)
    forms = {name: _entry_form(name, each) for name, each in of_layers.items()}
    return {name: form for name, form in forms.items() if form != PLAIN}


def _entry_form(name: str, spec: Any) -> EntryForm:
    ratio = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    if not isinstance(ratio, int) or (ratio < 1 and type(spec).__name__ != KEEP_STATE):
        raise InputError(
            f"vLLM keeps several entries for a token in {name!r:.200}, which can't be carried yet; "
            f"serve this model without kvferry"
        )
    if getattr(spec, "model_version", None) != "deepseek_v4":
        return EntryForm(max(1, ratio))
    # Without the field, which older versions have not, the form is not known.
    packed = getattr(spec, "state_content_bytes", "an unknown number of")
    if packed is None:
        return EntryForm(ratio)
    if packed != sum(width for _, width in PACKED_V4):
        raise InputError(
            f"vLLM keeps {packed} bytes for an entry of {name!r:.200}, a form of DeepSeek V4 that "
            f"is not supported; give vLLM --kv-cache-dtype fp8_ds_mla or auto"
        )
    return EntryForm(ratio, PACKED_V4)


def _window(spec: Any) -> int | None:
    """Return how many tokens before the next one a group keeps; None for all."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    each_spec = list(of_layers.values()) if of_layers else [spec]
    kinds = {type(each).__name__ for each in each_spec}
    if kinds <= set(KEEP_ALL):
        return None
    if kinds <= set(KEEP_WINDOW) and not any(_is_replayed(each) for each in each_spec):
        kept = {int(each.sliding_window - 1 + each.extra_retained_tokens) for each in each_spec}
        if len(kept) == 1:
            return kept.pop()
    if KEEP_STATE in kinds:
        raise InputError(
            "recurrent state (Mamba) of several forms in one cache group can't be carried yet; "
            "serve this model whole"
        )
    raise InputError(
        f"vLLM's {', '.join(sorted(kinds))} can't be carried in cache groups of its own yet; give "
        f"vLLM --disable-hybrid-kv-cache-manager"
    )


def _is_replayed(spec: Any) -> bool:
    """Return whether vLLM computes a window again instead of keeping it for a later request."""
    return bool(getattr(spec, "bounded_replay", False))


def num_left_to_decode(vllm_config: Any, groups: Sequence[BlockGroup]) -> int:
    """Return how many of a prompt's last tokens prefill must leave to decode.

    vLLM computes the last token at decode in any case, to get the first token of the answer. In a
    window layer that token needs one more earlier token than the next one does, and a recurrent
    state must not include it yet.

    With several MTP modules, each computes its entry of a token from one token further ahead. At
    the end of a prompt these are drafts, which decode would take for verified tokens.
    """
    keeps_latest = any(g.state is not None or g.window is not None for g in groups)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_multi_module_mtp():
        return int(keeps_latest)
    return max(int(keeps_latest), int(speculative.num_speculative_tokens) - 1)


def keeps_all_tokens(groups: Sequence[BlockGroup]) -> bool:
    """Return whether vLLM keeps every token of a request in blocks of one cache group."""
    return len(groups) == 1 and groups[0].window is None and groups[0].state is None


def num_workers(vllm_config: Any) -> int:
    """Return the number of ranks, each of which reports every room."""
    parallel = vllm_config.parallel_config
    num_stages = int(parallel.pipeline_parallel_size * parallel.prefill_context_parallel_size)
    return num_stages * int(parallel.tensor_parallel_size)


def engine_shape(
    vllm_config: Any,
    rank: int,
    *,
    on_cpu: bool,
    channels_first: bool = False,
    has_columns: bool = False,
) -> EngineShape:
    """Return the shape of the engine, as seen by one rank.

    ``channels_first``: the order of axes in a convolution's state. ``has_columns``: whether CPU
    kernels keep K by columns.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return EngineShape(
        tp=parallel.tensor_parallel_size,
        stages=_stages(vllm_config),
        rank=rank,
        num_heads=num_heads,
        block_tokens=vllm_config.cache_config.block_size,
        on_cpu=on_cpu,
        channels_first=channels_first,
        bc_groups=_bc_groups(model.hf_text_config),
        pcp=parallel.prefill_context_parallel_size,
        dcp=_dcp(vllm_config),
        interleave=parallel.cp_kv_cache_interleave_size,
        k_dim=None if model.use_mla else model.get_head_size(),
        has_columns=has_columns,
    )


def _bc_groups(config: Any) -> int | None:
    """Return the number of B and C groups of a Mamba-2 layer, if it is configured."""
    found = (getattr(config, name, None) for name in BC_GROUPS)
    return next((int(number) for number in found if number is not None), None)


def _stages(vllm_config: Any) -> tuple[int, ...]:
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if num_stages == 1:
        return (num_layers,)
    from vllm.distributed.utils import get_pp_indices  # noqa: PLC0415

    spans = [get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]
    return tuple(end - first for first, end in spans)


def replica_index(vllm_config: Any) -> int | None:
    """Return the index of this data-parallel replica; None without data parallelism.

    For a dense model vLLM sets each replica's data-parallel size to 1. The index and the suffix of
    the engine id still identify the replica.
    """
    parallel = vllm_config.parallel_config
    index = int(parallel.data_parallel_index)
    marked = str(vllm_config.kv_transfer_config.engine_id).endswith(f"_dp{index}")
    return index if parallel.data_parallel_size > 1 or marked else None


def fingerprint(vllm_config: Any, given: str | None) -> str:
    """Return the model's fingerprint. ``given`` is the checkpoint's name from the settings."""
    model = vllm_config.model_config
    overrides = model.hf_overrides
    return model_fingerprint(
        model.model,
        model.hf_text_config.to_dict(),
        dtype=_compute_dtype(vllm_config),
        tokenizer=model.tokenizer,
        revision=model.revision,
        overrides={"function": repr(overrides)} if callable(overrides) else overrides,
        given=given,
    )


def cache_dtype(vllm_config: Any) -> str:
    """Return the dtypes of computation and cache, for the digest."""
    kept = vllm_config.cache_config.cache_dtype
    computed = _compute_dtype(vllm_config)
    return computed if kept == "auto" else f"{computed} kept as {kept}"


def _compute_dtype(vllm_config: Any) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")
