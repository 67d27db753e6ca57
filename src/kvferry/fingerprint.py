"""The fingerprint of a model as it is served: what two engines must have in common, as one text.

Two engines with the same layout may still mean different things by the same bytes: another
checkpoint, other ids for the same words, keys that were turned by other angles, sums in another
precision. Each of these is a part of the text, so that a refusal can name the part that differs.

Pure, and nothing to the protocol but texts that are equal or not, until it has to say why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from urllib.parse import quote

import msgspec

SHORT_BYTES = 6
# The base of whoever names none.
DEFAULT_THETA = 10000.0
# What a configuration may say of rotary positions; newer ones say all of it in the last.
ROPE_FIELDS = (
    *("rope_theta", "partial_rotary_factor", "rope_local_base_freq"),
    *("rope_scaling", "rope_parameters"),
)
REMEDY = "serve the same model in the same way on both sides"


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The parts. None has a space in it."""

    checkpoint: str
    tokenizer: str
    rope: str
    dtype: str
    overrides: str = "none"

    def __str__(self) -> str:
        return " ".join(f"{name}={part}" for name, part in msgspec.structs.asdict(self).items())


def rope_form(config: Mapping[str, object]) -> str:
    """By which angles the keys in a cache were turned, from a configuration in old or new words."""
    said = _mapping(config.get("rope_scaling")) | _mapping(config.get("rope_parameters"))
    kinds = {name: part for name, part in said.items() if isinstance(part, Mapping)}
    if not kinds:
        return _rope_of(said, config)
    # Some models turn the keys of each kind of layer by angles of its own.
    each = (f"{name}:{_rope_of(_mapping(kinds[name]), config)}" for name in sorted(kinds))
    return ",".join(each)


def _rope_of(said: Mapping[str, object], config: Mapping[str, object]) -> str:
    fields = {name: value for name, value in said.items() if value is not None}
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
    """Somebody's own word for a part, as one that has no space in it."""
    return quote(text, safe="/:@+,")


def shortened(fields: Mapping[str, object]) -> str:
    """A few digits for many fields. Whether a number was written 8 or 8.0 is no difference."""
    text = json.dumps(_plain(fields), sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=SHORT_BYTES).hexdigest()


def difference(prefill: str, decode: str) -> str:
    """What two fingerprints do not have in common, for a person; they need not be of ours."""
    ours, theirs = _parts(prefill), _parts(decode)
    if ours.keys() != theirs.keys() or len(ours) == 1:
        return f"prefill serves {prefill} and decode {decode}; {REMEDY}"
    differ = (
        f"{name} is {ours[name]} at prefill and {theirs[name]} at decode"
        for name in ours
        if ours[name] != theirs[name]
    )
    return f"{', '.join(differ)}; {REMEDY}"


def _parts(fingerprint: str) -> dict[str, str]:
    """By name; one without a name, if it is somebody's own text."""
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
