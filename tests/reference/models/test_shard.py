"""Several ranks compute what one computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.driving import Answer, ask, demand_equal, engine_of, requests

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Parallel, find_shard
from kvferry.reference.models.config import KV, ModelConfig
from kvferry.reference.models.shard import even_share, shard_of
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.options import EngineOptions

Models = dict[TinyKind, Path]


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[TinyKind], list[Answer]]:
    """The answers of a single rank."""
    known: dict[TinyKind, list[Answer]] = {}

    def answers(kind: TinyKind) -> list[Answer]:
        if kind not in known:
            with engine_of(models[kind]) as engine:
                known[kind] = ask(engine, requests())
        return known[kind]

    return answers


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        (TinyKind.LLAMA, Parallel(tp=3)),
        (TinyKind.LLAMA, Parallel(tp=6)),
        (TinyKind.QWEN3, Parallel(tp=2)),
        (TinyKind.QWEN3, Parallel(tp=6)),
    ],
    ids=str,
)
def test_ranks_agree_with_one_rank(
    models: Models, alone: Callable[[TinyKind], list[Answer]], kind: TinyKind, parallel: Parallel
) -> None:
    with engine_of(models[kind], parallel) as engine:
        answers = ask(engine, requests())
    demand_equal(alone(kind), answers)


@pytest.mark.parametrize(
    ("kind", "tp"), [(TinyKind.LLAMA, 3), (TinyKind.LLAMA, 6), (TinyKind.QWEN3, 4)], ids=str
)
def test_shares_follow_the_layout_and_cover_everything_once(
    models: Models, kind: TinyKind, tp: int
) -> None:
    config = ModelConfig.load(models[kind])
    layout = EngineOptions(tp=tp).layout(config)
    shards = [shard_of(config, layout, rank) for rank in range(tp)]
    for rank, shard in enumerate(shards):
        for layer in range(config.num_layers):
            assert find_shard(layout.rank_shards(rank), KV, layer).units == shard.kv_heads
    for field, total in (("heads", config.heads), ("channels", config.intermediate)):
        spans = [getattr(shard, field) for shard in shards]
        assert [i for span in spans for i in range(span.first, span.end)] == list(range(total))
    per_kv = config.heads // config.kv_heads
    for shard in shards:
        readers = {head // per_kv for head in range(shard.heads.first, shard.heads.end)}
        assert readers == set(range(shard.kv_heads.first, shard.kv_heads.end))


def test_an_uneven_share_differs_by_one() -> None:
    assert [even_share(10, 4, part) for part in range(4)] == [
        Span(0, 3),
        Span(3, 6),
        Span(6, 8),
        Span(8, 10),
    ]
