"""Validation of offers and pools."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvferry.ids import Generation
from kvferry.layout import CacheSpec, DType, Layout, Paged, Parallel, StateRow
from kvferry.layout.spec import Group, Tensor, Window
from kvferry.plan import PoolMap, Request, contiguous_pools, reshard
from kvferry.protocol.checks import offer_problem, pools_problem
from kvferry.protocol.messages import Hello, Offer, PageTableMessage

K = Tensor("k", DType.UINT8, 2)
SPEC = CacheSpec(
    2,
    (
        Group("full", Paged(), (0, 1), 2, (K, Tensor("v", DType.UINT8, 2))),
        Group("near", Window(6), (1,), 2, (K,)),
        Group("state", StateRow(), (0,), 2, (K,)),
    ),
)
LAYOUT = Layout(SPEC, Parallel(tp=2), page_tokens=4)
PLAN = reshard(Layout(SPEC), LAYOUT)
POOLS = contiguous_pools(LAYOUT, 1, num_pages=8, num_rows=2).map
HELLO = Hello("m", LAYOUT, POOLS)
FULL, NEAR, STATE = (
    PageTableMessage("full", (7, 0, 3, 5)),
    PageTableMessage("near", (4, 2), 2),
    PageTableMessage("state", (1,)),
)


def problem(*tables: PageTableMessage, prefix: int = 0, tokens: int = 16) -> str | None:
    request = Request(tokens, prefix)
    offer = Offer("r", Generation(1), request, tables, 1.0)
    return offer_problem(PLAN, HELLO, 1, offer, PLAN.blocks(0, 1, request))


def test_valid_offers() -> None:
    assert problem(FULL, NEAR, STATE) is None
    assert problem(replace(FULL, pages=(3, 5), first_page=2), NEAR, STATE, prefix=8) is None
    assert problem(prefix=16) is None, "nothing is owed, so no page is needed"
    assert problem(FULL, NEAR, STATE, PageTableMessage("unknown", (1,))) is None, (
        "nobody asks for it"
    )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ((FULL, FULL, NEAR, STATE), "two page tables"),
        ((FULL, NEAR), "'state' has no page table"),
        ((NEAR, STATE), "'full' has no page table"),
        ((replace(FULL, pages=(7, 0, 3, 8)), NEAR, STATE), "names page 8, but its pool has 8"),
        ((FULL, NEAR, PageTableMessage("state", (2,))), "names page 2, but its pool has 2"),
        ((replace(FULL, pages=(7, 0, 3, 7)), NEAR, STATE), "names a page twice"),
        ((replace(FULL, pages=(7, 0, 3)), NEAR, STATE), "needs pages 0..3"),
        ((replace(FULL, pages=()), NEAR, STATE), "needs pages 0..3"),
        ((replace(FULL, first_page=1), NEAR, STATE), "needs pages 0..3"),
        ((FULL, replace(NEAR, first_page=3), STATE), "needs pages 2..3"),
        ((FULL, replace(NEAR, pages=(4,)), STATE), "needs pages 2..3"),
        ((FULL, NEAR, PageTableMessage("state", ())), "needs pages 0..0"),
        ((FULL, NEAR, PageTableMessage("state", (1,), 1)), "needs pages 0..0"),
    ],
)
def test_invalid_offers(tables: tuple[PageTableMessage, ...], words: str) -> None:
    assert words in (problem(*tables) or "")


def test_valid_pools() -> None:
    for rank in (0, 1):
        assert pools_problem(LAYOUT, rank, POOLS) is None


def without(group: str, tensor: str, layer: int | None = None) -> PoolMap:
    kept = []
    for placement in POOLS.placements:
        if (placement.group, placement.tensor) == (group, tensor):
            if layer is None:
                continue
            bases = tuple(base for base in placement.bases if base.layer != layer)
            kept.append(replace(placement, bases=bases))
        else:
            kept.append(placement)
    return PoolMap(tuple(kept))


@pytest.mark.parametrize(
    ("rank", "pools", "words"),
    [
        (2, POOLS, "rank 2 is not among the layout's 2"),
        (1, PoolMap(()), "full.k has no memory"),
        (1, without("full", "v"), "full.v has no memory"),
        (1, without("state", "k"), "state.k has no memory"),
        (1, without("full", "k", layer=1), "no memory for layer"),
    ],
)
def test_invalid_pools(rank: int, pools: PoolMap, words: str) -> None:
    assert words in (pools_problem(LAYOUT, rank, pools) or "")
