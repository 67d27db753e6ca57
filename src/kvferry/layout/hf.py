"""Derives a model's cache from a Hugging Face ``config.json``.

``spec_from_config`` takes the parsed file and returns a ``CacheSpec``, or refuses with a reason. It
does not guess: it refuses a family that is not in ``FAMILIES``, and a field that is missing, has
the wrong type or contradicts another. It uses a default only where every engine uses the same.
Layers for multi-token prediction are not part of the cache.

Two facts are not in a config, so the caller has to give them. Engines differ in the type of
recurrent state: without ``state_dtype`` it is what the config names, else float32, while vLLM's
"auto" takes the model's type, except for KDA. An MLA cache may be in FP8 with scales in each entry,
as DeepSeek V3.2 is served: then ``dtype`` is ``CacheFormat.FP8_DS_MLA``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto

from kvferry.errors import ReasonCode, Refused
from kvferry.layout.hf_fields import (
    BY_HAND,
    MULTI_HEAD,
    Fields,
    first_of,
    parse_dtype,
    reject,
    reject_missing,
    short_repr,
)
from kvferry.layout.hf_latent import (
    compressed_groups,
    kimi_linear_groups,
    mla_groups,
    refuse_packed,
    sparse_mla_groups,
)
from kvferry.layout.hf_state import delta_groups, mamba1_groups, mamba2_groups
from kvferry.layout.spec import (
    CacheFormat,
    CacheSpec,
    DType,
    Group,
    Paged,
    Window,
    attention_group,
)


class Mixer(Enum):
    """The content that a layer caches: all tokens, a window of them, a state, or nothing."""

    FULL = auto()
    SLIDING = auto()
    STATE = auto()
    NOTHING = auto()


Groups = tuple[Group, ...]
Builder = Callable[[Fields], Groups]
Rule = Callable[[int], Mixer]

_ATTENTION = frozenset({Mixer.FULL, Mixer.SLIDING})
_HYBRID = frozenset({Mixer.FULL, Mixer.STATE, Mixer.NOTHING})
_LAYER_NAMES = {
    "full_attention": Mixer.FULL,
    "attention": Mixer.FULL,
    "*": Mixer.FULL,
    "sliding_attention": Mixer.SLIDING,
    "linear_attention": Mixer.STATE,
    "mamba": Mixer.STATE,
    "M": Mixer.STATE,
    "mlp": Mixer.NOTHING,
    "-": Mixer.NOTHING,
    "moe": Mixer.NOTHING,
    "E": Mixer.NOTHING,
}


def spec_from_config(
    config: Mapping[str, object],
    dtype: DType | CacheFormat | None = None,
    state_dtype: DType | None = None,
) -> CacheSpec:
    """Return the cache of the model that a parsed ``config.json`` describes.

    ``dtype`` overrides the element type of attention tensors, for a quantised cache. It does not
    affect index keys. ``state_dtype`` overrides that of recurrent state, but not of the inputs of
    convolutions.
    """
    text = _text_config(config)
    family = _family(text, config)
    model_dtype = _model_dtype(text, config)
    is_packed = isinstance(dtype, CacheFormat)
    cache_dtype = dtype if isinstance(dtype, DType) else model_dtype
    fields = Fields(family, text, cache_dtype, model_dtype, state_dtype, is_packed)
    builder = FAMILIES[family]
    if builder not in LATENT:
        refuse_packed(fields)
    return CacheSpec(_num_layers(fields, builder), builder(fields))


def _num_layers(fields: Fields, builder: Builder) -> int:
    # Its list of layers may go on with those for multi-token prediction.
    return (
        fields.count("num_hidden_layers") if builder is compressed_groups else fields.num_layers()
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the language model's object inside a multimodal config, or the config itself."""
    found = first_of(config, ("text_config", "llm_config"))
    if found is None:
        return config
    name, nested = found
    if not isinstance(nested, Mapping):
        reject(f"field {name!r} is {short_repr(nested)}, not an object")
    return nested


def _model_dtype(*configs: Mapping[str, object]) -> DType:
    """Return the first stated element type, from the innermost config outwards."""
    for config in configs:
        if (found := first_of(config, ("dtype", "torch_dtype"))) is not None:
            return parse_dtype(*found)
    return DType.BFLOAT16


def _family(*configs: Mapping[str, object]) -> str:
    """Return the key in ``FAMILIES``, by ``model_type`` or else by architecture."""
    named = [config.get("model_type") for config in configs]
    model_types = [name.removesuffix("_text") for name in named if isinstance(name, str)]
    for family in [*model_types, *(_from_architecture(config) for config in configs)]:
        if family in FAMILIES:
            return family
    raise Refused.because(
        ReasonCode.UNKNOWN_ARCHITECTURE,
        f"the cache of model_type {short_repr(next(iter(model_types), None))} is not known; "
        f"{BY_HAND} (known: {_KNOWN})",
    )


def _from_architecture(config: Mapping[str, object]) -> str:
    """Return the family of a class name, as qwen3_next of Qwen3NextForCausalLM, or ""."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    spelled = {str(name).partition("For")[0].lower().replace("_", "") for name in names}
    return next((family for family in FAMILIES if family.replace("_", "") in spelled), "")


def _layers_with(mixers: Iterable[Mixer], wanted: Mixer) -> tuple[int, ...]:
    return tuple(layer for layer, mixer in enumerate(mixers) if mixer is wanted)


def _mixers(fields: Fields, allowed: frozenset[Mixer], rule: Rule | None) -> list[Mixer]:
    """Return what each layer keeps, from the config's list or else by the family's rule."""
    layers = range(fields.num_layers())
    listed = fields.listed_layers()
    if listed is None:
        return [rule(layer) for layer in layers] if rule else reject_missing("layer_types")
    name, entries = listed
    mixers = []
    for entry in entries:
        mixer = _LAYER_NAMES.get(entry) if isinstance(entry, str) else None
        if mixer is None or mixer not in allowed:
            reject(
                f"field {name!r} has {short_repr(entry)}, which {fields.family} does not have here"
            )
        mixers.append(mixer)
    return mixers


def _attention_groups(fields: Fields, mixers: Sequence[Mixer]) -> Groups:
    """Return the K and V groups: paged for full layers, a window for sliding ones."""
    full, sliding = _layers_with(mixers, Mixer.FULL), _layers_with(mixers, Mixer.SLIDING)
    if not full and not sliding:
        return ()
    shape = (_kv_heads(fields), _head_dim(fields), None, fields.cache_dtype)
    groups = []
    if full:
        groups.append(attention_group("kv", Paged(), full, *shape))
    if sliding:
        window = Window(fields.window() or reject_missing("sliding_window"))
        groups.append(attention_group("swa", window, sliding, *shape))
    return tuple(groups)


def _kv_heads(fields: Fields) -> int:
    """Return the number of KV heads. In some families it defaults to that of query heads."""
    heads = fields.count("num_attention_heads")
    default = heads if fields.family in MULTI_HEAD else None
    # 0 is allowed, because CacheSpec refuses it with a better reason.
    kv_heads = fields.count("num_key_value_heads", default=default, least=0)
    if kv_heads and heads % kv_heads:
        reject(f"field 'num_key_value_heads' is {kv_heads}, no divisor of {heads} query heads")
    return kv_heads


def _head_dim(fields: Fields) -> int:
    """Return the elements of a head: stated, or the hidden size divided by the query heads."""
    names = ("head_dim", "attention_head_dim")
    if fields.find(*names) is None:
        return fields.ratio("hidden_size", "num_attention_heads")
    return fields.count(*names)


def _full_attention(fields: Fields) -> Groups:
    """Return the groups of full attention in every layer."""
    full_only = frozenset({Mixer.FULL})
    return _attention_groups(fields, _mixers(fields, full_only, lambda _: Mixer.FULL))


def _sliding(fields: Fields, slides: Callable[[int], bool] = lambda _: True) -> Groups:
    """Return groups with the window, if one is set, in layers for which ``slides`` holds."""
    if fields.window() is None:
        return _full_attention(fields)
    mixers = _mixers(
        fields, _ATTENTION, lambda layer: Mixer.SLIDING if slides(layer) else Mixer.FULL
    )
    return _attention_groups(fields, mixers)


def _sliding_if_enabled(fields: Fields) -> Groups:
    """Return groups with a window in every layer, if the config enables it."""
    return _sliding(fields) if fields.flag("use_sliding_window") else _full_attention(fields)


def _sliding_above(fields: Fields) -> Groups:
    """Return groups with a window from layer ``max_window_layers`` on, if enabled."""
    if not fields.flag("use_sliding_window"):
        return _full_attention(fields)
    first = fields.count("max_window_layers", least=0)
    return _sliding(fields, lambda layer: layer >= first)


def _sliding_below(fields: Fields) -> Groups:
    """Return groups with a window in every other layer below ``max_window_layers``, if enabled."""
    if not fields.flag("use_sliding_window"):
        return _full_attention(fields)
    end = fields.count("max_window_layers", least=0)
    return _sliding(fields, lambda layer: layer < end and layer % 2 == 0)


def _alternating(fields: Fields) -> Groups:
    """Return groups of sliding layers with a full layer at the end of every period."""
    period = fields.count("sliding_window_pattern", "_sliding_window_pattern")
    if fields.window() is None:
        reject_missing("sliding_window")
    return _sliding(fields, lambda layer: (layer + 1) % period != 0)


def _gemma4(fields: Fields) -> Groups:
    """Return the groups of Gemma 4: full layers have heads of their own number and width.

    The last layers may use the cache of earlier ones.
    """
    period = fields.count("sliding_window_pattern")
    mixers = _mixers(
        fields, _ATTENTION, lambda layer: Mixer.SLIDING if (layer + 1) % period else Mixer.FULL
    )
    shared = fields.count("num_kv_shared_layers", default=0, least=0, most=len(mixers) - 1)
    own = mixers[: len(mixers) - shared]
    full, sliding = _layers_with(own, Mixer.FULL), _layers_with(own, Mixer.SLIDING)
    heads = fields.count("num_key_value_heads")
    if fields.flag("attention_k_eq_v"):
        full_heads = fields.count("num_global_key_value_heads", default=heads)
    else:
        full_heads = heads
    window = Window(fields.window() or reject_missing("sliding_window"))
    width, dtype = fields.count("global_head_dim"), fields.cache_dtype
    groups = (
        (full, "kv", Paged(), full_heads, width),
        (sliding, "swa", window, heads, fields.count("head_dim")),
    )
    return tuple(
        attention_group(name, kind, layers, units, head_dim, None, dtype)
        for layers, name, kind, units, head_dim in groups
        if layers
    )


def _hybrid(
    fields: Fields,
    mixers: Sequence[Mixer],
    state_groups: Callable[[Fields, tuple[int, ...]], Groups],
) -> Groups:
    """Return the groups of attention in some layers and recurrent state in others."""
    layers = _layers_with(mixers, Mixer.STATE)
    return _attention_groups(fields, mixers) + (state_groups(fields, layers) if layers else ())


def _delta_hybrid(fields: Fields) -> Groups:
    """Return the groups of delta-net layers with full attention at the end of every period."""
    period = fields.count("full_attention_interval")
    mixers = _mixers(
        fields, _HYBRID, lambda layer: Mixer.STATE if (layer + 1) % period else Mixer.FULL
    )
    return _hybrid(fields, mixers, delta_groups)


def _listed_hybrid(fields: Fields) -> Groups:
    """Return the groups of a Mamba-2 hybrid that lists its layers."""
    return _hybrid(fields, _mixers(fields, _HYBRID, None), mamba2_groups)


def _bamba(fields: Fields) -> Groups:
    """Return the groups of Mamba-2 with attention in layers given by number."""
    _, named = fields.find("attn_layer_indices") or reject_missing("attn_layer_indices")
    layers = range(fields.num_layers())
    if not isinstance(named, list) or any(type(n) is not int or n not in layers for n in named):
        reject(f"field 'attn_layer_indices' is {short_repr(named)}, not a list of layer numbers")
    mixers = [Mixer.FULL if layer in named else Mixer.STATE for layer in layers]
    return _hybrid(fields, mixers, mamba2_groups)


def _falcon_h1(fields: Fields) -> Groups:
    """Return the groups of a model with both attention and Mamba-2 in every layer."""
    layers = tuple(range(fields.num_layers()))
    return _attention_groups(fields, [Mixer.FULL] * len(layers)) + mamba2_groups(fields, layers)


def _jamba(fields: Fields) -> Groups:
    """Return the groups of Mamba-1 with attention in one layer of every period."""
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0, most=period - 1)
    mixers = _mixers(
        fields, _HYBRID, lambda layer: Mixer.FULL if layer % period == offset else Mixer.STATE
    )
    return _hybrid(fields, mixers, mamba1_groups)


# Families by builder. A family is a model_type without the suffix "_text" of nested configs.
_FAMILIES: dict[Builder, str] = {
    _full_attention: (
        "apertus arcee cohere gemma glm4 glm4_moe granite granitemoe llama minimax_m2 "
        "olmo2 olmoe qwen3_vl qwen3_vl_moe seed_oss smollm3"
    ),
    _bamba: "bamba",
    _alternating: "cohere2 gemma2 gemma3 gpt_oss olmo3",
    mla_groups: "deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2",
    sparse_mla_groups: "deepseek_v32",
    compressed_groups: "deepseek_v4",
    kimi_linear_groups: "kimi_linear kimi_k3",
    _gemma4: "gemma4",
    _falcon_h1: "falcon_h1",
    _listed_hybrid: "granitemoehybrid nemotron_h",
    _jamba: "jamba",
    _sliding: "ministral ministral3 mistral mixtral phi3 phimoe starcoder2",
    _sliding_above: "qwen2 qwen2_5_vl qwen2_vl qwen3",
    _sliding_below: "qwen2_moe",
    _delta_hybrid: "qwen3_5 qwen3_5_moe qwen3_next",
    _sliding_if_enabled: "qwen3_moe",
}
FAMILIES: dict[str, Builder] = {
    family: builder for builder, names in _FAMILIES.items() for family in names.split()
}
# Families whose latents may be packed.
LATENT = frozenset({mla_groups, sparse_mla_groups, compressed_groups, kimi_linear_groups})
_KNOWN = (
    "Llama, Mistral, Mixtral, Ministral, Qwen 2 to 3.5, Gemma 1 to 4, GPT-OSS, Phi-3, OLMo, "
    "Cohere, GLM-4, Granite, SmolLM3, StarCoder2, MiniMax-M2, Seed-OSS, DeepSeek V2 to V4, "
    "Kimi-K2, Kimi Linear, Kimi-K3, Bamba, Falcon-H1, Nemotron-H, Jamba"
)
