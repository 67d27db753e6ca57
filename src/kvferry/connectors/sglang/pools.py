"""Pools of one SGLang rank: addresses, lengths and page lengths. Values only.

``geometry`` translates them to a layout and placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import DType, Parallel, Span, touched_pages
from kvferry.connectors.sglang.states import StateBuffer

DRAFT = "draft"
SCALES = "scales"


@dataclass(frozen=True, kw_only=True)
class RankPosition:
    """TP and PP rank of a scheduler within its data-parallel replica.

    ``dcp`` neighbouring TP ranks have the same heads and take turns at tokens.
    """

    tp: int
    tp_rank: int
    pp: int = 1
    pp_rank: int = 0
    dcp: int = 1

    @property
    def rank(self) -> int:
        """The rank as kvferry numbers it."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True, kw_only=True)
class KvHeads:
    """The model's KV heads and their dimensions.

    On a CPU, SGLang pads their number to a multiple of ``padded_for``: the TP size of the server,
    including other replicas with data-parallel attention.
    """

    total: int
    k_dim: int
    v_dim: int
    padded_for: int = 1

    @property
    def with_padding(self) -> int:
        """Number of heads including padding, over one replica's ranks."""
        return -(-self.total // self.padded_for) * self.padded_for


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """KV buffers of one rank: K of every layer, then V; for MLA one per layer."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    page_lengths: Sequence[int]
    layers: tuple[int, ...]
    page_tokens: int
    dtype: DType
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class WindowPool:
    """Pool of sliding-window layers, with pages for the last tokens only.

    ``layers`` are those of the whole instance.
    """

    num_tokens: int
    layers: tuple[int, ...]
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class AuxiliaryPool:
    """Pool with the same pages as K and V: block scales, or a draft model's cache.

    ``layers`` are those of the whole instance; ``heads`` is None for a latent.
    """

    name: str
    layers: tuple[int, ...]
    heads: KvHeads | None
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class SglangCache:
    """All pools of one rank. ``heads`` is None for MLA; ``stages`` has the layers per PP stage.

    A draft model's layers follow the model's. ``index`` has the index keys, a buffer per layer.
    ``state_layers`` are those of the whole instance that have state, if this rank has only some.
    """

    num_layers: int
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    position: RankPosition
    heads: KvHeads | None
    buffers: Buffers
    states: tuple[StateBuffer, ...] = ()
    state_layers: tuple[int, ...] = ()
    window: WindowPool | None = None
    auxiliary: tuple[AuxiliaryPool, ...] = ()
    index: Buffers | None = None

    @property
    def listed_page_tokens(self) -> int:
        """Tokens in a page as SGLang lists it: those of all ranks that share them."""
        return self.buffers.page_tokens * self.position.dcp

    def own_pages(self, pages: list[int], first: int, end: int) -> list[int]:
        """Return those of the listed pages of some tokens that hold a token of this rank."""
        position = self.position
        if position.dcp == 1:
            return pages
        mine = Parallel(tp=position.tp, dcp=position.dcp).tokens(position.tp_rank)
        some = mine.clip(Span(first, end))
        local = mine.local_index(some.first)
        touched = touched_pages(Span(local, local + some.num_tokens), self.buffers.page_tokens)
        skipped = first // self.listed_page_tokens
        return pages[touched.first - skipped : touched.end - skipped]

    @property
    def names_pages_twice(self) -> bool:
        """Whether SGLang lists the same pages again for index keys or block scales."""
        return self.index is not None or any(pool.name == SCALES for pool in self.auxiliary)
