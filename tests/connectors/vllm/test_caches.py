from __future__ import annotations

from typing import Any

import pytest

from kvferry import InputError, Order, Refused, reshard
from kvferry.connectors.vllm.caches import (
    BlockGroup,
    CacheView,
    EngineShape,
    EntryForm,
    layer_of,
    plan_caches,
)
from kvferry.connectors.vllm.paging import PushedPages
from kvferry.plan.prove import check


def view(heads: int, tokens: int = 16, content: int = 128, *, nhd: bool = False) -> CacheView:
    page = heads * tokens * content
    strides = (page, content, heads * content, 1) if nhd else (page, tokens * content, content, 1)
    return CacheView((100, heads, tokens, content), strides, "bfloat16")


def caches(num_layers: int, cache: CacheView, first: int = 0) -> dict[str, CacheView]:
    return {f"model.layers.{i}.self_attn.attn": cache for i in range(first, first + num_layers)}


def engine(tp: int = 1, heads: int = 8, **more: Any) -> EngineShape:
    return EngineShape(tp, (4,), 0, heads, 16, on_cpu=False)._replace(**more)


def test_order_of_heads_and_tokens() -> None:
    assert plan_caches(caches(4, view(8)), engine()).layout.order is Order.HND
    plan = plan_caches(caches(4, view(8, nhd=True)), engine())
    assert plan.layout.order is Order.NHD
    assert plan.layout.page_tokens == 16
    assert plan.names["kv"][2] == "model.layers.2.self_attn.attn"


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 4), (8, 2), (16, 4)])
def test_any_tensor_parallel_size_to_any_other(source_tp: int, target_tp: int) -> None:
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


def test_draft_model_layers_are_transferred() -> None:
    plan = plan_caches(caches(5, view(8)), engine())
    assert plan.layout.spec.num_layers == 5
    with pytest.raises(Refused, match="4 layers and decode's 5"):
        reshard(plan_caches(caches(4, view(8)), engine()).layout, plan.layout)
    with pytest.raises(InputError, match="a draft model is not supported"):
        plan_caches(caches(2, view(8), first=3), engine(rank=1, stages=(3, 1)))


def test_mla_latent_is_replicated() -> None:
    plan = plan_caches(caches(4, view(1, content=576)), engine(tp=8, heads=1))
    assert [group.units for group in plan.layout.spec.groups] == [1]


def test_index_keys_are_a_separate_group() -> None:
    indices = {f"model.layers.{i}.self_attn.indexer": view(1, content=64) for i in range(4)}
    plan = plan_caches(caches(4, view(1, content=576)) | indices, engine(heads=1))
    groups = {group.name: group.tensors[0].elements for group in plan.layout.spec.groups}
    assert groups == {"model.layers.*.self_attn.attn": 576, "model.layers.*.self_attn.indexer": 64}


def test_cpu_transfers_whole_pages() -> None:
    plan = plan_caches(caches(4, view(8)), engine(on_cpu=True))
    assert plan.layout.page_tokens == 1
    (group,) = plan.layout.spec.groups
    assert group.tensors[0].elements == 16 * 128


def test_different_page_sizes_on_cpus_are_refused() -> None:
    sides = [
        plan_caches(caches(4, view(8, tokens=n)), engine(on_cpu=True, block_tokens=n)).layout
        for n in (16, 32)
    ]
    with pytest.raises(Refused, match=r"blocks_of_16_tokens at prefill and blocks_of_32_tokens"):
        reshard(*sides)


def test_cpu_to_gpu_is_refused() -> None:
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
        (caches(3, view(8)) | caches(1, view(8, tokens=32), first=3), "pages of 16, 32 entries"),
        (caches(3, view(8)) | caches(1, view(8, nhd=True), first=3), "different orders"),
    ],
)
def test_unsupported_caches_are_refused(views: dict[str, CacheView], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan_caches(views, engine())


NAMES = tuple(caches(4, view(8)))
KEPT = [
    BlockGroup(frozenset(NAMES[:2]), block_tokens=64),
    BlockGroup(frozenset(NAMES[2:]), 40, block_tokens=32),
]
BY_SIZE = caches(2, view(8)) | caches(2, view(8, tokens=32), first=2)


def test_groups_may_have_blocks_of_different_sizes() -> None:
    """Kernels use pages of 16 tokens in blocks of 64, and whole blocks of 32."""
    plan = plan_caches(BY_SIZE, engine(), KEPT)
    first, second = plan.layout.spec.groups
    assert [plan.layout.page_entries(group) for group in (first, second)] == [16, 32]
    assert plan.layout.group_pages == ((second.name, 32),)
    tables = plan.tables
    assert tables.paging.block_tokens == 64
    # 100 tokens: two blocks of 64, and four of 32, of which the first one is before the window.
    blocks = ((5, 3), (0, 4, 6, 7))
    wanted = tables.wanted(blocks, 100, 0)
    assert wanted == {first.name: [20, 21, 22, 23, 12, 13, 14], second.name: [4, 6, 7]}
    pages = PushedPages(tables, 100)
    pages.extend(0, ((5,), (9, 4)))
    assert pages.new_cells(50, last=False) == (
        (0, 50),
        {first.name: [20, 21, 22, 23], second.name: [None, 4]},
    )
    pages.end = 50
    pages.extend(0, blocks)
    assert pages.new_cells(100, last=True) == (
        (50, 100),
        {first.name: [23, 12, 13, 14], second.name: [4, 6, 7]},
    )
    assert tables.paging_of(first.name).rest(blocks[0], 100) == {14: 4, 15: 0}
    assert tables.paging_of(second.name).rest(blocks[1], 100) == {7: 4}


def test_whole_pages_of_different_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"blocks of 16, 32 tokens, .* which can't be carried"):
        plan_caches(BY_SIZE, engine(on_cpu=True), KEPT)
    compressed = [BlockGroup(frozenset(NAMES), forms=dict.fromkeys(NAMES, EntryForm(4)))]
    with pytest.raises(InputError, match="entries for several tokens, which can't be carried"):
        plan_caches(caches(4, view(8)), engine(on_cpu=True, block_tokens=64), compressed)


@pytest.mark.parametrize("parts", [(("latents", 576), ("scales", 8))])
def test_packed_entries_of_another_size_are_refused(parts: tuple[tuple[str, int], ...]) -> None:
    kept = [BlockGroup(frozenset(NAMES), forms=dict.fromkeys(NAMES, EntryForm(1, parts)))]
    with pytest.raises(InputError, match=r"256 bytes for an entry, not 576 \+ 8"):
        plan_caches(caches(4, view(1)), engine(heads=1), kept)


def test_layer_number_is_read_from_the_name() -> None:
    assert layer_of("model.layers.12.self_attn.attn") == (12, "model.layers.*.self_attn.attn")
