"""Pools as one SGLang rank has them: pointers, lengths and page lengths, and whose they are.

Pure, and nothing but values: ``geometry`` says what they mean in kvferry's words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import DType
from kvferry.connectors.sglang.states import StateBuffer

DRAFT = "draft"
SCALES = "scales"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of its instance a scheduler is: one data-parallel replica's TP and PP."""

    tp: int
    tp_rank: int
    pp: int = 1
    pp_rank: int = 0

    @property
    def rank(self) -> int:
        """As kvferry counts."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The model's KV heads, and their dimensions.

    A CPU pads them to a multiple of ``padded_for``: all ranks, those of other replicas too where
    attention is data-parallel.
    """

    total: int
    k_dim: int
    v_dim: int
    padded_for: int = 1

    @property
    def with_padding(self) -> int:
        """How many there are with the padding, over one replica's ranks."""
        return -(-self.total // self.padded_for) * self.padded_for


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The KV buffers of one rank: K of every layer, then V; for MLA one of each layer."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    page_lengths: Sequence[int]
    layers: tuple[int, ...]
    page_tokens: int
    dtype: DType
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class WindowPool:
    """The pool of sliding-window layers, which have pages of their own for the last tokens."""

    num_tokens: int
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class BesidePool:
    """A pool beside K and V in whose pages are the same tokens: block scales, a draft's cache.

    ``layers`` are the whole instance's; ``heads`` is None for a latent.
    """

    name: str
    layers: tuple[int, ...]
    heads: Heads | None
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class SglangCache:
    """What one rank has. ``heads`` is None for MLA; ``stages`` are the layers of each PP stage.

    A draft model's layers come after the model's own. ``index`` are index keys, one buffer a layer.
    """

    num_layers: int
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    place: Place
    heads: Heads | None
    buffers: Buffers
    states: tuple[StateBuffer, ...] = ()
    window: WindowPool | None = None
    beside: tuple[BesidePool, ...] = ()
    index: Buffers | None = None

    @property
    def names_pages_twice(self) -> bool:
        """Whether SGLang names the pages of something beside K and V that are the same."""
        return self.index is not None or any(pool.name == SCALES for pool in self.beside)
