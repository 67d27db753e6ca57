"""Tests of checksums against their definition, computed word by word from the logical cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from checksums import cell_value
from hypothesis import given, settings
from moving import MOVERS, Bytes, Cache, filled, make_ranks, move_all, random_cache
from oracle import owed_tokens, owned
from summing import FULL, sums_of
from transfers import transfers

from kvferry.errors import InputError
from kvferry.layout import DType, Layout, Order, Parallel, attention
from kvferry.layout.spec import CacheSpec, Group, Paged, StateRow, Tensor
from kvferry.memory.checksum.cpu import warm_up
from kvferry.plan import PageTable, Plan, RankPair, Request, reshard
from kvferry.plan.content import (
    ALL_CELLS,
    ProofRequest,
    cells_between,
    describe_cells,
    num_chosen,
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


def by_cell(plan: Plan, pair: RankPair, request: Request, sums: bytes) -> Counter[tuple[str, int]]:
    """Return the sum of each group and layer, over spans of tokens."""
    found: Counter[tuple[str, int]] = Counter()
    values = iter(np.frombuffer(sums, "<u8").tolist())
    for one in cells_between(plan, pair, request, FULL):
        for layer in one.layers:
            for _ in one.spans:
                found[one.block.group, layer] += next(values)
    assert next(values, None) is None
    return found


def true_sums(
    layout: Layout, rank: int, request: Request, cache: Cache
) -> Counter[tuple[str, int]]:
    """Return the sum of each group and layer of what a target is owed, from the definition."""
    found: Counter[tuple[str, int]] = Counter()
    for index, group in enumerate(layout.spec.groups):
        mine = owned(layout, rank, group, request.num_tokens)
        owed = owed_tokens(group, request) & mine.tokens
        for layer in np.flatnonzero(mine.layers).tolist():
            for place, tensor in enumerate(group.tensors):
                content = cache[group.name, tensor.name][layer]
                for token in np.flatnonzero(owed).tolist():
                    for unit in np.flatnonzero(mine.units).tolist():
                        found[group.name, layer] += cell_value(
                            FULL.seed,
                            (index, place, layer),
                            token,
                            unit,
                            content[token, unit].tobytes(),
                        )
    return found


def modulo(sums: Counter[tuple[str, int]]) -> dict[tuple[str, int], int]:
    return {key: value % 2**64 for key, value in sums.items()}


@given(transfers())
@settings(max_examples=60, deadline=None)
def test_both_ends_have_the_sums_of_the_definition(
    transfer: tuple[Plan, Request, int, str],
) -> None:
    plan, request, seed, mover = transfer
    rng = np.random.default_rng(seed)
    cache = random_cache(plan.spec, request.num_tokens, rng)
    sources = filled(plan.source, cache, request, rng)
    targets = make_ranks(plan.target, request.num_tokens, rng)
    move_all(plan, request, sources, targets, MOVERS[mover])
    for rank in targets:
        total: Counter[tuple[str, int]] = Counter()
        for one in plan.sources_of(rank.rank):
            pair = RankPair(one, rank.rank)
            sums = sums_of(plan, pair, request, sources[one])
            assert sums == sums_of(plan, pair, request, rank)
            total.update(by_cell(plan, pair, request, sums))
        true = modulo(true_sums(plan.target, rank.rank, request, cache))
        assert {key: value for key, value in modulo(total).items() if value} == true


HYBRID = CacheSpec(
    4,
    (
        Group(
            "kv",
            Paged(),
            (0, 1, 2),
            4,
            (Tensor("k", DType.BFLOAT16, 36), Tensor("v", DType.BFLOAT16, 36)),
        ),
        Group("state", StateRow(), (3,), 4, (Tensor("s", DType.FLOAT32, 1500),)),
    ),
)
REQUEST = Request(700, 130)


class Transferred:
    """One source and one target of a hybrid cache with equal content in different pages."""

    def __init__(self, source: Layout, target: Layout) -> None:
        rng = np.random.default_rng(5)
        self.plan = reshard(source, target)
        cache = random_cache(HYBRID, REQUEST.num_tokens, rng)
        self.sources = filled(source, cache, REQUEST, rng)
        self.targets = make_ranks(target, REQUEST.num_tokens, rng)
        move_all(self.plan, REQUEST, self.sources, self.targets, MOVERS["slices"])

    def wrong(self, proof: ProofRequest = FULL) -> str:
        """Return the cells in which the last target and its sources differ."""
        target = self.targets[-1]
        found = []
        for one in self.plan.sources_of(target.rank):
            pair = RankPair(one, target.rank)
            cells = cells_between(self.plan, pair, REQUEST, proof)
            sent, got = (
                np.frombuffer(sums_of(self.plan, pair, REQUEST, rank, proof), "<u8")
                for rank in (self.sources[one], target)
            )
            found.append(describe_cells(cells, sent != got))
        return "; ".join(filter(None, found))

    def view(self, group: str, tensor: str, layer: int) -> Bytes:
        """Return the last target's pages as [page, token, unit, byte]."""
        elements = self.targets[-1].view(HYBRID.group(group), tensor, layer)
        return elements.view(np.uint8)

    def page(self, group: str, index: int) -> int:
        """Return a page of the last target's table."""
        return int(self.targets[-1].side.tables[group].pages[index])


def flip_byte(it: Transferred) -> None:
    it.view("kv", "v", 1)[it.page("kv", 40), 3, 0, 71] ^= 1


def drop_state(it: Transferred) -> None:
    it.view("state", "s", 3)[it.page("state", 0)] = 0


def swap_layers(it: Transferred) -> None:
    one, two = it.view("kv", "k", 0), it.view("kv", "k", 1)
    one[:], two[:] = two.copy(), one.copy()


def swap_kv(it: Transferred) -> None:
    one, two = it.view("kv", "k", 2), it.view("kv", "v", 2)
    one[:], two[:] = two.copy(), one.copy()


def stale_page(it: Transferred) -> None:
    pages = it.view("kv", "k", 0)
    pages[it.page("kv", 20)] = pages[it.page("kv", 19)]


def short_write(it: Transferred) -> None:
    it.view("state", "s", 3)[it.page("state", 0), 0, -1, -8:] = 0


def swap_words(it: Transferred) -> None:
    unit = it.view("kv", "k", 0)[it.page("kv", 30), 0, 0].view(np.uint64)
    unit[[0, 8]] = unit[[8, 0]]


Fault = Callable[[Transferred], None]
FAULTS: dict[Fault, str] = {
    flip_byte: "group 'kv' layers 1 tokens 512..699",
    drop_state: "group 'state' layers 3 tokens 699..699",
    swap_layers: "group 'kv' layers 0..1 tokens 130..699",
    swap_kv: "group 'kv' layers 2 tokens 130..699",
    stale_page: "group 'kv' layers 0 tokens 256..511",
    short_write: "group 'state' layers 3 tokens 699..699",
    swap_words: "group 'kv' layers 0 tokens 256..511",
}
LAYOUTS = {
    "tp": (Layout(HYBRID, Parallel(tp=4)), Layout(HYBRID, Parallel(tp=1))),
    "hnd": (Layout(HYBRID, Parallel(tp=2), order=Order.HND), Layout(HYBRID, Parallel(tp=4))),
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_changes_the_sums_of_its_cells_only(
    fault: Fault, layouts: tuple[Layout, Layout]
) -> None:
    it = Transferred(*layouts)
    assert it.wrong() == ""
    fault(it)
    named = set(it.wrong().split("; "))
    # Without duplicates: several sources may have sent a part of the same cells.
    assert named == {FAULTS[fault]}


def test_a_share_of_the_cells_is_chosen_by_the_seed() -> None:
    it = Transferred(*LAYOUTS["tp"])
    pair = RankPair(0, 0)
    counts = [
        num_chosen(cells_between(it.plan, pair, REQUEST, ProofRequest(seed, ALL_CELLS // 4)))
        for seed in range(2000)
    ]
    total = num_chosen(cells_between(it.plan, pair, REQUEST, FULL))
    assert total == 10
    assert min(counts) == 0
    assert np.mean(counts) == pytest.approx(total / 4, rel=0.1)


def test_a_sampled_proof_has_the_sums_of_its_cells() -> None:
    it = Transferred(*LAYOUTS["tp"])
    stale_page(it)
    texts = [it.wrong(ProofRequest(seed, ALL_CELLS // 4)) for seed in range(20)]
    seen = {part for text in texts for part in text.split("; ")}
    assert seen == {"", FAULTS[stale_page]}


def test_many_tokens_make_longer_spans_and_bounded_sums() -> None:
    layout = Layout(attention(layers=96, kv_heads=8, head_dim=128))
    plan, pair = reshard(layout, layout), RankPair(0, 0)
    (cells,) = cells_between(plan, pair, Request(1 << 20, 1000), FULL)
    assert 2048 < cells.chosen.size <= 4096
    assert cells.spans[0].first == 1000
    assert [span.end % len(cells.spans[1]) for span in cells.spans] == [0] * len(cells.spans)


def test_an_unknown_page_is_refused() -> None:
    it = Transferred(*LAYOUTS["tp"])
    rank = it.sources[0]
    known = dict(rank.side.tables)
    for pages in (known["kv"].pages[:-1], [-1] * 44, [10**6] * 44):
        rank.side.tables["kv"] = PageTable(pages)
        with pytest.raises(InputError, match="group 'kv'"):
            sums_of(it.plan, RankPair(0, 0), REQUEST, rank)
