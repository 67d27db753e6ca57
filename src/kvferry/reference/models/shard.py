"""A rank's share of a model, derived from its share of the cache.

Layers and KV heads come from the layout. Query heads follow the KV heads they read; ranks that
hold the same KV head divide its query heads among them. MLP channels and the vocabulary, which
the cache does not know, are split evenly.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry import Layout, Parallel, Span
from kvferry.reference.models.config import ModelConfig


class ModelShard(NamedTuple):
    """Spans of layers, heads, channels and vocabulary that one rank computes."""

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
        """The rank's number within its stage."""
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
        """Whether the stage ends with logits."""
        return self.stage == self.parallel.pp - 1


def even_share(total: int, parts: int, part: int) -> Span:
    """Return one part of ``total``; the first parts are one larger if it does not divide."""
    base, extra = divmod(total, parts)
    first = part * base + min(part, extra)
    return Span(first, first + base + (part < extra))


def shard_of(config: ModelConfig, layout: Layout, rank: int) -> ModelShard:
    """Return one rank's share."""
    parallel = layout.sharding
    assert isinstance(parallel, Parallel)
    tp_rank = rank % parallel.tp
    kv_heads = parallel.unit_span(config.kv_heads, tp_rank)
    return ModelShard(
        rank=rank,
        parallel=parallel,
        # Every layer keeps something, so any holding spans the whole stage.
        layers=layout.rank_shards(rank)[0].layers,
        heads=_query_heads(config, parallel.tp, tp_rank, kv_heads),
        kv_heads=kv_heads,
        state_heads=parallel.unit_span(config.linear_heads, tp_rank)
        if config.is_hybrid
        else Span(0, 0),
        channels=even_share(config.intermediate, parallel.tp, tp_rank),
        vocab=even_share(config.vocab, parallel.tp, tp_rank),
    )


def _query_heads(config: ModelConfig, tp: int, tp_rank: int, kv_heads: Span) -> Span:
    per_kv = config.heads // config.kv_heads
    replicas = max(1, tp // config.kv_heads)
    share = even_share(len(kv_heads) * per_kv, replicas, tp_rank % replicas)
    first = kv_heads.first * per_kv
    return Span(first + share.first, first + share.end)
