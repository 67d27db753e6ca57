"""The recurrent state of hybrid models, as groups of a cache.

Three mixers keep a state instead of an entry for each token: the gated delta-net, Mamba-2 and
Mamba-1. Each function here reads a mixer's dimensions and returns its groups.

A causal convolution over ``kernel`` inputs keeps the last ``kernel - 1`` inputs, in the model's
type. The recurrent state has the type that the caller or the config names, else float32.
Quantising the attention cache changes neither.
"""

from __future__ import annotations

from math import gcd

from kvferry.layout.hf_fields import Fields, reject
from kvferry.layout.spec import DType, Group, StateRow, Tensor

MAMBA1_BLOCK = 64


def delta_groups(fields: Fields, layers: tuple[int, ...]) -> tuple[Group, ...]:
    """Return the group of a gated delta-net: a key_dim × value_dim state for each value head.

    The unit is a key head with its ``num_v / num_k`` value heads, which tensor parallelism keeps
    together.
    """
    width = _conv_width(fields, "linear_conv_kernel_dim")
    key_dim = fields.count("linear_key_head_dim")
    values_per_key = fields.ratio("linear_num_value_heads", "linear_num_key_heads")
    values = values_per_key * fields.count("linear_value_head_dim")
    tensors = (
        Tensor("conv_q", fields.model_dtype, key_dim * width),
        Tensor("conv_k", fields.model_dtype, key_dim * width),
        Tensor("conv_v", fields.model_dtype, values * width),
        Tensor("recurrent", _state_dtype(fields), key_dim * values),
    )
    return (Group("delta", StateRow(), layers, fields.count("linear_num_key_heads"), tensors),)


def kda_group(linear: Fields, layers: tuple[int, ...]) -> Group:
    """Return the group of Kimi Delta Attention: a head_dim × head_dim state for each head."""
    head_dim = linear.count("head_dim")
    width = _conv_width(linear, "short_conv_kernel_size")
    tensors = (
        *(Tensor(f"conv_{name}", linear.model_dtype, head_dim * width) for name in "qkv"),
        Tensor("recurrent", _state_dtype(linear), head_dim * head_dim),
    )
    return Group("kda", StateRow(), layers, linear.count("num_heads"), tensors)


def mamba2_groups(fields: Fields, layers: tuple[int, ...]) -> tuple[Group, ...]:
    """Return the groups of Mamba-2: a head_dim × state_size state for each head, and B and C.

    The heads of a B/C group share B and C. These form a cache group of their own, because ranks
    beyond the number of B/C groups replicate them while they still divide the heads.
    """
    heads = fields.count("mamba_n_heads", "mamba_num_heads")
    bc_groups = fields.count("mamba_n_groups", "n_groups")
    if heads % bc_groups:
        reject(f"field 'mamba_n_groups' or 'n_groups' is {bc_groups}, no divisor of {heads} heads")
    width = _conv_width(fields, "mamba_d_conv", "conv_kernel")
    head_dim = _mamba2_head_dim(fields, heads)
    state_size = fields.count("mamba_d_state", "ssm_state_size")
    own = (
        Tensor("conv_x", fields.model_dtype, head_dim * width),
        Tensor("ssm", _state_dtype(fields), head_dim * state_size),
    )
    shared = (
        Tensor("conv_b", fields.model_dtype, state_size * width),
        Tensor("conv_c", fields.model_dtype, state_size * width),
    )
    return (
        Group("mamba", StateRow(), layers, heads, own),
        Group("mamba_bc", StateRow(), layers, bc_groups, shared),
    )


def mamba1_groups(fields: Fields, layers: tuple[int, ...]) -> tuple[Group, ...]:
    """Return the group of Mamba-1: a state for each channel, without heads.

    The unit is a block of 64 channels, because a single channel has only six bytes of convolution
    state. There are still more blocks than ranks. B and C are computed after the convolution, so
    they have no state.
    """
    channels = _expanded(fields)
    block = gcd(channels, MAMBA1_BLOCK)
    width = _conv_width(fields, "mamba_d_conv")
    tensors = (
        Tensor("conv_x", fields.model_dtype, block * width),
        Tensor("ssm", _state_dtype(fields), block * fields.count("mamba_d_state")),
    )
    return (Group("mamba", StateRow(), layers, channels // block, tensors),)


def _mamba2_head_dim(fields: Fields, heads: int) -> int:
    """Return the channels of a head: stated, or the inner channels divided by the heads.

    Nemotron-H states only the channels of a head. Others also state the inner size, which must
    agree, or "auto".
    """
    if fields.find("mamba_num_heads") is not None:
        return fields.count("mamba_head_dim")
    inner = fields.count("mamba_d_ssm", default=_expanded(fields))
    stated = fields.find("mamba_d_head")
    auto = stated is None or stated[1] == "auto"
    head_dim = inner // heads if auto else fields.count("mamba_d_head")
    if head_dim * heads != inner:
        reject(
            f"field 'mamba_n_heads' is {heads}, and {head_dim} each do not make {inner} channels"
        )
    return head_dim


def _expanded(fields: Fields) -> int:
    return fields.count("hidden_size") * fields.count("mamba_expand")


def _conv_width(fields: Fields, *names: str) -> int:
    return fields.count(*names, least=2) - 1


def _state_dtype(fields: Fields) -> DType:
    if fields.state_dtype is not None:
        return fields.state_dtype
    return fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default=DType.FLOAT32)
