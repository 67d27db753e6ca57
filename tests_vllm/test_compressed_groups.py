"""The cache groups and tensors that vLLM makes for DeepSeek V4 equal the recorded ones.

``tests/connectors/vllm/test_compressed_groups.py`` carries prompts between caches of the recorded
shapes and strides. Specifications come from vLLM's layers, groups and tensors from its functions.
"""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from configs import CONFIGS
from connectors.vllm.compressed import ENGINES, NUM_BLOCKS, RATIOS, CompressedCase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
    from vllm.v1.core.kv_cache_utils import (
        _get_kv_cache_bytes_per_block,
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
    from vllm.v1.kv_cache_interface import (
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        create_kv_cache_views,
    )

CONFIG = CONFIGS["deepseek-v4-flash"]


def specs(case: CompressedCase) -> dict[str, Any]:
    """Return vLLM's specification of each cache of a few layers."""
    width, index = CONFIG["head_dim"], CONFIG["index_head_dim"]
    dtype = torch.uint8 if case.kept_as == "fp8_ds_mla" else torch.bfloat16
    cache = SimpleNamespace(block_size=case.block, cache_dtype=case.kept_as)
    its = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=torch.bfloat16))
    found: dict[str, Any] = {}

    def state(name: str, width: int, ratio: int) -> None:
        overlap = 2 if ratio == 4 else 1
        layer = CompressorStateCache(2 * overlap * width, torch.float32, ratio, name)
        found[name] = layer.get_kv_cache_spec(its)

    for number, ratio in enumerate(RATIOS):
        name = f"model.layers.{number}.attn"
        swa = f"{name}.swa_cache"
        layer = DeepseekV4SWACache(
            width, CONFIG["sliding_window"], dtype, swa, cache, backend_cls=object
        )
        found[swa] = layer.get_kv_cache_spec(its)
        if not ratio:
            continue
        attention = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=case.kept_as,
            kv_cache_torch_dtype=torch.bfloat16,
            head_dim=width,
        )
        found[name] = DeepseekV4Attention.get_kv_cache_spec(attention, its)
        state(f"{name}.compressor.state_cache", width, ratio)
        if ratio == 4:
            key = SimpleNamespace(
                cache_config=cache,
                head_dim=index + index // 128 * 4,
                dtype=torch.uint8,
                compress_ratio=ratio,
            )
            found[f"{name}.indexer.k_cache"] = DeepseekV4IndexerCache.get_kv_cache_spec(key, its)
            state(f"{name}.indexer.compressor.state_cache", index, ratio)
    return found


def plain_spec(spec: Any) -> dict[str, Any]:
    """Return the fields that the connector reads, and the name of the class."""
    fields: dict[str, Any] = {"block_size": spec.block_size, "dcp_sharded": spec.dcp_sharded}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        fields["kv_cache_specs"] = {n: plain_spec(s) for n, s in spec.kv_cache_specs.items()}
    else:
        names: tuple[str, ...] = ("tokens_per_state", "state_content_bytes", "model_version")
        windows = ("sliding_window", "extra_retained_tokens", "bounded_replay")
        names += windows if isinstance(spec, SlidingWindowSpec) else ()
        fields |= {name: getattr(spec, name) for name in names}
    return fields | {"kind": type(spec).__name__}


def described(case: CompressedCase) -> dict[str, Any]:
    """Return vLLM's groups and the place of each cache in its memory, without content."""
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "BLHNC"
    with set_current_vllm_config(config):
        its = specs(case)
        groups = get_kv_cache_groups(config, its)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        memory = NUM_BLOCKS * _get_kv_cache_bytes_per_block(groups, layout)
        made = get_kv_cache_config_from_groups(config, groups, memory)
    caches: dict[str, Any] = {}
    for tensor in made.kv_cache_tensors:
        raw = torch.empty(tensor.size, dtype=torch.int8, device="meta")
        spec = its[tensor.layers[0]]
        views = create_kv_cache_views(raw, spec, made.num_blocks, layout, tensor)
        for name, view in zip(tensor.layers, views, strict=True):
            caches[name] = {
                "shape": list(view.shape),
                "strides": [stride * view.itemsize for stride in view.stride()],
                "offset": view.storage_offset() * view.itemsize,
                "dtype": str(view.dtype).removeprefix("torch."),
            }
    return {
        "num_bytes": made.kv_cache_tensors[0].size,
        "groups": [
            {"names": list(group.layer_names), "spec": plain_spec(group.kv_cache_spec)}
            for group in made.kv_cache_groups
        ],
        "caches": caches,
    }


@pytest.mark.parametrize("case", ENGINES, ids=str)
def test_recorded_groups_are_those_of_vllm(case: CompressedCase) -> None:
    computed = described(case)
    if not case.path.exists():
        case.path.parent.mkdir(exist_ok=True)
        case.path.write_text(json.dumps(computed, indent=1) + "\n")
    assert json.loads(case.path.read_text()) == json.loads(json.dumps(computed))
