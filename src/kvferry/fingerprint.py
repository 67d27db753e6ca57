"""Fingerprint of a served model: the properties that two engines must share, as one string.

Two engines with equal layouts may still interpret the same bytes differently: another
checkpoint, another tokenizer, other rotary angles, another precision. Each property is one
``name=value`` part of the string, so that a refusal can name the parts that differ. The
protocol only compares the strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from urllib.parse import quote

import msgspec

SHORT_BYTES = 6
# Rotary base of models that configure none.
DEFAULT_THETA = 10000.0
# Configuration fields about rotary positions. Newer configurations use only the last one.
ROPE_FIELDS = (
    *("rope_theta", "partial_rotary_factor", "rope_local_base_freq"),
    *("rope_scaling", "rope_parameters"),
)
REMEDY = "serve the same model in the same way on both sides"


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a fingerprint. No part contains a space."""

    checkpoint: str
    tokenizer: str
    rope: str
    dtype: str
    overrides: str = "none"

    def __str__(self) -> str:
        return " ".join(f"{name}={part}" for name, part in msgspec.structs.asdict(self).items())


def rope_form(config: Mapping[str, object]) -> str:
    """Return the rotary-embedding part, from a model configuration of the old or the new form."""
    rope = _mapping(config.get("rope_scaling")) | _mapping(config.get("rope_parameters"))
    kinds = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    if not kinds:
        return _rope_of(rope, config)
    # Some models use different rotary parameters for each kind of layer.
    parts = (f"{name}:{_rope_of(_mapping(kinds[name]), config)}" for name in sorted(kinds))
    return ",".join(parts)


def _rope_of(rope: Mapping[str, object], config: Mapping[str, object]) -> str:
    fields = {name: value for name, value in rope.items() if value is not None}
    kind = str(fields.pop("rope_type", None) or fields.get("type") or "default")
    fields.pop("type", None)
    theta = _number(fields.pop("rope_theta", config.get("rope_theta")), DEFAULT_THETA)
    part = _number(fields.pop("partial_rotary_factor", config.get("partial_rotary_factor")), 1.0)
    words = [kind, f"theta:{theta:g}"]
    if part != 1.0:
        words.append(f"part:{part:g}")
    if fields:
        words.append(shortened(fields))
    return ",".join(words)


def named(text: str) -> str:
    """Return ``text`` quoted so that it contains no space."""
    return quote(text, safe="/:@+,")


def shortened(fields: Mapping[str, object]) -> str:
    """Return a short hash of ``fields``. The numbers 8 and 8.0 hash alike."""
    text = json.dumps(_plain(fields), sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=SHORT_BYTES).hexdigest()


def difference(prefill: str, decode: str) -> str:
    """Describe how two fingerprints differ. They may be arbitrary strings."""
    at_prefill, at_decode = _parts(prefill), _parts(decode)
    if at_prefill.keys() != at_decode.keys() or len(at_prefill) == 1:
        return f"prefill serves {prefill} and decode {decode}; {REMEDY}"
    differ = (
        f"{name} is {part} at prefill and {at_decode[name]} at decode"
        for name, part in at_prefill.items()
        if part != at_decode[name]
    )
    return f"{', '.join(differ)}; {REMEDY}"


def _parts(fingerprint: str) -> dict[str, str]:
    """Split a fingerprint by part name; an arbitrary string becomes one unnamed part."""
    parts = [part.partition("=") for part in fingerprint.split(" ")]
    if not all(equals for _, equals, _ in parts):
        return {"": fingerprint}
    return {name: part for name, _, part in parts}


def _mapping(value: object) -> dict[str, object]:
    return {str(name): part for name, part in value.items()} if isinstance(value, Mapping) else {}


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
