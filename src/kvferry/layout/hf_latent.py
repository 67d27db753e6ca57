"""Latent attention: MLA, sparse attention with index keys, compressed attention, and KDA hybrids.

A latent is one unit, which every tensor-parallel rank has. vLLM's format ``fp8_ds_mla`` keeps it in
FP8: beside the quantised values an entry has their scales, and the rotary part in bfloat16.
"""

from __future__ import annotations

from kvferry.errors import ReasonCode, Refused
from kvferry.layout.hf_fields import Fields, reject, reject_missing, short_repr
from kvferry.layout.hf_state import kda_group
from kvferry.layout.spec import DType, Group, Kind, Paged, Part, Tensor, Window

Groups = tuple[Group, ...]
# Values with a common scale: of an index key and of a latent, and in compressed attention.
INDEX_BLOCK = LATENT_BLOCK = 128
COMPRESSED_BLOCK = 64
# Tokens of an entry in the two forms of compressed attention, and how many entries the input of
# one entry overlaps.
SPARSE, HEAVY = 4, 128
OVERLAP = {SPARSE: 2, HEAVY: 1}
RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": HEAVY,
}


def mla_groups(fields: Fields) -> Groups:
    """Return the groups of MLA, with an index key for each token if attention is sparse.

    Index keys are always in FP8, with a scale for each block of 128.
    """
    layers = tuple(range(fields.num_layers()))
    latent = Group("latent", Paged(), layers, 1, (_latent(fields),))
    if fields.find("index_head_dim") is None:
        return (latent,)
    return (latent, Group("index", Paged(), layers, 1, _index_key(fields)))


def sparse_mla_groups(fields: Fields) -> Groups:
    """Return the groups of MLA with a required index."""
    fields.count("index_head_dim")
    return mla_groups(fields)


def _latent(fields: Fields) -> Tensor:
    values, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if not fields.is_packed:
        return Tensor("latent", fields.cache_dtype, values + rotary)
    if values % LATENT_BLOCK:
        reject(f"field 'kv_lora_rank' is {values}, no multiple of the {LATENT_BLOCK} of a scale")
    return Tensor.composite(
        "latent",
        Part("values", DType.FLOAT8_E4M3, values),
        Part("scales", DType.FLOAT32, values // LATENT_BLOCK),
        Part("rotary", DType.BFLOAT16, rotary),
    )


def _index_key(fields: Fields) -> tuple[Tensor, ...]:
    width = fields.count("index_head_dim")
    scales = max(1, width // INDEX_BLOCK)
    return Tensor("key", DType.FLOAT8_E4M3, width), Tensor("scale", DType.FLOAT32, scales)


# ---------------------------------------------------------------- KDA


def kimi_linear_groups(fields: Fields) -> Groups:
    """Return the groups of a Kimi Linear model: KDA state in some layers, MLA in the others."""
    linear = fields.nested("linear_attn_config")
    named = linear.values.get("kda_layers")
    layers = range(fields.num_layers())
    # The config counts layers from 1.
    if not isinstance(named, list) or any(type(n) is not int or n - 1 not in layers for n in named):
        reject(f"field 'kda_layers' is {short_repr(named)}, not a list of layer numbers from 1")
    kda = tuple(layer for layer in layers if layer + 1 in named)
    full = tuple(layer for layer in layers if layer + 1 not in named)
    groups = [Group("latent", Paged(), full, 1, (_latent(fields),))] if full else []
    return (*groups, *([kda_group(linear, kda)] if kda else ()))


# ---------------------------------------------------------------- compressed attention


def compressed_groups(fields: Fields) -> Groups:
    """Return the groups of DeepSeek V4, as vLLM 0.32 keeps them.

    Every layer has a window of latents. Most have latents that stand for 4 or 128 tokens, and those
    of 4 have index keys that stand for as many. What an entry is computed from is kept for a window
    of its own, in float32, because the last tokens have no entry yet.
    """
    ratios = _ratios(fields)
    window = fields.window() or reject_missing("sliding_window")
    width = fields.count("head_dim")
    entry = _compressed_entry(fields, width)
    groups = [Group("swa", Window(window), tuple(range(len(ratios))), 1, entry)]
    for name, ratio in (("sparse", SPARSE), ("heavy", HEAVY)):
        layers = tuple(layer for layer, its in enumerate(ratios) if its == ratio)
        if layers:
            groups.append(Group(name, Paged(), layers, 1, entry, ratio))
            groups.append(_inputs(f"{name}_inputs", ratio, layers, width))
    sparse = tuple(layer for layer, ratio in enumerate(ratios) if ratio == SPARSE)
    if sparse:
        groups.append(Group("index", Paged(), sparse, 1, _index_key(fields), SPARSE))
        inputs = fields.count("index_head_dim")
        groups.append(_inputs("index_inputs", SPARSE, sparse, inputs))
    return tuple(groups)


def _ratios(fields: Fields) -> list[int]:
    """Return the tokens of an entry in each layer; 0 if the layer has only the window."""
    found = fields.find("compress_ratios", "layer_types")
    name, listed = found or reject_missing("compress_ratios", "layer_types")
    entries = listed if isinstance(listed, list) else []
    ratios = [RATIO_OF_TYPE.get(one, -1) if isinstance(one, str) else one for one in entries]
    # The list may go on with layers for multi-token prediction.
    ratios = ratios[: fields.count("num_hidden_layers", default=len(ratios))]
    if not ratios or any(ratio not in (0, 1, SPARSE, HEAVY) for ratio in ratios):
        reject(f"field {name!r} is {short_repr(listed)}, not one of 0, 4 and 128 for each layer")
    if len(ratios) != fields.count("num_hidden_layers", default=len(ratios)):
        reject(f"field {name!r} has {len(ratios)} entries, fewer than the model has layers")
    return [0 if ratio == 1 else ratio for ratio in ratios]


def _compressed_entry(fields: Fields, width: int) -> tuple[Tensor, ...]:
    if not fields.is_packed:
        return (Tensor("latent", fields.cache_dtype, width),)
    rotary = fields.count("qk_rope_head_dim", default=64, most=width)
    values = width - rotary
    if values % COMPRESSED_BLOCK:
        reject(f"{values} values are no multiple of the {COMPRESSED_BLOCK} of a scale")
    # vLLM pads the scales of a page by one byte for each entry, and keeps them behind the entries.
    scales = values // COMPRESSED_BLOCK + 1
    packed = Tensor.composite(
        "latent",
        Part("values", DType.FLOAT8_E4M3, values),
        Part("rotary", DType.BFLOAT16, rotary),
    )
    return packed, Tensor("scale", DType.UINT8, scales)


def _inputs(name: str, ratio: int, layers: tuple[int, ...], width: int) -> Group:
    """Return the keys and scores of the tokens from which the next entries are computed."""
    overlap = OVERLAP[ratio]
    kind: Kind = Window(overlap * ratio)
    tensor = Tensor("inputs", DType.FLOAT32, 2 * overlap * width)
    return Group(name, kind, layers, 1, (tensor,))


def refuse_packed(fields: Fields) -> None:
    """Refuse the packed format of a latent for other attention."""
    if fields.is_packed:
        raise Refused.because(
            ReasonCode.DTYPE,
            f"fp8_ds_mla is a form of MLA latents, which {fields.family} does not have; use fp8",
        )
