"""Tests of each family's config.json against numbers computed by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from configs import CONFIGS, Json, config, without

from kvferry.layout.hf import FAMILIES, spec_from_config
from kvferry.layout.hf_fields import DEFAULTS, MULTI_HEAD
from kvferry.layout.spec import CacheSpec, DType, Kind, Paged, StateRow, Tensor, Window


class Expected(NamedTuple):
    """One group. ``unit_bytes`` are of one unit over all tensors of one layer."""

    name: str
    kind: Kind
    num_layers: int
    units: int
    unit_bytes: int


# Bytes per token count each paged or windowed layer once; slots have no part in them.
SPECS: dict[str, tuple[int, int, list[Expected]]] = {
    # a latent of 512 in bfloat16 in every layer's window and for 4 or 128 tokens, and what the
    # next entries are computed from; the sum is that of one entry of each layer
    "deepseek-v4-flash": (
        43,
        389712,
        [
            Expected("swa", Window(128), 43, 1, 1024),
            Expected("sparse", Paged(), 20, 1, 1024),
            Expected("sparse_inputs", Window(8), 20, 1, 8192),
            Expected("heavy", Paged(), 23, 1, 1024),
            Expected("heavy_inputs", Window(128), 23, 1, 4096),
            Expected("index", Paged(), 20, 1, 132),
            Expected("index_inputs", Window(8), 20, 1, 2048),
        ],
    ),
    # conv 3 × 128 × 3 × 2 = 2304, recurrent 128 × 128 × 4 = 65536; its MLA is DeepSeek V3's
    "kimi-linear-48b-a3b": (
        27,
        8064,
        [Expected("latent", Paged(), 7, 1, 1152), Expected("kda", StateRow(), 20, 32, 67840)],
    ),
    # full layers have heads of 512, sliding ones of 256
    "gemma-4-defaults": (
        30,
        143360,
        [Expected("kv", Paged(), 5, 4, 2048), Expected("swa", Window(512), 25, 4, 1024)],
    ),
    # layers × heads × head_dim × (k and v) × 2 bytes
    "llama-3.1-8b": (32, 131072, [Expected("kv", Paged(), 32, 8, 512)]),
    "llama-3.3-70b": (80, 327680, [Expected("kv", Paged(), 80, 8, 512)]),
    "qwen3-8b": (36, 147456, [Expected("kv", Paged(), 36, 8, 512)]),
    "qwen3-30b-a3b": (48, 98304, [Expected("kv", Paged(), 48, 4, 512)]),
    "smollm2-135m": (30, 23040, [Expected("kv", Paged(), 30, 3, 256)]),
    # 10 of 62 layers are full: the last of every six
    "gemma-3-27b": (
        62,
        507904,
        [Expected("kv", Paged(), 10, 16, 512), Expected("swa", Window(1024), 52, 16, 512)],
    ),
    "gpt-oss-20b": (
        24,
        49152,
        [Expected("kv", Paged(), 12, 8, 256), Expected("swa", Window(128), 12, 8, 256)],
    ),
    # 512 + 64 elements in bfloat16
    "deepseek-v3": (61, 70272, [Expected("latent", Paged(), 61, 1, 1152)]),
    # ... and 128 bytes of key with one float32 scale
    "deepseek-v3.2": (
        61,
        78324,
        [Expected("latent", Paged(), 61, 1, 1152), Expected("index", Paged(), 61, 1, 132)],
    ),
    # conv 768 + 768 + 1536, recurrent 2 × 128 × 128 × 4 = 131072
    "qwen3-next-80b-a3b": (
        48,
        24576,
        [Expected("kv", Paged(), 12, 2, 1024), Expected("delta", StateRow(), 36, 16, 134144)],
    ),
    "qwen3.5-35b-a3b": (
        40,
        20480,
        [Expected("kv", Paged(), 10, 2, 1024), Expected("delta", StateRow(), 30, 16, 134144)],
    ),
    # conv_x 64 × 3 × 2 = 384, ssm 64 × 128 × 4 = 32768; B and C 128 × 3 × 2 each
    "bamba-9b": (
        32,
        12288,
        [
            Expected("kv", Paged(), 3, 8, 512),
            Expected("mamba", StateRow(), 29, 128, 33152),
            Expected("mamba_bc", StateRow(), 29, 1, 1536),
        ],
    ),
    "granite-4.0-h-small": (
        40,
        16384,
        [
            Expected("kv", Paged(), 4, 8, 512),
            Expected("mamba", StateRow(), 36, 128, 33152),
            Expected("mamba_bc", StateRow(), 36, 1, 1536),
        ],
    ),
    # conv_x 128 × 3 × 2 = 768, ssm 128 × 256 × 4 = 131072; B and C 256 × 3 × 2 each
    "falcon-h1-7b": (
        44,
        45056,
        [
            Expected("kv", Paged(), 44, 2, 512),
            Expected("mamba", StateRow(), 44, 24, 131840),
            Expected("mamba_bc", StateRow(), 44, 1, 3072),
        ],
    ),
    "nemotron-h-8b": (
        52,
        16384,
        [
            Expected("kv", Paged(), 4, 8, 512),
            Expected("mamba", StateRow(), 24, 128, 33152),
            Expected("mamba_bc", StateRow(), 24, 8, 1536),
        ],
    ),
    # 8192 channels in 128 blocks of 64: conv_x 64 × 3 × 2 = 384, ssm 64 × 16 × 4 = 4096
    "jamba-mini": (
        32,
        16384,
        [Expected("kv", Paged(), 4, 8, 512), Expected("mamba", StateRow(), 28, 128, 4480)],
    ),
}


def summary(spec: CacheSpec) -> list[Expected]:
    return [
        Expected(group.name, group.kind, len(group.layers), group.units, group.unit_bytes)
        for group in spec.groups
    ]


def bytes_per_token(spec: CacheSpec) -> int:
    return sum(
        len(group.layers) * group.units * group.unit_bytes
        for group in spec.groups
        if not isinstance(group.kind, StateRow)
    )


def layers(spec: CacheSpec) -> dict[str, tuple[int, ...]]:
    return {group.name: group.layers for group in spec.groups}


def test_every_config_has_expected_numbers() -> None:
    assert set(CONFIGS) == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_spec_of_a_published_model(name: str) -> None:
    num_layers, per_token, groups = SPECS[name]
    spec = spec_from_config(CONFIGS[name])
    assert spec.num_layers == num_layers
    assert summary(spec) == groups
    assert bytes_per_token(spec) == per_token


def test_tensors_of_each_kind_of_state() -> None:
    bf16, f32 = DType.BFLOAT16, DType.FLOAT32
    assert spec_from_config(CONFIGS["qwen3-next-80b-a3b"]).group("delta").tensors == (
        Tensor("conv_q", bf16, 384),
        Tensor("conv_k", bf16, 384),
        Tensor("conv_v", bf16, 768),
        Tensor("recurrent", f32, 32768),
    )
    nemotron = spec_from_config(CONFIGS["nemotron-h-8b"])
    assert nemotron.group("mamba").tensors == (
        Tensor("conv_x", bf16, 192),
        Tensor("ssm", f32, 8192),
    )
    assert nemotron.group("mamba_bc").tensors == (
        Tensor("conv_b", bf16, 384),
        Tensor("conv_c", bf16, 384),
    )
    assert spec_from_config(CONFIGS["jamba-mini"]).group("mamba").tensors == (
        Tensor("conv_x", bf16, 192),
        Tensor("ssm", f32, 1024),
    )


def test_layers_keep_their_numbers_in_the_model() -> None:
    assert layers(spec_from_config(CONFIGS["gemma-3-27b"]))["kv"] == tuple(range(5, 62, 6))
    assert layers(spec_from_config(CONFIGS["qwen3-next-80b-a3b"]))["kv"] == tuple(range(3, 48, 4))
    assert layers(spec_from_config(CONFIGS["bamba-9b"]))["kv"] == (9, 18, 27)
    assert layers(spec_from_config(CONFIGS["jamba-mini"]))["kv"] == (4, 12, 20, 28)
    nemotron = layers(spec_from_config(CONFIGS["nemotron-h-8b"]))
    assert nemotron["kv"] == (7, 18, 29, 40)
    assert nemotron["mamba"][:5] == (0, 2, 4, 6, 9)
    assert nemotron["mamba"] == nemotron["mamba_bc"]


def test_gpt_oss_pattern_is_the_same_listed_or_not() -> None:
    assert spec_from_config(without("gpt-oss-20b", "layer_types")) == spec_from_config(
        CONFIGS["gpt-oss-20b"]
    )


def test_full_attention_interval_is_the_same_listed_or_not() -> None:
    assert spec_from_config(without("qwen3.5-35b-a3b", "layer_types")) == spec_from_config(
        CONFIGS["qwen3.5-35b-a3b"]
    )


# --- dtypes ---------------------------------------------------------------


def test_override_halves_the_attention_cache_only() -> None:
    spec = spec_from_config(CONFIGS["llama-3.1-8b"], dtype=DType.FLOAT8_E4M3)
    assert bytes_per_token(spec) == 65536
    hybrid = spec_from_config(CONFIGS["bamba-9b"], dtype=DType.FLOAT8_E4M3)
    assert bytes_per_token(hybrid) == 6144
    assert hybrid.group("mamba") == spec_from_config(CONFIGS["bamba-9b"]).group("mamba")


def test_override_leaves_index_keys_alone() -> None:
    spec = spec_from_config(CONFIGS["deepseek-v3.2"], dtype=DType.FLOAT32)
    assert spec.group("latent").unit_bytes == 2304
    assert spec.group("index").tensors == (
        Tensor("key", DType.FLOAT8_E4M3, 128),
        Tensor("scale", DType.FLOAT32, 1),
    )


@pytest.mark.parametrize(("width", "scales"), [(64, 1), (256, 2)])
def test_index_keys_have_a_scale_per_block(width: int, scales: int) -> None:
    spec = spec_from_config(config("deepseek-v3.2", index_head_dim=width))
    assert spec.group("index").unit_bytes == width + 4 * scales


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "float16"}, DType.FLOAT16),
        ({"torch_dtype": "torch.float32"}, DType.FLOAT32),
        ({"torch_dtype": "float16", "dtype": "float32"}, DType.FLOAT32),
        ({"torch_dtype": None}, DType.BFLOAT16),
    ],
)
def test_dtype_of_the_config(changes: Json, expected: DType) -> None:
    spec = spec_from_config(config("llama-3.1-8b", **changes))
    assert {tensor.dtype for tensor in spec.group("kv").tensors} == {expected}


def test_nested_dtype_comes_before_the_wrappers() -> None:
    assert spec_from_config(config("gemma-3-27b", dtype="float32")).group("kv").unit_bytes == 1024
    made = config("gemma-3-27b")
    made["torch_dtype"] = "float32"
    assert spec_from_config(made).group("kv").unit_bytes == 1024


def test_state_dtype_of_the_config() -> None:
    spec = spec_from_config(config("qwen3.5-35b-a3b", mamba_ssm_dtype="bfloat16"))
    assert spec.group("delta").tensors[-1] == Tensor("recurrent", DType.BFLOAT16, 32768)
    spec = spec_from_config(config("nemotron-h-8b", mamba_ssm_cache_dtype="float16"))
    assert spec.group("mamba").tensors[-1] == Tensor("ssm", DType.FLOAT16, 8192)


def test_state_dtype_of_the_caller_wins_over_the_config_and_the_default() -> None:
    asked = DType.FLOAT16
    for name, group in (
        ("bamba-9b", "mamba"),
        ("jamba-mini", "mamba"),
        ("qwen3.5-35b-a3b", "delta"),
    ):
        own, other = (spec_from_config(CONFIGS[name], state_dtype=t) for t in (None, asked))
        *convolutions, state = other.group(group).tensors
        assert state.dtype is asked
        assert convolutions == list(own.group(group).tensors[:-1])
        assert other.group("kv") == own.group("kv")
    stated = config("qwen3.5-35b-a3b", mamba_ssm_dtype="bfloat16")
    assert spec_from_config(stated, state_dtype=asked).group("delta").tensors[-1].dtype is asked


# --- families and fall-backs ----------------------------------------------


def test_llama_without_kv_heads_has_one_per_query_head() -> None:
    for made in (
        without("llama-3.1-8b", "num_key_value_heads"),
        config("llama-3.1-8b", num_key_value_heads=None),
    ):
        assert spec_from_config(made).group("kv").units == 32


def test_null_head_dim_counts_as_missing() -> None:
    assert spec_from_config(config("llama-3.3-70b", head_dim=None)).group("kv").unit_bytes == 512


def test_stated_head_dim_wins_over_the_quotient() -> None:
    assert spec_from_config(config("llama-3.1-8b", head_dim=64)).group("kv").unit_bytes == 256


def test_defaults_that_published_gemma_configs_leave_out() -> None:
    left_out = without("gemma-3-27b", "num_attention_heads", "num_key_value_heads", "head_dim")
    left_out["text_config"]["num_hidden_layers"] = 34
    assert summary(spec_from_config(left_out)) == [
        Expected("kv", Paged(), 5, 4, 1024),
        Expected("swa", Window(1024), 29, 4, 1024),
    ]


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma_pattern_by_either_name(field: str) -> None:
    spec = spec_from_config(config("gemma-3-27b", **{field: 31}))
    assert layers(spec)["kv"] == (30, 61)


def test_gemma2_alternates_from_a_sliding_layer() -> None:
    made = config("llama-3.1-8b", model_type="gemma2", sliding_window=4096)
    spec = spec_from_config(made)
    assert spec.group("swa").kind == Window(4096)
    assert layers(spec)["swa"] == tuple(range(0, 32, 2))
    assert spec.group("kv").unit_bytes == 1024


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 1000}, Window(1000)),
        ({"sliding_window": None}, Paged()),
        ({}, Window(4096)),
    ],
)
def test_mistral_window(changes: Json, expected: Kind) -> None:
    spec = spec_from_config(config("llama-3.1-8b", model_type="mistral", **changes))
    (group,) = spec.groups
    assert group.kind == expected
    assert group.name == ("kv" if expected == Paged() else "swa")


@pytest.mark.parametrize("model_type", ["mixtral", "phi3"])
def test_no_window_unless_stated(model_type: str) -> None:
    assert "kv" in layers(spec_from_config(config("llama-3.1-8b", model_type=model_type)))


@pytest.mark.parametrize(
    ("model_type", "sliding"),
    [
        ("qwen2", tuple(range(10, 36))),
        ("qwen3", tuple(range(10, 36))),
        ("qwen2_moe", tuple(range(0, 10, 2))),
        ("qwen3_moe", tuple(range(36))),
    ],
)
def test_qwen_window_must_be_switched_on(model_type: str, sliding: tuple[int, ...]) -> None:
    changes = {"model_type": model_type, "sliding_window": 4096, "max_window_layers": 10}
    off = config("qwen3-8b", **changes, use_sliding_window=False)
    assert layers(spec_from_config(off)) == {"kv": tuple(range(36))}
    on = config("qwen3-8b", **changes, use_sliding_window=True)
    assert layers(spec_from_config(on))["swa"] == sliding


def test_architecture_stands_in_for_model_type() -> None:
    made = without("qwen3-next-80b-a3b", "model_type")
    assert spec_from_config(made) == spec_from_config(CONFIGS["qwen3-next-80b-a3b"])
    made["model_type"] = "a-fine-tune"
    assert spec_from_config(made) == spec_from_config(CONFIGS["qwen3-next-80b-a3b"])


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_any_wrapper_of_a_known_text_model(key: str) -> None:
    made = {"model_type": "some_vision_model", key: CONFIGS["llama-3.1-8b"]}
    assert spec_from_config(made) == spec_from_config(CONFIGS["llama-3.1-8b"])


def test_deepseek_v3_with_an_index_has_its_keys() -> None:
    made = config("deepseek-v3.2", model_type="deepseek_v3")
    assert spec_from_config(made) == spec_from_config(CONFIGS["deepseek-v3.2"])


def test_nemotron_layers_by_list() -> None:
    names = {"M": "mamba", "-": "mlp", "*": "attention"}
    made = without("nemotron-h-8b", "hybrid_override_pattern", "num_hidden_layers")
    pattern = CONFIGS["nemotron-h-8b"]["hybrid_override_pattern"]
    made["layers_block_type"] = [names[letter] for letter in pattern]
    assert spec_from_config(made) == spec_from_config(CONFIGS["nemotron-h-8b"])


def test_granite_without_mamba_layers_needs_no_mamba_fields() -> None:
    made = without("granite-4.0-h-small", "mamba_n_heads", "mamba_d_head", "mamba_d_state")
    made["layer_types"] = ["attention"] * 40
    assert summary(spec_from_config(made)) == [Expected("kv", Paged(), 40, 8, 512)]


def test_mamba_head_dim_may_be_auto() -> None:
    for name in ("bamba-9b", "falcon-h1-7b"):
        assert spec_from_config(config(name, mamba_d_head="auto")) == spec_from_config(
            CONFIGS[name]
        )


def test_tables_name_families_only() -> None:
    assert set(DEFAULTS) <= set(FAMILIES)
    assert set(FAMILIES) >= MULTI_HEAD
