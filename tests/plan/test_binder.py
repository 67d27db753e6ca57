"""A binder gives what ``bind`` gives, whatever it was asked before."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from moving import make_ranks
from msgspec.structs import replace

from kvferry.layout import (
    ALL_TOKENS,
    CacheSpec,
    DType,
    Group,
    Holding,
    Layout,
    Paged,
    Parallel,
    Slot,
    Span,
    Stated,
    Tensor,
    Tokens,
    Window,
    attention,
)
from kvferry.plan import Block, Image, Pair, Plan, Request, Side, bind, reshard
from kvferry.plan.bind import Binding, Outline
from kvferry.plan.binder import MAX_KNOWN, Binder, Binders
from kvferry.plan.places import PageTable, contiguous_pools


def assert_same(one: Binding, other: Binding) -> None:
    for got, wanted in zip(one.descriptors(), other.descriptors(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def fragments(plan: Plan, pair: Pair, request: Request, length: int) -> list[Block]:
    """Everything that is owed, cut into stretches of that length."""
    return [
        replace(block, tokens=Span(first, min(first + length, block.tokens.end)))
        for block in plan.blocks(*pair, request)
        for first in range(block.tokens.first, block.tokens.end, length)
    ]


KIND: dict[str, Paged | Window | Slot] = {"paged": Paged(), "window": Window(23), "rows": Slot()}
TENSORS = (Tensor("k", DType.UINT8, 3), Tensor("v", DType.UINT8, 3))
HYBRID = CacheSpec(3, tuple(Group(name, kind, (0, 2), 2, TENSORS) for name, kind in KIND.items()))
SHARES = (Tokens(0, 13), Tokens(13, None))
CUT = Stated(
    tuple(
        tuple(
            Holding(name, Span(0, 3), Span(0, 2), ALL_TOKENS if name == "rows" else share)
            for name in KIND
        )
        for share in SHARES
    )
)
SHARDINGS: dict[str, Parallel | Stated] = {
    "tp1": Parallel(),
    "tp2": Parallel(tp=2),
    "pp2": Parallel(pp=2),
    "cp2": Parallel(cp=2),
    "cut": CUT,
}


@pytest.mark.parametrize("source", SHARDINGS)
@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("pages", [(4, 4), (4, 6), (1, 8)])
def test_fragments_of_many_lengths_in_any_order(
    source: str, target: str, pages: tuple[int, int]
) -> None:
    """One binder for each pair and kind of end, for requests and fragments of all sizes."""
    sides = [
        Layout(HYBRID, SHARDINGS[name], page_tokens=page)
        for name, page in zip((source, target), pages, strict=True)
    ]
    plan, chance, rng = reshard(*sides), random.Random(0), np.random.default_rng(0)
    binders: dict[tuple[Pair, int], Binder] = {}
    for request in (Request(40), Request(37, 5), Request(16), Request(40, 24)):
        ranks = [make_ranks(side, request.num_tokens, rng) for side in sides]
        for ours, theirs in itertools.product(*ranks):
            pair = Pair(ours.rank, theirs.rank)
            some = [b for n in (1, 3, 4, 7, 12) for b in fragments(plan, pair, request, n)]
            some += [replace(b, layers=b.layers.intersect(Span(0, 1))) for b in some[::3]]
            chance.shuffle(some)
            kinds: list[tuple[Side | Image, Side | Image]] = [
                (ours.side, theirs.side),
                (ours.side, Image()),
                (Image(), theirs.side),
            ]
            for kind, ends in enumerate(kinds):
                binder = binders.setdefault(
                    (pair, kind), Binder(plan, pair, *[end.pools for end in ends])
                )
                for blocks in ([block] for block in some[:40]):
                    wanted = bind(plan, pair, request, *ends, blocks)
                    assert_same(binder.bind(request, *ends, blocks), wanted)
                wanted = bind(plan, pair, request, *ends, some[:3])
                assert_same(binder.bind(request, *ends, some[:3]), wanted)


SPEC = attention(layers=2, kv_heads=2, head_dim=8)
PAIR = Pair(0, 0)
NUM_PAGES = 256


def plain_plan(page_tokens: int = 4) -> Plan:
    return reshard(*[Layout(SPEC, Parallel(), page_tokens=page_tokens)] * 2)


def test_what_was_worked_out_once_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more is kept than there is room for."""
    plan, request = plain_plan(), Request(4 * NUM_PAGES)
    pools = contiguous_pools(plan.target, 0, NUM_PAGES).map
    side = Side(pools, {SPEC.groups[0].name: PageTable(range(NUM_PAGES))})
    binder = Binder(plan, PAIR, None, pools)
    asked, sketch = list[Any](), binder._sketch

    def noted(*args: Any) -> Outline:
        asked.append(args)
        return sketch(*args)

    monkeypatch.setattr(binder, "_sketch", noted)
    for block in fragments(plan, PAIR, request, 16):
        binder.bind(request, Image(), side, [block])
    assert len(asked) == 1
    for length in range(1, 2 * MAX_KNOWN):
        binder.bind(request, Image(), side, fragments(plan, PAIR, request, length)[:1])
        assert len(binder._known) <= MAX_KNOWN


def test_every_pair_of_every_plan_has_a_binder_of_its_own() -> None:
    binders, one, other = Binders(), plain_plan(), plain_plan(8)
    known = binders.of(one, PAIR, None, None)
    assert binders.of(one, PAIR, None, None) is known
    assert binders.of(one, Pair(0, 1), None, None) is not known
    assert binders.of(other, PAIR, None, None).plan is other
