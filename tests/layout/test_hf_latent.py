"""Latent attention from config.json, against the bytes that vLLM's own specifications give."""

from __future__ import annotations

import pytest
from configs import CONFIGS, ENTRY_BYTES, Json, config, without

from kvferry.errors import ReasonCode, Refused
from kvferry.layout import DType, Part, Window
from kvferry.layout.hf import spec_from_config
from kvferry.layout.spec import CacheFormat, CacheSpec

PACKED = CacheFormat.FP8_DS_MLA


def spec_of(case: str) -> CacheSpec:
    name, _, form = case.partition(" ")
    return spec_from_config(CONFIGS[name], CacheFormat(form) if form else None)


@pytest.mark.parametrize("case", ENTRY_BYTES)
def test_entries_have_as_many_bytes_as_vllms(case: str) -> None:
    groups = {group.name: group for group in spec_of(case).groups}
    assert set(groups) == set(ENTRY_BYTES[case])
    for name, wanted in ENTRY_BYTES[case].items():
        group = groups[name]
        assert group.units * group.unit_bytes == wanted["bytes"], name
        assert group.tokens_per_entry == wanted.get("tokens_per_entry", 1), name
        kept = group.kind.num_tokens if isinstance(group.kind, Window) else None
        assert kept == wanted.get("window"), name


def test_models_beyond_plain_attention_are_recorded() -> None:
    models = {case.partition(" ")[0] for case in ENTRY_BYTES}
    assert models >= {
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "kimi-linear-48b-a3b",
        "qwen3-next-80b-a3b",
        "qwen3.5-35b-a3b",
        "gemma-4-defaults",
        "gpt-oss-20b",
    }


def test_parts_of_a_packed_latent() -> None:
    (latent,) = spec_from_config(CONFIGS["deepseek-v3.2"], PACKED).group("latent").tensors
    assert latent.parts == (
        Part("values", DType.FLOAT8_E4M3, 512),
        Part("scales", DType.FLOAT32, 4),
        Part("rotary", DType.BFLOAT16, 64),
    )
    assert (latent.dtype, latent.unit_bytes) == (DType.UINT8, 656)


def test_compressed_layers_by_ratio_and_by_type_are_the_same() -> None:
    by_ratio = spec_from_config(CONFIGS["deepseek-v4-flash"])
    ratios = CONFIGS["deepseek-v4-flash"]["compress_ratios"]
    names = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    types = [names.get(ratio, "heavily_compressed_attention") for ratio in ratios[:43]]
    changed: Json = without("deepseek-v4-flash", "compress_ratios") | {"layer_types": types}
    assert spec_from_config(changed) == by_ratio


def test_entries_of_several_tokens_count_when_they_are_complete() -> None:
    spec = spec_from_config(CONFIGS["deepseek-v4-flash"])
    alone = {group.name: CacheSpec(43, (group,)).payload_bytes(300) for group in spec.groups}
    assert alone["sparse"] == 20 * 1024 * (300 // 4)
    assert alone["heavy"] == 23 * 1024 * 2
    assert alone["heavy_inputs"] == 23 * 4096 * 128


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (config("deepseek-v4-flash", compress_ratios=[4, 3] * 22), ReasonCode.BAD_CONFIG),
        (config("deepseek-v4-flash", compress_ratios=[4]), ReasonCode.BAD_CONFIG),
        (config("deepseek-v4-flash", compress_ratios=None), ReasonCode.BAD_CONFIG),
        (config("deepseek-v4-flash", qk_rope_head_dim=60), ReasonCode.BAD_CONFIG),
        (config("deepseek-v3.2", kv_lora_rank=500), ReasonCode.BAD_CONFIG),
        (config("kimi-linear-48b-a3b", linear_attn_config=None), ReasonCode.BAD_CONFIG),
        (
            config("kimi-linear-48b-a3b", linear_attn_config={"kda_layers": [0]}),
            ReasonCode.BAD_CONFIG,
        ),
        (config("gemma-4-defaults"), ReasonCode.DTYPE),
        (config("llama-3.1-8b"), ReasonCode.DTYPE),
    ],
)
def test_packed_caches_that_do_not_fit_are_refused(changed: Json, code: ReasonCode) -> None:
    with pytest.raises(Refused) as caught:
        spec_from_config(changed, PACKED)
    assert [reason.code for reason in caught.value.reasons] == [code]


def test_gemma_4_layers_may_share_a_cache_or_have_fewer_global_heads() -> None:
    shared = spec_from_config(config("gemma-4-defaults", num_kv_shared_layers=6))
    assert [group.layers[-1] for group in shared.groups] == [23, 22]
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    assert spec_from_config(config("gemma-4-defaults", **changes)).group("kv").units == 2
