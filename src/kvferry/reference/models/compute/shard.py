"""A rank's share of a model, derived from its share of the cache.

Layers and KV heads are what the layout says. Query heads follow the KV heads
they read; where several ranks hold the same KV head, they divide its query heads
among them. What the cache does not know (the MLP's channels, the vocabulary) is
dealt out evenly, with shares that differ by at most one.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry import Layout, Parallel, Span
from kvferry.reference.models.config import ModelConfig


class Shard(NamedTuple):
    """What one rank computes: spans of layers, heads, channels and vocabulary."""

    rank: int
    parallel: Parallel
    layers: Span
    heads: Span
    kv_heads: Span
    state_heads: Span
    channels: Span
    vocab: Span

    @property
    def tp_rank(self) -> int:
        """The rank's place among those that share its layers."""
        return self.rank % self.parallel.tp

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.rank // self.parallel.tp

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends in logits."""
        return self.stage == self.parallel.pp - 1


def even_share(total: int, parts: int, part: int) -> Span:
    """One part of ``total`` things; the first parts have one more where it is uneven."""
    base, extra = divmod(total, parts)
    first = part * base + min(part, extra)
    return Span(first, first + base + (part < extra))


def shard_of(config: ModelConfig, layout: Layout, rank: int) -> Shard:
    """The share of one rank."""
    parallel = layout.sharding
    assert isinstance(parallel, Parallel)
    tp_rank = rank % parallel.tp
    kv_heads = parallel.unit_span(config.kv_heads, tp_rank)
    return Shard(
        rank=rank,
        parallel=parallel,
        # Every layer keeps something, so any shard has the whole stage.
        layers=layout.rank_shards(rank)[0].layers,
        heads=query_heads(config, parallel.tp, tp_rank, kv_heads),
        kv_heads=kv_heads,
        state_heads=_state_heads(config, parallel, tp_rank),
        channels=even_share(config.intermediate, parallel.tp, tp_rank),
        vocab=even_share(config.vocab, parallel.tp, tp_rank),
    )


def _state_heads(config: ModelConfig, parallel: Parallel, tp_rank: int) -> Span:
    if config.linear is None:
        return Span(0, 0)
    return parallel.unit_span(config.linear.heads, tp_rank)


def query_heads(config: ModelConfig, tp: int, tp_rank: int, kv_heads: Span) -> Span:
    """The query heads that read these KV heads, divided among the ranks that hold the same."""
    per_kv = config.heads // config.kv_heads
    readers = len(kv_heads) * per_kv
    replicas = max(1, tp // config.kv_heads)
    share = even_share(readers, replicas, tp_rank % replicas)
    first = kv_heads.first * per_kv
    return Span(first + share.first, first + share.end)
