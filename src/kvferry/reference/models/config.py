"""A model's configuration, read from a Hugging Face folder, and the layout of its cache.

The engine runs two published families, Llama and dense Qwen3, and a hybrid of its own with
gated linear-attention layers between attention layers. It refuses a configuration that it
would compute wrongly (another activation, biases, rotary scaling, a sliding window).
The layout is the single source of truth: the layers and KV heads that a rank computes
(``shard.py``) and its cache memory follow from it. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry import (
    CacheSpec,
    DType,
    Group,
    InputError,
    Layout,
    Order,
    Paged,
    Parallel,
    ReasonCode,
    Refused,
    StateRow,
    Tensor,
    attention_group,
    decode_config,
)

ATTENTION = "full_attention"
LINEAR = "linear_attention"
HYBRID = "kvferry_hybrid"
KV = "kv"
STATE = "state"
FAMILIES = ("llama", "qwen3", HYBRID)


class LinearConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the hybrid's gated linear-attention layers."""

    heads: int
    key_dim: int
    value_dim: int
    kernel: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know about a model."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    max_tokens: int
    norm_eps: float
    rope_theta: float
    tied: bool = False
    linear: LinearConfig | None = None
    end_tokens: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_types)

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head is normalised before the rotation."""
        return self.family != "llama"

    def layers_of(self, layer_type: str) -> tuple[int, ...]:
        """Return the numbers of the layers of one type."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == layer_type)

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read ``config.json``."""
        return _checked(decode_config(folder, _RawConfig))


class _RawConfig(msgspec.Struct, kw_only=True):
    """The fields of ``config.json`` that are used, under their published names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | list[int] | None = None
    linear_num_key_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0


def _checked(raw: _RawConfig) -> ModelConfig:
    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    layer_types = raw.layer_types or (ATTENTION,) * raw.num_hidden_layers
    is_hybrid = raw.model_type == HYBRID
    known = {ATTENTION, LINEAR} if is_hybrid else {ATTENTION}
    _demand(raw.model_type in FAMILIES, f"its model_type is {raw.model_type!r:.40}")
    _demand(raw.hidden_act == "silu", f"its activation is {raw.hidden_act!r}, not silu")
    _demand(not (raw.attention_bias or raw.mlp_bias), "its projections have biases")
    _demand(not raw.use_sliding_window, "it uses a sliding window")
    _demand(heads % kv_heads == 0, f"{kv_heads} KV heads do not divide {heads} query heads")
    _demand(set(layer_types) == known, f"its layers are of the types {', '.join(set(layer_types))}")
    _demand(
        len(layer_types) == raw.num_hidden_layers,
        f"it lists {len(layer_types)} layers and says it has {raw.num_hidden_layers}",
    )
    # Newer configurations keep the rotation in ``rope_parameters``.
    rope: dict[str, object] = {"rope_theta": raw.rope_theta} if raw.rope_theta else {}
    rope |= {**(raw.rope_scaling or {}), **(raw.rope_parameters or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _demand(kind == "default", f"its rotary scaling is {kind!r}")
    ids = raw.eos_token_id
    return ModelConfig(
        family=raw.model_type,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.head_dim or raw.hidden_size // heads,
        layer_types=layer_types,
        max_tokens=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        rope_theta=float(str(rope.get("rope_theta", 10000.0))),
        tied=raw.tie_word_embeddings,
        linear=_linear(raw) if is_hybrid else None,
        end_tokens=() if ids is None else (ids,) if isinstance(ids, int) else tuple(ids),
    )


def _demand(fits: bool, what: str) -> None:
    if not fits:
        raise Refused.because(
            ReasonCode.BAD_CONFIG,
            f"this engine can't run the model: {what}; use a plain Llama or dense Qwen3 model",
        )


def _linear(raw: _RawConfig) -> LinearConfig:
    linear = LinearConfig(
        heads=raw.linear_num_key_heads,
        key_dim=raw.linear_key_head_dim,
        value_dim=raw.linear_value_head_dim,
        kernel=raw.linear_conv_kernel_dim,
    )
    sizes = (linear.heads, linear.key_dim, linear.value_dim, linear.kernel - 1)
    _demand(min(sizes) >= 1, "a size of its linear-attention layers is missing")
    return linear


# ---------------------------------------------------------------- its cache


def cache_spec(config: ModelConfig, dtype: DType = DType.FLOAT32) -> CacheSpec:
    """Return what the model keeps: K and V per token, and for a hybrid a state row."""
    layers = config.layers_of(ATTENTION)
    kv = attention_group(KV, Paged(), layers, config.kv_heads, config.head_dim, None, dtype)
    linear = config.linear
    if linear is None:
        return CacheSpec(config.num_layers, (kv,))
    width = linear.kernel - 1
    # One unit is a head with its recurrent state and the last inputs of its convolutions.
    tensors = (
        Tensor("conv_q", dtype, width * linear.key_dim),
        Tensor("conv_k", dtype, width * linear.key_dim),
        Tensor("conv_v", dtype, width * linear.value_dim),
        Tensor("recurrent", DType.FLOAT32, linear.key_dim * linear.value_dim),
    )
    state = Group(STATE, StateRow(), config.layers_of(LINEAR), linear.heads, tensors)
    return CacheSpec(config.num_layers, (kv, state))


def layout_for(
    config: ModelConfig,
    parallel: Parallel,
    *,
    page_tokens: int = 16,
    order: Order = Order.NHD,
    dtype: DType = DType.FLOAT32,
) -> Layout:
    """Return the layout of the model's cache under this sharding."""
    if parallel.cp != 1:
        raise InputError(f"this engine has no context parallelism; use cp=1, not {parallel.cp}")
    if parallel.tp > config.heads:
        raise Refused.because(
            ReasonCode.TP_UNITS,
            f"tp={parallel.tp} is more ranks than the model's {config.heads} query heads; lower tp",
        )
    return Layout(cache_spec(config, dtype), parallel, page_tokens=page_tokens, order=order)
