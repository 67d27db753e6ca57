"""The contents of a model's cache, independent of sharding and paging.

A ``CacheSpec`` is a list of groups. A group is a set of tensors that are sharded alike: the same
layers, the same units (KV heads, state channels), the same relation to tokens. Coordinates are
logical: (group, layer, token, unit). Layers have model-wide numbers, by which the two sides pair
tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum

import msgspec

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout.intervals import Span
from kvferry.layout.tokens import Pattern

MAX_LAYERS = 4096
MAX_UNITS = 65536
MAX_GROUPS = 64
MAX_TOKENS_PER_ENTRY = 1 << 16
# With 8 bytes per element and MAX_UNITS units, a token's row is far below 2**62 bytes.
MAX_ELEMENTS = 1 << 24


class DType(StrEnum):
    """Element types of a cache. Copies only depend on the width."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _WIDTHS[self]

    @classmethod
    def parse(cls, text: str) -> DType:
        """Return the type for a name as written by people and engines."""
        name = _ALIASES.get(text.lower().removeprefix("torch."), text.lower())
        try:
            return cls(name.removeprefix("torch."))
        except ValueError:
            known = ", ".join(cls)
            raise InputError(f"unknown dtype {text!r:.40}; use one of {known}") from None


class CacheFormat(StrEnum):
    """Forms of an attention cache whose entries have parts of several types, by vLLM's names."""

    FP8_DS_MLA = "fp8_ds_mla"


def parse_cache_type(text: str) -> DType | CacheFormat:
    """Return the type or form of a cache, for a name as written by people and engines."""
    return CacheFormat(text) if text in list(CacheFormat) else DType.parse(text)


_WIDTHS = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
}
_ALIASES = {
    "fp64": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


class Paged(msgspec.Struct, frozen=True, tag="paged"):
    """Kind of group with an entry for every token of a request."""


class Window(msgspec.Struct, frozen=True, tag="window"):
    """Kind of group with an entry for each of the last ``num_tokens`` tokens."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InputError(f"a window keeps at least 1 token, not {self.num_tokens}")


class StateRow(msgspec.Struct, frozen=True, tag="slot"):
    """Kind of group with one row per request: the state after its last token."""


Kind = Paged | Window | StateRow


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive elements of a composite entry, such as its quantised values or its scales."""

    name: str
    dtype: DType
    elements: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a group: ``elements`` per unit, for each token or state row.

    The elements of a composite tensor are bytes, and ``parts`` say what they are in this order.
    """

    name: str
    dtype: DType
    elements: int
    parts: tuple[Part, ...] = ()

    @classmethod
    def composite(cls, name: str, *parts: Part) -> Tensor:
        """Return a tensor whose entry has parts of different types without gaps."""
        num_bytes = sum(part.elements * part.dtype.num_bytes for part in parts)
        return cls(name, DType.UINT8, num_bytes, parts)

    def __post_init__(self) -> None:
        if not 1 <= self.elements <= MAX_ELEMENTS:
            raise Refused.because(
                ReasonCode.NO_UNITS if self.elements < 1 else ReasonCode.TOO_LARGE,
                f"tensor {self.name!r} has {self.elements} elements per unit; "
                f"give it between 1 and {MAX_ELEMENTS}",
            )
        in_parts = sum(part.elements * part.dtype.num_bytes for part in self.parts)
        if self.parts and in_parts != self.unit_bytes:
            raise InputError(
                f"the parts of tensor {self.name!r} have {in_parts} bytes and its entry has "
                f"{self.unit_bytes}; list parts that add up"
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit for one token or state row."""
        return self.elements * self.dtype.num_bytes


class Group(msgspec.Struct, frozen=True):
    """Tensors that are sharded alike. ``layers`` are model layer numbers, ascending.

    An entry may stand for several tokens, as in compressed attention. It is computed with the last
    of ``tokens_per_entry`` tokens and counts as that token's, so tokens after the last full entry
    have none yet.
    """

    name: str
    kind: Kind
    layers: tuple[int, ...]
    units: int
    tensors: tuple[Tensor, ...]
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.units <= MAX_UNITS:
            raise Refused.because(
                ReasonCode.NO_UNITS if self.units < 1 else ReasonCode.TOO_LARGE,
                f"group {self.name!r} has {self.units} units (KV heads); "
                f"give it between 1 and {MAX_UNITS}",
            )
        if not self.layers:
            raise Refused.because(
                ReasonCode.NO_LAYERS, f"group {self.name!r} has no layers; give it at least 1"
            )
        if any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise InputError(f"group {self.name!r} must list its layers ascending, each once")
        if not 1 <= self.tokens_per_entry <= MAX_TOKENS_PER_ENTRY:
            raise InputError(
                f"an entry of group {self.name!r} stands for 1 to {MAX_TOKENS_PER_ENTRY} tokens, "
                f"not {self.tokens_per_entry}"
            )
        if self.tokens_per_entry > 1 and isinstance(self.kind, StateRow):
            raise InputError(f"group {self.name!r} has a row per request; leave out the ratio")
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) != len(names):
            raise InputError(f"group {self.name!r} needs at least one tensor, each name once")

    @property
    def entries(self) -> Pattern:
        """The tokens that have an entry."""
        return Pattern.interleaved(self.tokens_per_entry - 1, self.tokens_per_entry)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit over all tensors of one layer, for one token or state row."""
        return sum(tensor.unit_bytes for tensor in self.tensors)

    def layers_in(self, span: Span) -> tuple[int, ...]:
        """Return the group's layers whose numbers are in ``span``."""
        return self.layers[
            bisect_left(self.layers, span.first) : bisect_left(self.layers, span.end)
        ]

    def places_in(self, span: Span) -> Span:
        """Return the indices, among the group's layers, of those in ``span``."""
        first = bisect_left(self.layers, span.first)
        return Span(first, max(first, bisect_left(self.layers, span.end)))

    def layers_at(self, places: Span) -> Span:
        """Return the span of layer numbers of these indices: the inverse of ``places_in``."""
        return Span(self.layers[places.first], self.layers[places.end - 1] + 1)

    def owed(self, num_tokens: int, prefix: int = 0) -> Span:
        """Return the positions to transfer if the target already has ``prefix`` tokens.

        A state row counts as the entry of the last token, so a request that is cached in full
        needs no transfer in any group.
        """
        match self.kind:
            case Paged():
                first = 0
            case Window(num_tokens=kept):
                first = max(0, num_tokens - kept)
            case StateRow():
                first = max(0, num_tokens - 1)
        return Span(min(max(first, prefix), num_tokens), num_tokens)


class CacheSpec(msgspec.Struct, frozen=True):
    """A model's cache: its number of layers and its groups."""

    num_layers: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise Refused.because(
                ReasonCode.NO_LAYERS if self.num_layers < 1 else ReasonCode.TOO_LARGE,
                f"the model has {self.num_layers} layers; give it between 1 and {MAX_LAYERS}",
            )
        names = [group.name for group in self.groups]
        if not 1 <= len(names) <= MAX_GROUPS or len(set(names)) != len(names):
            raise InputError(
                f"a cache has 1 to {MAX_GROUPS} groups, each name once, "
                f"not {', '.join(names[:MAX_GROUPS]) or 'none'}"
            )
        for group in self.groups:
            if group.layers[0] < 0 or group.layers[-1] >= self.num_layers:
                raise InputError(
                    f"group {group.name!r} names layers {group.layers[0]}..{group.layers[-1]}, "
                    f"but the model has layers 0..{self.num_layers - 1}"
                )

    def group(self, name: str) -> Group:
        """Return the group with this name."""
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(group.name for group in self.groups)
        raise InputError(f"no group {name!r} in this cache; it has {known}")

    def payload_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one request's cache, with each unit counted once."""
        return sum(
            group.entries.count(owed.first, owed.end)
            * (len(group.layers) * group.units * group.unit_bytes)
            for group in self.groups
            if (owed := group.owed(num_tokens))
        )


def attention(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: DType = DType.BFLOAT16,
) -> CacheSpec:
    """Return the cache of a plain transformer: one paged group with K and V in every layer."""
    group = attention_group("kv", Paged(), range(layers), kv_heads, head_dim, v_head_dim, dtype)
    return CacheSpec(num_layers=layers, groups=(group,))


def attention_group(
    name: str,
    kind: Kind,
    layers: range | tuple[int, ...],
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None,
    dtype: DType,
) -> Group:
    """Return a group with a K and a V tensor. ``v_head_dim`` defaults to ``head_dim``."""
    return Group(
        name=name,
        kind=kind,
        layers=tuple(layers),
        units=kv_heads,
        tensors=(
            Tensor("k", dtype, head_dim),
            Tensor("v", dtype, head_dim if v_head_dim is None else v_head_dim),
        ),
    )
