"""Pools filled from a logical cache, moved by bindings and read back.

The logical cache is an array per (group, tensor) of [layer, token, unit, byte]. A rank's share of
it is written here from the definition, in plain loops over tokens, independently of bindings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from oracle import owed_tokens, owned

from kvferry.layout import Layout, Order, Pattern, Span, Tokens
from kvferry.layout.layout import Sharding
from kvferry.layout.spec import CacheSpec, Group, StateRow, Window
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import (
    Binding,
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    StagingView,
    bind,
    check,
    contiguous_pools,
    reshard,
)

Bytes = NDArray[np.uint8]
Cache = dict[tuple[str, str], Bytes]
UNTOUCHED = 0xEE


def random_cache(spec: CacheSpec, num_tokens: int, rng: np.random.Generator) -> Cache:
    return {
        (group.name, tensor.name): rng.integers(
            0,
            256,
            (spec.num_layers, num_tokens, group.units, tensor.unit_bytes),
            dtype=np.uint8,
        )
        for group in spec.groups
        for tensor in group.tensors
    }


def every_nth(first: int, end: int | None, step: int) -> Tokens:
    """Return the positions ``first, first + step, ...`` below ``end``."""
    return Tokens(first, end, Pattern(step, (Span(first % step, first % step + 1),)))


def plan_of(spec: CacheSpec, source: Sharding, target: Sharding) -> Plan:
    """Return the verified plan between two shardings of one cache."""
    plan = reshard(Layout(spec, source), Layout(spec, target))
    check(plan)
    return plan


class Rank(NamedTuple):
    """One rank's memory and one request's pages in it."""

    layout: Layout
    rank: int
    side: PagedView
    regions: list[Bytes]

    def local_tokens(self, group: Group, num_tokens: int) -> list[int]:
        """Return the request's positions that this rank keeps, in its order."""
        if isinstance(group.kind, StateRow):
            return [num_tokens - 1] if num_tokens else []
        mine = owned(self.layout, self.rank, group, num_tokens).tokens
        return [int(t) for t in np.flatnonzero(mine)]

    def page_of(self, group: Group) -> int:
        """Return the entries of a page."""
        state = isinstance(group.kind, StateRow)
        return 1 if state else page_tokens(self.layout, group) // group.tokens_per_entry

    def view(self, group: Group, tensor: str, layer: int) -> NDArray[np.void]:
        """Return one layer of a tensor as [page, token, unit, element], for any order in memory."""
        placement = self.side.pools.of(group.name, tensor)
        (base,) = [b for b in placement.bases if b.layer == layer]
        index, its = next((i, t) for i, t in enumerate(group.tensors) if t.name == tensor)
        units = int(owned(self.layout, self.rank, group, 1).units.sum())
        page, elements = self.page_of(group), its.elements
        region = self.regions[base.region]
        if f"{group.name}.{tensor}" in self.layout.transposed:
            whole = region.view(f"V{its.dtype.num_bytes}").reshape(-1, units, elements, page)
            return whole.transpose(0, 3, 1, 2)
        first, row = 0, its.unit_bytes
        if group.name in self.layout.packed:
            row = group.unit_bytes
            first = sum(before.unit_bytes for before in group.tensors[:index])
        if self.layout.order is Order.NHD:
            rows = region.reshape(-1, page, units, row)
        else:
            rows = region.reshape(-1, units, page, row).swapaxes(1, 2)
        return rows[..., first : first + its.unit_bytes].view("V1")

    def write(
        self, cache: Cache, num_tokens: int, keep: Callable[[Group], NDArray[np.bool_]]
    ) -> None:
        """Write this rank's share of the cache into its pages, for tokens selected by ``keep``."""
        for group in self.layout.spec.groups:
            mine = owned(self.layout, self.rank, group, num_tokens)
            if group.name not in self.side.tables:
                continue
            table = self.side.tables[group.name]
            page = self.page_of(group)
            for local, token in enumerate(self.local_tokens(group, num_tokens)):
                index = local // page - table.first_page
                if not keep(group)[token] or index < 0:
                    continue
                for tensor in group.tensors:
                    for layer in np.flatnonzero(mine.layers):
                        view = self.view(group, tensor.name, int(layer))
                        row = cache[group.name, tensor.name][layer, token, mine.units]
                        view[table.pages[index], local % page] = row.view(view.dtype)


def page_tokens(layout: Layout, group: Group) -> int:
    """Return the tokens of a page of a group, from the layout's fields alone."""
    return dict(layout.group_pages).get(group.name, layout.page_tokens)


def make_ranks(
    layout: Layout, num_tokens: int, rng: np.random.Generator, *, drop_pages: bool = False
) -> list[Rank]:
    """Return every rank, with pages in random order and memory filled with a mark."""
    ranks = []
    for rank in range(layout.num_ranks):
        sizes = {group.name: page_tokens(layout, group) for group in layout.spec.groups}
        num_pages = 2 * -(-num_tokens // min(sizes.values())) + 3
        pools = contiguous_pools(layout, rank, num_pages, num_rows=4)
        tables = {}
        for group in layout.spec.groups:
            if isinstance(group.kind, StateRow):
                tables[group.name] = PageTable(rng.permutation(4)[:1])
                continue
            first, size = 0, sizes[group.name]
            if drop_pages and isinstance(group.kind, Window):
                kept = max(0, num_tokens - group.kind.num_tokens)
                held = owned(layout, rank, group, num_tokens).tokens
                first = int(held[:kept].sum()) // (size // group.tokens_per_entry)
            pages = rng.permutation(num_pages)[: max(0, -(-num_tokens // size) - first)]
            tables[group.name] = PageTable(pages, first)
        regions = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in pools.region_bytes]
        ranks.append(Rank(layout, rank, PagedView(pools.map, tables), regions))
    return ranks


def filled(layout: Layout, cache: Cache, request: Request, rng: np.random.Generator) -> list[Rank]:
    """Return the ranks of a source that has computed the whole request."""
    ranks = make_ranks(layout, request.num_tokens, rng)
    for rank in ranks:
        rank.write(cache, request.num_tokens, lambda _: np.ones(request.num_tokens, dtype=bool))
    return ranks


def expected(targets: list[Rank], cache: Cache, request: Request) -> list[list[Bytes]]:
    """Return the targets' memory after a transfer: expected bytes in place, the rest untouched."""
    result = []
    for rank in targets:
        copy = rank._replace(regions=[region.copy() for region in rank.regions])
        copy.write(cache, request.num_tokens, lambda group: owed_tokens(group, request))
        result.append(copy.regions)
    return result


Mover = Callable[[Plan, RankPair, Request, Rank, Rank], None]


def by_slices(plan: Plan, pair: RankPair, request: Request, source: Rank, target: Rank) -> None:
    _copy(bind(plan, pair, request, source.side, target.side), source.regions, target.regions)


def by_runs(plan: Plan, pair: RankPair, request: Request, source: Rank, target: Rank) -> None:
    whole = bind(plan, pair, request, source.side, target.side)
    merged = whole.merged()
    assert merged.num_bytes == whole.num_bytes
    assert merged.num_pieces <= whole.num_pieces
    _copy(merged, source.regions, target.regions)


def by_staging(plan: Plan, pair: RankPair, request: Request, source: Rank, target: Rank) -> None:
    gather = bind(plan, pair, request, source.side, StagingView())
    scatter = bind(plan, pair, request, StagingView(), target.side)
    assert gather.num_bytes == scatter.num_bytes
    slot = np.full(gather.num_bytes, UNTOUCHED, dtype=np.uint8)
    _copy(gather, source.regions, [slot])
    _copy(scatter, [slot], target.regions)


def _copy(binding: Binding, sources: list[Bytes], targets: list[Bytes]) -> None:
    pieces = binding.descriptors()
    assert len(pieces.length) == binding.num_pieces
    assert int(pieces.length.sum()) == binding.num_bytes
    copy_pieces(pieces, sources, targets)


MOVERS: dict[str, Mover] = {"slices": by_slices, "runs": by_runs, "staged": by_staging}


def move_all(
    plan: Plan, request: Request, sources: list[Rank], targets: list[Rank], mover: Mover
) -> None:
    for source in sources:
        for target in targets:
            mover(plan, RankPair(source.rank, target.rank), request, source, target)
