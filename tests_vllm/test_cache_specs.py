"""The bytes of entries that vLLM's own cache specifications give equal the recorded ones.

``tests/layout/test_hf_latent.py`` compares them with ``spec_from_config``. Specifications come from
vLLM's layers, whose methods are called on stand-ins with the fields of a model's configuration.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from configs import CONFIGS, ENTRY_BYTES, ENTRY_BYTES_FILE, Json

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.mamba.mamba_utils import (
        MambaStateDtypeCalculator,
        MambaStateShapeCalculator,
    )
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

BLOCK = 256
Sizes = dict[str, dict[str, int]]


def engine(cache_dtype: str = "auto") -> Any:
    """Return what the layers read of vLLM's configuration."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


def size_of(spec: Any) -> dict[str, int]:
    """Return the bytes of an entry, the tokens it stands for, and the window if there is one."""
    entry = spec.num_heads * spec.state_content_size_bytes
    found = {"bytes": entry, "tokens_per_entry": int(spec.tokens_per_state)}
    return found | ({"window": spec.sliding_window} if isinstance(spec, SlidingWindowSpec) else {})


def attention(heads: int, width: int, window: int | None = None) -> dict[str, int]:
    shape = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": width}
    if window is None:
        return size_of(FullAttentionSpec(**shape, dtype=torch.bfloat16))
    return size_of(SlidingWindowSpec(**shape, dtype=torch.bfloat16, sliding_window=window))


def states(shapes: Any, dtypes: Any) -> dict[str, int]:
    spec = MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes)
    return {"bytes": spec.page_size_bytes}


def latent(config: Json, cache_dtype: str) -> dict[str, int]:
    layer = SimpleNamespace(
        kv_cache_dtype=cache_dtype,
        head_size=config["kv_lora_rank"] + config["qk_rope_head_dim"],
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    return size_of(MLAAttention.get_kv_cache_spec(layer, engine(cache_dtype)))


def mla(config: Json, cache_dtype: str) -> Sizes:
    found = {"latent": latent(config, cache_dtype)}
    if width := config.get("index_head_dim"):
        its = SimpleNamespace(
            cache_config=engine().cache_config, head_dim=width + width // 128 * 4, dtype=torch.uint8
        )
        found["index"] = size_of(DeepseekV32IndexerCache.get_kv_cache_spec(its, engine()))
    return found


def compressed(config: Json, cache_dtype: str) -> Sizes:
    width, index = config["head_dim"], config["index_head_dim"]
    packed = cache_dtype == "fp8_ds_mla"
    its = engine(cache_dtype)
    dtype = torch.uint8 if packed else torch.bfloat16
    with set_current_vllm_config(VllmConfig()):
        swa = DeepseekV4SWACache(
            width, config["sliding_window"], dtype, "swa", its.cache_config, backend_cls=object
        )
        inputs = {
            "sparse_inputs": CompressorStateCache(2 * 2 * width, torch.float32, 4, "a"),
            "heavy_inputs": CompressorStateCache(2 * 1 * width, torch.float32, 128, "b"),
            "index_inputs": CompressorStateCache(2 * 2 * index, torch.float32, 4, "c"),
        }
    found = {"swa": size_of(swa.get_kv_cache_spec(its))}
    for name, ratio in (("sparse", 4), ("heavy", 128)):
        layer = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=cache_dtype,
            kv_cache_torch_dtype=torch.bfloat16,
            head_dim=width,
        )
        found[name] = size_of(DeepseekV4Attention.get_kv_cache_spec(layer, its))
    key = SimpleNamespace(
        cache_config=its.cache_config,
        head_dim=index + index // 128 * 4,
        dtype=torch.uint8,
        compress_ratio=4,
    )
    found["index"] = size_of(DeepseekV4IndexerCache.get_kv_cache_spec(key, its))
    return found | {name: size_of(one.get_kv_cache_spec(its)) for name, one in inputs.items()}


def kimi(config: Json, cache_dtype: str) -> Sizes:
    linear = config["linear_attn_config"]
    shapes = MambaStateShapeCalculator.kda_state_shape(
        1,
        linear["num_heads"],
        linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
    )
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto")
    return {"latent": latent(config, cache_dtype), "kda": states(shapes, dtypes)}


def delta(config: Json, _: str) -> Sizes:
    config = config.get("text_config", config)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        *(config["linear_num_key_heads"], config["linear_num_value_heads"]),
        *(config["linear_key_head_dim"], config["linear_value_head_dim"]),
        config["linear_conv_kernel_dim"],
    )
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        torch.bfloat16, "auto", "float32"
    )
    return {
        "kv": attention(config["num_key_value_heads"], config["head_dim"]),
        "delta": states(shapes, dtypes),
    }


def windows(config: Json, _: str) -> Sizes:
    config = config.get("text_config", config)
    heads, width = int(config["num_key_value_heads"]), int(config["head_dim"])
    return {
        "kv": attention(heads, int(config.get("global_head_dim", width))),
        "swa": attention(heads, width, config["sliding_window"]),
    }


CASES: dict[str, tuple[str, str, Callable[[Json, str], Sizes]]] = {
    "deepseek-v3": ("deepseek-v3", "auto", mla),
    "deepseek-v3.2": ("deepseek-v3.2", "auto", mla),
    "deepseek-v3.2 fp8_ds_mla": ("deepseek-v3.2", "fp8_ds_mla", mla),
    "deepseek-v4-flash": ("deepseek-v4-flash", "auto", compressed),
    "deepseek-v4-flash fp8_ds_mla": ("deepseek-v4-flash", "fp8_ds_mla", compressed),
    "kimi-linear-48b-a3b": ("kimi-linear-48b-a3b", "auto", kimi),
    "kimi-linear-48b-a3b fp8_ds_mla": ("kimi-linear-48b-a3b", "fp8_ds_mla", kimi),
    "qwen3-next-80b-a3b": ("qwen3-next-80b-a3b", "auto", delta),
    "qwen3.5-35b-a3b": ("qwen3.5-35b-a3b", "auto", delta),
    "gemma-4-defaults": ("gemma-4-defaults", "auto", windows),
    "gpt-oss-20b": ("gpt-oss-20b", "auto", windows),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_bytes_are_those_of_vllm(case: str) -> None:
    name, cache_dtype, compute = CASES[case]
    computed = compute(CONFIGS[name], cache_dtype)
    if case not in ENTRY_BYTES:
        ENTRY_BYTES[case] = computed
        ENTRY_BYTES_FILE.write_text(json.dumps(ENTRY_BYTES, indent=2) + "\n")
    assert ENTRY_BYTES[case] == computed


def test_every_recorded_case_is_computed() -> None:
    assert set(ENTRY_BYTES) == set(CASES)
