"""Validation of the memory that a target's Hello and Offer describe."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout
from kvferry.layout.pages import local_pages
from kvferry.layout.spec import Group, Tensor
from kvferry.plan.places import Base, Placement, PoolMap
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.messages import Hello, Offer, PageTableMessage


def pools_problem(layout: Layout, rank: int, pools: PoolMap) -> str | None:
    """Return what the pools lack of the memory that the layout gives to ``rank``."""
    if rank >= layout.num_ranks:
        return f"rank {rank} is not among the layout's {layout.num_ranks} ranks"
    for shard in layout.rank_shards(rank):
        group = layout.spec.group(shard.group)
        layers = group.layers_in(shard.layers)
        try:
            placed = [(tensor, pools.of(group.name, tensor.name)) for tensor in group.tensors]
            bases = [placement.bases_of(layers) for _, placement in placed]
        except InputError as error:
            return str(error)
        for tensor, placement in placed:
            is_transposed = layout.is_transposed(group.name, tensor.name)
            if is_transposed is (placement.element_stride is None):
                return f"the placement and the layout of {group.name}.{tensor.name} differ in order"
        if group.name in layout.packed and not _is_packed(placed, bases):
            return f"the tensors of group {group.name!r} are packed, but lie apart"
    return None


def _is_packed(
    placed: Sequence[tuple[Tensor, Placement]], bases: Sequence[tuple[Base, ...]]
) -> bool:
    """Return whether tensors with these bases follow each other in every unit."""
    if len({(p.page_stride, p.token_stride, p.unit_stride, p.num_pages) for _, p in placed}) > 1:
        return False
    return all(
        (after.layer, after.region, after.offset)
        == (before.layer, before.region, before.offset + tensor.unit_bytes)
        for (tensor, _), *pair in zip(placed, bases, bases[1:], strict=False)
        for before, after in zip(*pair, strict=True)
    )


def offer_problem(
    plan: Plan, hello: Hello, target: int, offer: Offer, owed: tuple[Block, ...]
) -> str | None:
    """Return why the offered pages can't hold the blocks that are owed."""
    tables = {table.group: table for table in offer.tables}
    if len(tables) != len(offer.tables):
        return "a group has two page tables"
    for block in owed:
        if block.group not in tables:
            return f"group {block.group!r} has no page table"
        group = plan.spec.group(block.group)
        problem = _table_problem(plan, hello, target, group, block, tables[block.group])
        if problem:
            return f"group {block.group!r} {problem}"
    return None


def _table_problem(
    plan: Plan, hello: Hello, target: int, group: Group, block: Block, table: PageTableMessage
) -> str | None:
    num_pages = min(hello.pools.of(group.name, t.name).num_pages for t in group.tensors)
    if max(table.pages, default=-1) >= num_pages:
        return f"names page {max(table.pages)}, but its pool has {num_pages} pages"
    if len(set(table.pages)) != len(table.pages):
        return "names a page twice"
    held = next(held for held in plan.wanted[target] if held.group == group.name)
    needed = local_pages(plan.target, group, held, block.tokens)
    if not Span(table.first_page, table.first_page + len(table.pages)).covers(needed):
        named = f"{needed.first}..{needed.end - 1}"
        return f"needs pages {named} of the request, and got {len(table.pages)}"
    return None
