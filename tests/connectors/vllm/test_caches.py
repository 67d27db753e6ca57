from __future__ import annotations

from typing import Any

import pytest

from kvferry import InputError, Order, Refused, reshard
from kvferry.connectors.vllm.caches import (
    BlockGroup,
    CacheView,
    EngineShape,
    layer_of,
    plan_caches,
)
from kvferry.connectors.vllm.paging import BlockTables, Paging, PushedPages
from kvferry.plan.prove import check


def view(heads: int, tokens: int = 16, content: int = 128, *, nhd: bool = False) -> CacheView:
    page = heads * tokens * content
    strides = (page, content, heads * content, 1) if nhd else (page, tokens * content, content, 1)
    return CacheView((100, heads, tokens, content), strides, "bfloat16")


def caches(num_layers: int, cache: CacheView, first: int = 0) -> dict[str, CacheView]:
    return {f"model.layers.{i}.self_attn.attn": cache for i in range(first, first + num_layers)}


def engine(tp: int = 1, heads: int = 8, **more: Any) -> EngineShape:
    return EngineShape(tp, (4,), 0, heads, 16, on_cpu=False)._replace(**more)


def test_heads_or_tokens_first() -> None:
    assert plan_caches(caches(4, view(8)), engine()).layout.order is Order.HND
    plan = plan_caches(caches(4, view(8, nhd=True)), engine())
    assert plan.layout.order is Order.NHD
    assert plan.layout.page_tokens == 16
    assert plan.names["kv"][2] == "model.layers.2.self_attn.attn"


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 4), (8, 2), (16, 4)])
def test_any_sharding_to_any_other(source_tp: int, target_tp: int) -> None:
    sides = [
        plan_caches(caches(4, view(max(1, 8 // tp))), engine(tp)).layout
        for tp in (source_tp, target_tp)
    ]
    check(reshard(*sides))


def test_pipeline_stages() -> None:
    first = plan_caches(caches(3, view(8)), engine(rank=0, stages=(3, 1))).layout
    second = plan_caches(caches(1, view(8), first=3), engine(rank=1, stages=(3, 1))).layout
    assert first == second
    assert first.num_ranks == 2
    with pytest.raises(InputError, match="only in some of this pipeline stage's layers"):
        plan_caches(caches(2, view(8)), engine(rank=0, stages=(3, 1)))


def test_a_draft_models_layers_are_carried_too() -> None:
    plan = plan_caches(caches(5, view(8)), engine())
    assert plan.layout.spec.num_layers == 5
    with pytest.raises(Refused, match="4 layers and decode's 5"):
        reshard(plan_caches(caches(4, view(8)), engine()).layout, plan.layout)
    with pytest.raises(InputError, match="a draft model's cache"):
        plan_caches(caches(2, view(8), first=3), engine(rank=1, stages=(3, 1)))


def test_a_latent_is_on_every_rank() -> None:
    plan = plan_caches(caches(4, view(1, content=576)), engine(tp=8, heads=1))
    assert [group.units for group in plan.layout.spec.groups] == [1]


def test_index_keys_are_a_group_of_their_own() -> None:
    indices = {f"model.layers.{i}.self_attn.indexer": view(1, content=64) for i in range(4)}
    plan = plan_caches(caches(4, view(1, content=576)) | indices, engine(heads=1))
    groups = {group.name: group.tensors[0].elements for group in plan.layout.spec.groups}
    assert groups == {"model.layers.*.self_attn.attn": 576, "model.layers.*.self_attn.indexer": 64}


def test_on_a_cpu_whole_pages_travel() -> None:
    plan = plan_caches(caches(4, view(8)), engine(on_cpu=True))
    assert plan.layout.page_tokens == 1
    (group,) = plan.layout.spec.groups
    assert group.tensors[0].elements == 16 * 128


def test_on_a_cpu_other_pages_are_refused_at_the_handshake() -> None:
    sides = [
        plan_caches(caches(4, view(8, tokens=n)), engine(on_cpu=True, block_tokens=n)).layout
        for n in (16, 32)
    ]
    with pytest.raises(Refused, match=r"blocks_of_16_tokens at prefill and blocks_of_32_tokens"):
        reshard(*sides)


def test_a_cpu_and_a_gpu_are_refused_at_the_handshake() -> None:
    sides = [plan_caches(caches(4, view(8)), engine(on_cpu=cpu)).layout for cpu in (True, False)]
    with pytest.raises(Refused, match="blocks_of_16_tokens at prefill and content at decode"):
        reshard(*sides)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ({}, "registered no KV cache"),
        (caches(4, CacheView((2, 100, 16, 8, 64), (1, 1, 1, 1, 1), "float32")), "has shape"),
        (caches(4, CacheView((9, 8, 16, 128), (16384, 2048, 128, 2), "float32")), "has gaps"),
        (caches(4, view(16)), "has 16 heads here, where 8 KV heads over TP1 make 8"),
        (caches(4, view(8)) | {"draft.0.layers.0.attn": view(8)}, "no single layer number"),
        (caches(3, view(8)) | caches(1, view(8, tokens=32), first=3), "blocks of 16, 32 tokens"),
        (caches(3, view(8)) | caches(1, view(8, nhd=True), first=3), "different orders"),
    ],
)
def test_what_can_not_be_carried_is_one_sentence(views: dict[str, CacheView], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan_caches(views, engine())


def test_layers_pair_by_number() -> None:
    assert layer_of("model.layers.12.self_attn.attn") == (12, "model.layers.*.self_attn.attn")


# ---------------------------------------------------------------- pages


def test_a_kernels_pages_may_be_parts_of_blocks() -> None:
    paging = Paging(block_tokens=64, page_tokens=16, whole_pages=False)
    assert paging.pages([3, 1]) == [12, 13, 14, 15, 4, 5, 6, 7]
    assert paging.touched(paging.pages([3, 1]), 10, 40) == [12, 13, 14]
    with pytest.raises(InputError, match="choose another --block-size"):
        Paging(block_tokens=24, page_tokens=16, whole_pages=False)


def tables(*, whole_pages: bool, window: int | None = None) -> BlockTables:
    kept = [BlockGroup(frozenset(caches(2, view(8))))]
    kept += [BlockGroup(frozenset(caches(2, view(8), first=2)), window)]
    return plan_caches(caches(4, view(8)), engine(on_cpu=whole_pages), kept).tables


FULL, OTHER = (f"model.layers.*.self_attn.attn {place}" for place in (0, 1))


def test_chunks_are_pushed_as_they_are_computed() -> None:
    pages = PushedPages(tables(whole_pages=False), 40)
    pages.extend(0, ((7, 4), (1, 2)))
    assert pages.ahead(20, last=False) == ((0, 20), {FULL: [7, 4], OTHER: [1, 2]})
    pages.end = 20
    pages.extend(1, ((4, 9), (2, 3)))
    assert pages.ahead(40, last=True) == ((20, 40), {FULL: [4, 9], OTHER: [2, 3]})


def test_pages_before_a_window_are_not_named() -> None:
    pages = PushedPages(tables(whole_pages=False, window=10), 60)
    pages.extend(0, ((7, 4, 5), (1, 2, 3)))
    assert pages.ahead(48, last=False) == ((0, 48), {FULL: [7, 4, 5], OTHER: [None, None, None]})
    pages = PushedPages(tables(whole_pages=False, window=16), 60)
    pages.extend(0, ((7, 4, 5), (0, 0, 3)))  # vLLM's null block, where a prefix was cached
    assert pages.ahead(48, last=False) == ((0, 48), {FULL: [7, 4, 5], OTHER: [None, None, 3]})


def test_a_target_wants_what_a_window_keeps() -> None:
    blocks = ((7, 4, 5, 6), (0, 0, 3, 2))
    kept = tables(whole_pages=False, window=16)
    assert kept.wanted(blocks, 60, 0) == {FULL: [7, 4, 5, 6], OTHER: [3, 2]}
    assert kept.wanted(blocks, 60, 50) == {FULL: [6], OTHER: [2]}
    assert kept.wanted((), 60, 60) == {FULL: [], OTHER: []}


@pytest.mark.parametrize("num_tokens", range(1, 100))
def test_on_a_cpu_a_window_reaches_far_enough(num_tokens: int) -> None:
    """Whatever the last block holds, no more than one page before the window's first is owed."""
    window, group = 33, tables(whole_pages=True, window=33).groups[1]
    needed = max(0, num_tokens - window) // 16
    assert needed - 1 <= group.owed(-(-num_tokens // 16)).first <= needed


def test_on_a_cpu_a_page_is_pushed_when_it_is_full_or_the_last() -> None:
    pages = PushedPages(tables(whole_pages=True), 33)
    pages.extend(0, ((7,), (1,)))
    assert pages.ahead(15, last=False) is None
    pages.extend(0, ((7, 4), (1, 2)))
    assert pages.ahead(31, last=False) == ((0, 1), {FULL: [7], OTHER: [1]})
    pages.end = 1
    pages.extend(1, ((4, 9), (2, 3)))
    assert pages.ahead(33, last=True) == ((1, 3), {FULL: [4, 9], OTHER: [2, 3]})
