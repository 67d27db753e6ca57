"""What one side checks before it believes the other.

A source: the pools at the handshake, the pages of an offer. A target: what a Close says was
computed. Pure. Each returns what is wrong, or None.
"""

from __future__ import annotations

from kvferry.errors import InputError
from kvferry.layout.layout import Holding, Layout
from kvferry.layout.spec import Group, Slot
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.messages import Close, Hello, Offer, Table
from kvferry.protocol.outcome import Failure, FailureCode


def pools_problem(layout: Layout, rank: int, pools: PoolMap) -> str | None:
    """Whether the pools have memory for everything that the layout says the rank holds."""
    if rank >= layout.num_ranks:
        return f"rank {rank} is not among the layout's {layout.num_ranks}"
    for holding in layout.rank_holdings(rank):
        group = layout.spec.group(holding.group)
        for tensor in group.tensors:
            try:
                pools.of(group.name, tensor.name).bases_of(group.layers_in(holding.layers))
            except InputError as error:
                return str(error)
    return None


def offer_problem(
    plan: Plan, hello: Hello, target: int, offer: Offer, owed: tuple[Block, ...]
) -> str | None:
    """Whether the offered pages can take what is owed."""
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


def close_problem(close: Close, num_tokens: int, digest: bytes) -> Failure | None:
    """Whether a source has computed something else than what was asked for here.

    Silence fits silence alone: what only one side vouches for is not proven.
    """
    if close.num_tokens != num_tokens:
        text = f"prefill has {close.num_tokens} tokens, decode {num_tokens}"
        return Failure.of(FailureCode.TOKENS_DIFFER, text)
    if close.digest == digest:
        return None
    if not close.digest or not digest:
        silent = "prefill" if digest else "decode"
        text = f"{silent} gave no digest of its request; give one on both sides, or on neither"
    else:
        text = (
            "prefill has computed another request than decode asks for, so nothing of it is "
            "used; give each request a room id of its own"
        )
    return Failure.of(FailureCode.CONTENT_DIFFERS, text)


def _table_problem(
    plan: Plan, hello: Hello, target: int, group: Group, block: Block, table: Table
) -> str | None:
    num_pages = min(hello.pools.of(group.name, t.name).num_pages for t in group.tensors)
    if any(page >= num_pages for page in table.pages):
        return f"names page {max(table.pages)}, but its pool has {num_pages}"
    if len(set(table.pages)) != len(table.pages):
        return "names a page twice"
    first, last = _local_pages(plan.target, group, _holding(plan, target, group), block)
    if first < table.first_page or last >= table.first_page + len(table.pages):
        return f"needs pages {first}..{last} of the request, and got {len(table.pages)}"
    return None


def _holding(plan: Plan, target: int, group: Group) -> Holding:
    return next(held for held in plan.wanted[target] if held.group == group.name)


def _local_pages(layout: Layout, group: Group, held: Holding, block: Block) -> tuple[int, int]:
    """The first and last page of the request that the block's tokens touch at the target."""
    if isinstance(group.kind, Slot):
        return 0, 0
    mine = held.tokens.clip(block.tokens)
    first = held.tokens.local_index(mine.first)
    last = first + max(0, mine.num_tokens - 1)
    return first // layout.page_tokens, last // layout.page_tokens
