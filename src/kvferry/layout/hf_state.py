"""The recurrent state of hybrid models, as groups of a cache.

Three mixers keep a state instead of an entry for each token: the gated
delta-net, Mamba-2 and Mamba-1. Each function reads a mixer's dimensions and
gives the groups that it adds on the layers that have it.

A causal convolution over ``kernel`` inputs needs the ``kernel - 1`` inputs
before the next token, so that is the width of every convolution state. Its
elements have the model's type. What is summed up over tokens has the type that
the caller or the config names, else float32. Engines differ here (vLLM's
"auto" takes the model's type), so a caller who knows should say. Quantising the
attention cache changes neither.
"""

from __future__ import annotations

from math import gcd

from kvferry.layout.hf_fields import Fields, bad
from kvferry.layout.spec import DType, Group, StateRow, Tensor

MAMBA1_BLOCK = 64


def delta_groups(fields: Fields, layers: tuple[int, ...]) -> tuple[Group, ...]:
    """Gated delta-net: a key_dim × value_dim state for each value head.

    The unit is a key head together with its value heads. Value heads are more
    numerous, and each reads the key head of its own block of ``num_v / num_k``
    neighbours; tensor parallelism deals out key heads and the value heads
    follow. A finer unit would part value heads from the key they share.
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


def mamba2_groups(fields: Fields, layers: tuple[int, ...]) -> tuple[Group, ...]:
    """Mamba-2: a head_dim × state_size state for each head, and the inputs of B and C.

    B and C are shared by the heads of one B/C group. They make a group of
    their own because ranks beyond the number of B/C groups replicate them,
    while the heads go on being divided.
    """
    heads = fields.count("mamba_n_heads", "mamba_num_heads")
    bc_groups = fields.count("mamba_n_groups", "n_groups")
    if heads % bc_groups:
        bad(f"field 'mamba_n_groups' or 'n_groups' is {bc_groups}, no divisor of {heads} heads")
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
    """Mamba-1: a state for each channel; there are no heads.

    The unit is a block of 64 channels. A single channel would do, but its six
    bytes of convolution state make poor pieces to copy; blocks are aligned and
    still outnumber the ranks of any tensor parallelism in use. B and C are
    made after the convolution here, so they leave no state.
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
    """Channels of one head: stated, or the inner channels divided among the heads.

    Nemotron-H states it outright. The others state it beside the inner size,
    or as "auto", and there the two must agree.
    """
    if fields.find("mamba_num_heads") is not None:
        return fields.count("mamba_head_dim")
    inner = fields.count("mamba_d_ssm", default=_expanded(fields))
    stated = fields.find("mamba_d_head")
    auto = stated is None or stated[1] == "auto"
    head_dim = inner // heads if auto else fields.count("mamba_d_head")
    if head_dim * heads != inner:
        bad(f"field 'mamba_n_heads' is {heads}, and {head_dim} each do not make {inner} channels")
    return head_dim


def _expanded(fields: Fields) -> int:
    return fields.count("hidden_size") * fields.count("mamba_expand")


def _conv_width(fields: Fields, *names: str) -> int:
    return fields.count(*names, least=2) - 1


def _state_dtype(fields: Fields) -> DType:
    if fields.state_dtype is not None:
        return fields.state_dtype
    return fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default=DType.FLOAT32)
