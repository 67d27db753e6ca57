"""A parsed ``config.json``, read with suspicion.

``Fields`` gives a checked value or refuses with one sentence that names the
field; no value that JSON can hold makes it raise anything else. What the fields
mean for the cache is for ``hf.py`` and ``hf_state.py``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import msgspec

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout.spec import MAX_LAYERS, DType

MAX_WIDTH = 1 << 20
MAX_WINDOW = 1 << 30
BY_HAND = "describe the cache by hand with --layers --kv-heads --head-dim, or build a CacheSpec"

# Families in which a config without num_key_value_heads has one for each query head.
MULTI_HEAD = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "llama",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
    }
)

# What the families' own loaders take for a field that is left out.
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_DELTA = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA = {"mamba_expand": 2, "mamba_d_conv": 4}
DEFAULTS: dict[str, dict[str, int]] = {
    "bamba": _MAMBA,
    "cohere2": {"sliding_window_pattern": 4},
    "falcon_h1": _MAMBA,
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3": {**_GEMMA, "sliding_window_pattern": 6},
    "glm4": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "sliding_window_pattern": 2},
    "granitemoehybrid": _MAMBA,
    "jamba": {**_MAMBA, "mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4},
    "minimax_m2": {"head_dim": 128},
    "ministral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"head_dim": 128, "conv_kernel": 4},
    "olmo3": {"sliding_window_pattern": 4},
    "qwen2": _QWEN_WINDOW,
    "qwen2_5_vl": {**_QWEN_WINDOW, "max_window_layers": 80},
    "qwen2_moe": _QWEN_WINDOW,
    "qwen2_vl": {**_QWEN_WINDOW, "max_window_layers": 80},
    "qwen3": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_5": _QWEN_DELTA,
    "qwen3_5_moe": _QWEN_DELTA,
    "qwen3_moe": _QWEN_WINDOW,
    "qwen3_next": _QWEN_DELTA,
    "qwen3_vl": {"head_dim": 128},
    "seed_oss": {"head_dim": 128},
}


def bad(what: str, remedy: str = "correct it") -> NoReturn:
    """Refuse a config for what one of its fields says."""
    raise Refused.because(ReasonCode.BAD_CONFIG, f"config {what}; {remedy}, or {BY_HAND}")


def missing(*names: str) -> NoReturn:
    """Refuse a config for what it does not say under any of these names."""
    bad(f"field {' or '.join(map(repr, names))} is missing", "add it")


def show(value: object) -> str:
    """A short repr of whatever a config may hold (Python refuses to print a huge int)."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a huge number"
    return reprlib.repr(value)


class Fields(msgspec.Struct, frozen=True):
    """The fields of one model. A field that is null counts as missing.

    ``DEFAULTS`` stand in for what the family's published configs leave out.
    ``cache_dtype`` is that of attention tensors, which may be quantised;
    ``model_dtype`` is what everything else has, but for recurrent state, for
    which the caller may know the type (``state_dtype``).
    """

    family: str
    values: Mapping[str, object]
    cache_dtype: DType
    model_dtype: DType
    state_dtype: DType | None = None

    def find(self, *names: str) -> tuple[str, object] | None:
        """The first of these fields that has a value, else the family's default."""
        stated = first_of(self.values, names)
        return first_of(DEFAULTS.get(self.family, {}), names) if stated is None else stated

    def count(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH
    ) -> int:
        """A whole number in a sane range, under any of these names."""
        found = self.find(*names)
        if found is None:
            return missing(*names) if default is None else default
        name, value = found
        # JSON's true is an int to Python, and no count to anyone.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bad(f"field {name!r} is {show(value)}, not a whole number from {least} to {most}")
        return value

    def ratio(self, whole_name: str, parts_name: str) -> int:
        """How often the second field goes into the first, which must come out even."""
        whole, parts = self.count(whole_name), self.count(parts_name)
        if whole % parts:
            bad(f"field {whole_name!r} is {whole}, not a multiple of {parts_name!r} {parts}")
        return whole // parts

    def flag(self, name: str) -> bool:
        """A boolean; false where it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            bad(f"field {name!r} is {show(value)}, not true or false")
        return value is True

    def dtype(self, *names: str, default: DType) -> DType:
        """An element type, under any of these names."""
        found = self.find(*names)
        return default if found is None else as_dtype(*found)

    def window(self) -> int | None:
        """The sliding window; here an explicit null says that there is none."""
        if "sliding_window" in self.values and self.values["sliding_window"] is None:
            return None
        return self.count("sliding_window", default=0, most=MAX_WINDOW) or None

    def listed_layers(self) -> tuple[str, Sequence[object]] | None:
        """The field with one entry per layer, where the config has one."""
        found = self.find("layer_types", "layers_block_type", "hybrid_override_pattern")
        if found is None:
            return None
        name, value = found
        if isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern")):
            return name, value
        bad(f"field {name!r} is {show(value)}, not one entry for each layer")

    def num_layers(self) -> int:
        """The layers of the model; a list with one entry for each also tells."""
        listed = self.listed_layers()
        if listed is None:
            return self.count("num_hidden_layers", most=MAX_LAYERS)
        name, entries = listed
        num_layers = self.count("num_hidden_layers", default=len(entries), most=MAX_LAYERS)
        if len(entries) != num_layers:
            bad(f"field {name!r} has {len(entries)} entries, but the model has {num_layers} layers")
        return num_layers


def first_of(values: Mapping[str, object], names: Iterable[str]) -> tuple[str, object] | None:
    """The first of these fields that is neither missing nor null."""
    for name in names:
        if (value := values.get(name)) is not None:
            return name, value
    return None


def as_dtype(name: str, value: object) -> DType:
    """The element type that a field names."""
    try:
        return DType.parse(value if isinstance(value, str) else "")
    except InputError:
        bad(f"field {name!r} is {show(value)}, not one of {', '.join(DType)}")
