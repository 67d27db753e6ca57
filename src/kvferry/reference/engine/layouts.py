"""The cache of a model and the layout of a side, in kvferry's own words.

The layout is the single source of truth: which layers and which KV heads a rank
computes (``shard.py``) and which memory it needs (``cache.py``) follow from it.
"""

from __future__ import annotations

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
)
from kvferry.reference.models.config import ATTENTION, LINEAR, ModelConfig

KV = "kv"
STATE = "state"


def cache_spec(config: ModelConfig, dtype: DType = DType.FLOAT32) -> CacheSpec:
    """What the model keeps: K and V for each token, and a state row where it is a hybrid."""
    layers = config.layers_of(ATTENTION)
    kv = attention_group(KV, Paged(), layers, config.kv_heads, config.head_dim, None, dtype)
    return CacheSpec(config.num_layers, (kv, *_state_groups(config, dtype)))


def _state_groups(config: ModelConfig, dtype: DType) -> tuple[Group, ...]:
    """The unit is a head with everything it keeps: the sum, and the convolutions' inputs."""
    linear = config.linear
    if linear is None:
        return ()
    width = linear.kernel - 1
    tensors = (
        Tensor("conv_q", dtype, width * linear.key_dim),
        Tensor("conv_k", dtype, width * linear.key_dim),
        Tensor("conv_v", dtype, width * linear.value_dim),
        Tensor("recurrent", DType.FLOAT32, linear.key_dim * linear.value_dim),
    )
    return (Group(STATE, StateRow(), config.layers_of(LINEAR), linear.heads, tensors),)


def layout_for(
    config: ModelConfig,
    parallel: Parallel,
    *,
    page_tokens: int = 16,
    order: Order = Order.NHD,
    dtype: DType = DType.FLOAT32,
) -> Layout:
    """How ranks of that parallelism hold the model's cache; refuses what can't be computed."""
    if parallel.cp != 1:
        raise InputError(f"this engine has no context parallelism; use cp=1, not {parallel.cp}")
    if parallel.tp > config.heads:
        raise Refused.because(
            ReasonCode.TP_UNITS,
            f"tp={parallel.tp} is more ranks than the model's {config.heads} query heads; lower tp",
        )
    spec = cache_spec(config, dtype)
    return Layout(spec, parallel, page_tokens=page_tokens, order=order)
