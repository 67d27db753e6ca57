"""Layouts and placements of SGLang's pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry import DType, ExplicitSharding, InputError, Parallel, Refused, Span, reshard
from kvferry.connectors.sglang.geometry import head_span, layout_of, memory_of
from kvferry.connectors.sglang.pools import Buffers, KvHeads, RankPosition, SglangCache
from kvferry.plan.prove import check

LAYERS = 4
PAGES = 8


def cache(
    *,
    tp: int = 1,
    tp_rank: int = 0,
    total: int = 3,
    share: int | None = None,
    padded_for: int | None = None,
    page: int = 16,
    pp: int = 1,
    pp_rank: int = 0,
    stages: tuple[int, ...] = (LAYERS,),
) -> SglangCache:
    """A rank's as SGLang would have it, with K of 8 and V of 4 float32 elements a head."""
    heads = -(-total // tp) if share is None else share
    first = sum(stages[:pp_rank])
    layers = tuple(range(first, first + stages[pp_rank]))
    rows = [heads * 8 * 4] * len(layers) + [heads * 4 * 4] * len(layers)
    return SglangCache(
        num_layers=sum(stages),
        layers=tuple(range(sum(stages))),
        stages=stages,
        position=RankPosition(tp=tp, tp_rank=tp_rank, pp=pp, pp_rank=pp_rank),
        heads=KvHeads(total=total, k_dim=8, v_dim=4, padded_for=padded_for or tp),
        buffers=Buffers(
            addresses=[1 << 20 << index for index in range(len(rows))],
            lengths=[row * page * PAGES for row in rows],
            page_lengths=[row * page for row in rows],
            layers=layers,
            page_tokens=page,
            dtype=DType.FLOAT32,
        ),
    )


@pytest.mark.parametrize(
    ("heads", "tp", "spans"),
    [
        (KvHeads(total=8, k_dim=1, v_dim=1), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        # More ranks than heads: neighbours share one, which is where #22145 went wrong.
        (KvHeads(total=2, k_dim=1, v_dim=1), 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        # A CPU pads instead, and nobody else has the padding.
        (KvHeads(total=3, k_dim=1, v_dim=1, padded_for=2), 2, [(0, 2), (2, 3)]),
        (KvHeads(total=3, k_dim=1, v_dim=1, padded_for=4), 4, [(0, 1), (1, 2), (2, 3), (3, 3)]),
        (KvHeads(total=4, k_dim=1, v_dim=1, padded_for=2), 2, [(0, 2), (2, 4)]),
        # Attention of one rank a replica: it has the padding of both.
        (KvHeads(total=3, k_dim=1, v_dim=1, padded_for=2), 1, [(0, 3)]),
    ],
)
def test_heads_are_sharded_like_sglang(
    heads: KvHeads, tp: int, spans: list[tuple[int, int]]
) -> None:
    assert [head_span(heads, tp, rank) for rank in range(tp)] == [Span(*span) for span in spans]


@pytest.mark.parametrize("tp_rank", range(8))
def test_ranks_that_share_tokens_have_equal_heads_and_some_of_the_pages(tp_rank: int) -> None:
    """SGLang lists pages of all ranks that take turns: here four, of 4 heads over two groups."""
    shared = cache(tp=8, tp_rank=tp_rank, total=4, share=2, padded_for=1)
    shared = replace(shared, position=replace(shared.position, dcp=4))
    layout = layout_of(shared)
    assert layout.sharding == Parallel(tp=8, dcp=4, stages=(LAYERS,))
    (held,) = layout.rank_shards(tp_rank)
    assert held.units == (Span(0, 2) if tp_rank < 4 else Span(2, 4))
    assert memory_of(shared).map.of("kv", "k").token_stride == 2 * 8 * 4
    listed = [7, 3, 9]
    assert shared.listed_page_tokens == 64
    for first in (0, 64, 128):
        for end in range(first + 1, 193):
            pages = listed[first // 64 : -(-end // 64)]
            mine = [token // 64 for token in range(first, end) if token % 4 == tp_rank % 4]
            assert shared.own_pages(pages, first, end) == [
                page for place, page in enumerate(listed) if place in mine
            ]


def test_regular_sharding_needs_no_explicit_list() -> None:
    assert layout_of(cache(tp=3)).sharding == Parallel(tp=3, stages=(LAYERS,))
    assert isinstance(layout_of(cache(tp=2)).sharding, ExplicitSharding)


def test_all_ranks_have_one_layout() -> None:
    stages = (1, 3)
    said = {
        repr(layout_of(cache(tp=2, tp_rank=tp, pp=2, pp_rank=pp, stages=stages)).shards())
        for tp in range(2)
        for pp in range(2)
    }
    assert len(said) == 1


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (3, 1), (3, 2), (2, 3), (4, 1)])
def test_padded_heads_work_with_any_other_side(source: int, target: int) -> None:
    plan = reshard(layout_of(cache(tp=source)), layout_of(cache(tp=target, page=1)))
    check(plan)


def test_lead_is_the_first_rank_of_the_last_stage() -> None:
    stages = (2, 2)
    assert layout_of(cache(tp=2, pp=2, stages=stages)).lead == 2
    assert layout_of(cache(tp=3, pp=2, stages=stages)).lead == 3


def test_placements_match_sglangs_buffers() -> None:
    one = cache(tp=2, tp_rank=1, page=16)
    memory = memory_of(one)
    assert [region.address for region in memory.regions] == list(one.buffers.addresses)
    k, v = memory.map.of("kv", "k"), memory.map.of("kv", "v")
    # Two heads in a row, one of them padding; of K 8 elements of 4 bytes each, of V 4.
    assert (k.page_stride, k.token_stride, k.unit_stride) == (16 * 64, 64, 32)
    assert (v.page_stride, v.token_stride, v.unit_stride) == (16 * 32, 32, 16)
    assert [base.region for base in v.bases] == list(range(LAYERS, 2 * LAYERS))
    assert k.num_pages == PAGES


def test_a_stage_places_its_own_layers() -> None:
    placement = memory_of(cache(tp=1, pp=2, pp_rank=1, stages=(1, 3))).map.of("kv", "k")
    assert [base.layer for base in placement.bases] == [1, 2, 3]


def test_a_rank_with_only_padding_has_no_placements() -> None:
    one = cache(tp=4, tp_rank=3)
    assert layout_of(one).rank_shards(3) == ()
    assert memory_of(one).regions == ()


def test_every_rank_holds_the_latent() -> None:
    buffers = replace(
        cache().buffers,
        addresses=[1 << 20, 2 << 20],
        lengths=[640, 640],
        page_lengths=[64, 64],
        layers=(0, 1),
        page_tokens=4,
    )
    one = replace(
        cache(tp=2), num_layers=2, layers=(0, 1), stages=(2,), heads=None, buffers=buffers
    )
    layout = layout_of(one)
    assert [shard.units for rank in layout.shards() for shard in rank] == [Span(0, 1)] * 2
    assert layout.spec.groups[0].tensors[0].elements == 4
    assert memory_of(one).map.of("latent", "latent").num_pages == 10


def test_rows_of_another_size_are_rejected() -> None:
    with pytest.raises(Refused, match="this KV layout is not supported"):
        memory_of(cache(tp=2, share=3))


def test_unexpected_number_of_buffers_is_rejected() -> None:
    one = cache()
    lengths = one.buffers.lengths[:-1]
    short = replace(one.buffers, addresses=one.buffers.addresses[:-1], lengths=lengths)
    with pytest.raises(InputError, match="7 KV buffers for 4 layers"):
        memory_of(replace(one, buffers=short))
