"""What a Hugging Face ``config.json`` says about a model's cache.

``spec_from_config`` takes the parsed file and gives a ``CacheSpec``, or refuses
with a reason. It does not guess: a family that is not in ``FAMILIES`` is
refused, and so is a field that is missing, of the wrong type or at odds with
another. A default stands in only where every engine reads the same one.

Nothing here reads files or knows ranks, pages and engines. Layers that only
serve speculation (multi-token prediction) are no part of the cache.

Two things a config does not say, so the caller must where it matters. The type
of recurrent state differs between engines: where the config names none,
float32 is taken here, while vLLM's "auto" takes the model's own type (say so
with ``state_dtype``). And an MLA cache in FP8 with block scales inside each
entry, as DeepSeek V3.2 is served (quantised latent, scales, rotary part left
in bfloat16), is another entry and not the same one with a narrower ``dtype``;
describe it by hand as three tensors of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto

from kvferry.errors import ReasonCode, Refused
from kvferry.layout.hf_fields import (
    BY_HAND,
    MULTI_HEAD,
    Fields,
    as_dtype,
    bad,
    first_of,
    missing,
    show,
)
from kvferry.layout.hf_state import delta_groups, mamba1_groups, mamba2_groups
from kvferry.layout.spec import CacheSpec, DType, Group, Paged, Tensor, Window, attention_group

INDEX_BLOCK = 128


class Mixer(Enum):
    """What a layer keeps: an entry for every token, for a window of them, a state, or nothing."""

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
    config: Mapping[str, object], dtype: DType | None = None, state_dtype: DType | None = None
) -> CacheSpec:
    """The cache of the model that a parsed ``config.json`` describes.

    ``dtype`` is the element type of attention tensors where the cache is
    quantised; index keys keep the type they have anyway. ``state_dtype`` is
    that of recurrent state (not of the convolution's inputs) where it is other
    than the config or the default of float32 says.
    """
    text = _text_config(config)
    family = _family(text, config)
    model_dtype = _model_dtype(text, config)
    fields = Fields(family, text, dtype or model_dtype, model_dtype, state_dtype)
    return CacheSpec(fields.num_layers(), FAMILIES[family](fields))


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's own object inside a multimodal config, or the config itself."""
    found = first_of(config, ("text_config", "llm_config"))
    if found is None:
        return config
    name, nested = found
    if not isinstance(nested, Mapping):
        bad(f"field {name!r} is {show(nested)}, not an object")
    return nested


def _model_dtype(*configs: Mapping[str, object]) -> DType:
    """The first element type that is stated, from the inside out."""
    for config in configs:
        if (found := first_of(config, ("dtype", "torch_dtype"))) is not None:
            return as_dtype(*found)
    return DType.BFLOAT16


def _family(*configs: Mapping[str, object]) -> str:
    """The key in ``FAMILIES``: by ``model_type``, from the inside out, else by architecture."""
    named = [config.get("model_type") for config in configs]
    model_types = [name.removesuffix("_text") for name in named if isinstance(name, str)]
    for family in [*model_types, *(_from_architecture(config) for config in configs)]:
        if family in FAMILIES:
            return family
    raise Refused.because(
        ReasonCode.UNKNOWN_ARCHITECTURE,
        f"the cache of model_type {show(next(iter(model_types), None))} is not known; {BY_HAND} "
        f"(known: {_KNOWN})",
    )


def _from_architecture(config: Mapping[str, object]) -> str:
    """The family that the class names spell: Qwen3NextForCausalLM is of qwen3_next."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    spelled = {str(name).partition("For")[0].lower().replace("_", "") for name in names}
    return next((family for family in FAMILIES if family.replace("_", "") in spelled), "")


def _where(mixers: Iterable[Mixer], wanted: Mixer) -> tuple[int, ...]:
    return tuple(layer for layer, mixer in enumerate(mixers) if mixer is wanted)


def _mixers(fields: Fields, allowed: frozenset[Mixer], rule: Rule | None) -> list[Mixer]:
    """What each layer keeps: as listed in the config, else by the family's rule."""
    layers = range(fields.num_layers())
    listed = fields.listed_layers()
    if listed is None:
        return [rule(layer) for layer in layers] if rule else missing("layer_types")
    name, entries = listed
    mixers = []
    for entry in entries:
        mixer = _LAYER_NAMES.get(entry) if isinstance(entry, str) else None
        if mixer is None or mixer not in allowed:
            bad(f"field {name!r} has {show(entry)}, which {fields.family} does not have here")
        mixers.append(mixer)
    return mixers


def _attention_groups(fields: Fields, mixers: Sequence[Mixer]) -> Groups:
    """K and V: paged for the full layers, a window for the sliding ones."""
    full, sliding = _where(mixers, Mixer.FULL), _where(mixers, Mixer.SLIDING)
    if not full and not sliding:
        return ()
    shape = (_kv_heads(fields), _head_dim(fields), None, fields.cache_dtype)
    groups = []
    if full:
        groups.append(attention_group("kv", Paged(), full, *shape))
    if sliding:
        window = Window(fields.window() or missing("sliding_window"))
        groups.append(attention_group("swa", window, sliding, *shape))
    return tuple(groups)


def _kv_heads(fields: Fields) -> int:
    """KV heads. Left out, there is one for each query head, but only in some families."""
    heads = fields.count("num_attention_heads")
    default = heads if fields.family in MULTI_HEAD else None
    # The spec has its own word for a model without KV heads.
    kv_heads = fields.count("num_key_value_heads", default=default, least=0)
    if kv_heads and heads % kv_heads:
        bad(f"field 'num_key_value_heads' is {kv_heads}, no divisor of {heads} query heads")
    return kv_heads


def _head_dim(fields: Fields) -> int:
    """Elements of one head: stated, or the hidden size divided among the query heads."""
    names = ("head_dim", "attention_head_dim")
    if fields.find(*names) is None:
        return fields.ratio("hidden_size", "num_attention_heads")
    return fields.count(*names)


def _full(fields: Fields) -> Groups:
    """Full attention in every layer."""
    full_only = frozenset({Mixer.FULL})
    return _attention_groups(fields, _mixers(fields, full_only, lambda _: Mixer.FULL))


def _sliding(fields: Fields, slides: Callable[[int], bool] = lambda _: True) -> Groups:
    """Where a window is set, the layers for which ``slides`` holds have it."""
    if fields.window() is None:
        return _full(fields)
    mixers = _mixers(
        fields, _ATTENTION, lambda layer: Mixer.SLIDING if slides(layer) else Mixer.FULL
    )
    return _attention_groups(fields, mixers)


def _switched(fields: Fields) -> Groups:
    """The window counts only when it is switched on; then every layer has it."""
    return _sliding(fields) if fields.flag("use_sliding_window") else _full(fields)


def _upper(fields: Fields) -> Groups:
    """Switched on, the window is for the layers from ``max_window_layers`` upwards."""
    if not fields.flag("use_sliding_window"):
        return _full(fields)
    first = fields.count("max_window_layers", least=0)
    return _sliding(fields, lambda layer: layer >= first)


def _lower(fields: Fields) -> Groups:
    """Switched on, the window is for every other layer below ``max_window_layers``."""
    if not fields.flag("use_sliding_window"):
        return _full(fields)
    end = fields.count("max_window_layers", least=0)
    return _sliding(fields, lambda layer: layer < end and layer % 2 == 0)


def _alternating(fields: Fields) -> Groups:
    """Sliding layers, with a full one at the end of every period."""
    period = fields.count("sliding_window_pattern", "_sliding_window_pattern")
    if fields.window() is None:
        missing("sliding_window")
    return _sliding(fields, lambda layer: (layer + 1) % period != 0)


def _latent(fields: Fields) -> Groups:
    """MLA: all heads read one latent, so there is one unit, which every rank replicates.

    Sparse attention adds an index key to each token, stored in FP8 with a
    scale for each block of 128, whatever the type of the cache.
    """
    layers = tuple(range(fields.num_layers()))
    elements = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
    latent = Group("latent", Paged(), layers, 1, (Tensor("latent", fields.cache_dtype, elements),))
    if fields.find("index_head_dim") is None:
        return (latent,)
    width = fields.count("index_head_dim")
    key = Tensor("key", DType.FLOAT8_E4M3, width)
    scale = Tensor("scale", DType.FLOAT32, max(1, width // INDEX_BLOCK))
    return (latent, Group("index", Paged(), layers, 1, (key, scale)))


def _sparse_latent(fields: Fields) -> Groups:
    """MLA with an index, which must be described."""
    fields.count("index_head_dim")
    return _latent(fields)


def _hybrid(
    fields: Fields,
    mixers: Sequence[Mixer],
    state_groups: Callable[[Fields, tuple[int, ...]], Groups],
) -> Groups:
    """Attention in some layers, a recurrent state in others."""
    layers = _where(mixers, Mixer.STATE)
    return _attention_groups(fields, mixers) + (state_groups(fields, layers) if layers else ())


def _delta_hybrid(fields: Fields) -> Groups:
    """Gated delta-net layers, with full attention at the end of every period."""
    period = fields.count("full_attention_interval")
    mixers = _mixers(
        fields, _HYBRID, lambda layer: Mixer.STATE if (layer + 1) % period else Mixer.FULL
    )
    return _hybrid(fields, mixers, delta_groups)


def _listed_hybrid(fields: Fields) -> Groups:
    """A Mamba-2 hybrid that lists its layers one by one."""
    return _hybrid(fields, _mixers(fields, _HYBRID, None), mamba2_groups)


def _bamba(fields: Fields) -> Groups:
    """Mamba-2, with attention in the layers that are named by number."""
    _, named = fields.find("attn_layer_indices") or missing("attn_layer_indices")
    layers = range(fields.num_layers())
    if not isinstance(named, list) or any(type(n) is not int or n not in layers for n in named):
        bad(f"field 'attn_layer_indices' is {show(named)}, not a list of layer numbers")
    mixers = [Mixer.FULL if layer in named else Mixer.STATE for layer in layers]
    return _hybrid(fields, mixers, mamba2_groups)


def _falcon_h1(fields: Fields) -> Groups:
    """Attention beside Mamba-2 in every layer."""
    layers = tuple(range(fields.num_layers()))
    return _attention_groups(fields, [Mixer.FULL] * len(layers)) + mamba2_groups(fields, layers)


def _jamba(fields: Fields) -> Groups:
    """Mamba-1, with attention in one layer of every period."""
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0, most=period - 1)
    mixers = _mixers(
        fields, _HYBRID, lambda layer: Mixer.FULL if layer % period == offset else Mixer.STATE
    )
    return _hybrid(fields, mixers, mamba1_groups)


# By model_type, without the suffix "_text" that a nested config has.
FAMILIES: dict[str, Builder] = {
    "apertus": _full,
    "arcee": _full,
    "bamba": _bamba,
    "cohere": _full,
    "cohere2": _alternating,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "deepseek_v32": _sparse_latent,
    "falcon_h1": _falcon_h1,
    "gemma": _full,
    "gemma2": _alternating,
    "gemma3": _alternating,
    "glm4": _full,
    "glm4_moe": _full,
    "glm4_moe_lite": _latent,
    "gpt_oss": _alternating,
    "granite": _full,
    "granitemoe": _full,
    "granitemoehybrid": _listed_hybrid,
    "jamba": _jamba,
    "kimi_k2": _latent,
    "llama": _full,
    "minimax_m2": _full,
    "ministral": _sliding,
    "ministral3": _sliding,
    "mistral": _sliding,
    "mixtral": _sliding,
    "nemotron_h": _listed_hybrid,
    "olmo2": _full,
    "olmo3": _alternating,
    "olmoe": _full,
    "phi3": _sliding,
    "phimoe": _sliding,
    "qwen2": _upper,
    "qwen2_5_vl": _upper,
    "qwen2_moe": _lower,
    "qwen2_vl": _upper,
    "qwen3": _upper,
    "qwen3_5": _delta_hybrid,
    "qwen3_5_moe": _delta_hybrid,
    "qwen3_moe": _switched,
    "qwen3_next": _delta_hybrid,
    "qwen3_vl": _full,
    "qwen3_vl_moe": _full,
    "seed_oss": _full,
    "smollm3": _full,
    "starcoder2": _sliding,
}
_KNOWN = (
    "Llama, Mistral, Mixtral, Ministral, Qwen 2 to 3.5, Gemma 1 to 3, GPT-OSS, Phi-3, OLMo, "
    "Cohere, GLM-4, Granite, SmolLM3, StarCoder2, MiniMax-M2, Seed-OSS, DeepSeek V2 to V3.2, "
    "Kimi-K2, Bamba, Falcon-H1, Nemotron-H, Jamba"
)
