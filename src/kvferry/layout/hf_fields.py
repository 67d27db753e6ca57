"""Checked access to the fields of a parsed ``config.json``.

``Fields`` returns a checked value, or refuses with a sentence that names the field. No JSON value
makes it raise anything else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout.spec import MAX_LAYERS, DType

MAX_WIDTH = 1 << 20
MAX_WINDOW = 1 << 30
BY_HAND = "describe the cache by hand with --layers --kv-heads --head-dim, or build a CacheSpec"

# Families in which num_key_value_heads defaults to the number of query heads.
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

# Defaults of the families' own loaders.
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
    "gemma4": {
        **_GEMMA,
        "sliding_window_pattern": 6,
        "global_head_dim": 512,
        "sliding_window": 512,
    },
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


def reject(what: str, remedy: str = "correct it") -> NoReturn:
    """Refuse a config because of the value of a field."""
    raise Refused.because(ReasonCode.BAD_CONFIG, f"config {what}; {remedy}, or {BY_HAND}")


def reject_missing(*names: str) -> NoReturn:
    """Refuse a config that has no field with any of these names."""
    reject(f"field {' or '.join(map(repr, names))} is missing", "add it")


def short_repr(value: object) -> str:
    """Return a short repr of any value. Python refuses to print a huge int."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a huge number"
    return reprlib.repr(value)


class Fields(msgspec.Struct, frozen=True):
    """The fields of one model's config. A field that is null counts as missing.

    Missing fields have the family's ``DEFAULTS``. ``cache_dtype`` is the element type of attention
    tensors, ``state_dtype`` that of recurrent state if the caller gives it, and ``model_dtype``
    that of everything else. ``is_packed``: latents are in FP8 with their scales.
    """

    family: str
    values: Mapping[str, object]
    cache_dtype: DType
    model_dtype: DType
    state_dtype: DType | None = None
    is_packed: bool = False

    def nested(self, name: str) -> Fields:
        """Return the fields of a nested object, which has no defaults."""
        values = self.values.get(name)
        if not isinstance(values, Mapping):
            reject(f"field {name!r} is {short_repr(values)}, not an object")
        return replace(self, family="", values=values)

    def find(self, *names: str) -> tuple[str, object] | None:
        """Return the first of these fields that has a value, or else the family's default."""
        stated = first_of(self.values, names)
        return first_of(DEFAULTS.get(self.family, {}), names) if stated is None else stated

    def count(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH
    ) -> int:
        """Return a whole number in a range, under any of these names."""
        found = self.find(*names)
        if found is None:
            return reject_missing(*names) if default is None else default
        name, value = found
        # In Python, JSON's true is an int.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            reject(
                f"field {name!r} is {short_repr(value)}, not a whole number from {least} to {most}"
            )
        return value

    def ratio(self, whole_name: str, parts_name: str) -> int:
        """Return the first field divided by the second, without remainder."""
        whole, parts = self.count(whole_name), self.count(parts_name)
        if whole % parts:
            reject(f"field {whole_name!r} is {whole}, not a multiple of {parts_name!r} {parts}")
        return whole // parts

    def flag(self, name: str) -> bool:
        """Return a boolean field, false if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            reject(f"field {name!r} is {short_repr(value)}, not true or false")
        return value is True

    def dtype(self, *names: str, default: DType) -> DType:
        """Return an element type, under any of these names."""
        found = self.find(*names)
        return default if found is None else parse_dtype(*found)

    def window(self) -> int | None:
        """Return the sliding window. An explicit null means that there is none."""
        if "sliding_window" in self.values and self.values["sliding_window"] is None:
            return None
        return self.count("sliding_window", default=0, most=MAX_WINDOW) or None

    def listed_layers(self) -> tuple[str, Sequence[object]] | None:
        """Return name and value of the field with an entry for each layer, if there is one."""
        found = self.find("layer_types", "layers_block_type", "hybrid_override_pattern")
        if found is None:
            return None
        name, value = found
        if isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern")):
            return name, value
        reject(f"field {name!r} is {short_repr(value)}, not one entry for each layer")

    def num_layers(self) -> int:
        """Return the number of layers, from its field or from the list of layers."""
        listed = self.listed_layers()
        if listed is None:
            return self.count("num_hidden_layers", most=MAX_LAYERS)
        name, entries = listed
        num_layers = self.count("num_hidden_layers", default=len(entries), most=MAX_LAYERS)
        if len(entries) != num_layers:
            reject(
                f"field {name!r} has {len(entries)} entries, but the model has {num_layers} layers"
            )
        return num_layers


def first_of(values: Mapping[str, object], names: Iterable[str]) -> tuple[str, object] | None:
    """Return name and value of the first of these fields that is not null."""
    for name in names:
        if (value := values.get(name)) is not None:
            return name, value
    return None


def parse_dtype(name: str, value: object) -> DType:
    """Return the element type that a field names."""
    try:
        return DType.parse(value if isinstance(value, str) else "")
    except InputError:
        reject(f"field {name!r} is {short_repr(value)}, not one of {', '.join(DType)}")
