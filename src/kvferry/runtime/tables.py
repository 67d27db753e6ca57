"""Page tables as an engine gives them: page numbers in any order, chunk by chunk or at once.

Pure. What is wrong is said before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Holding, Layout
from kvferry.layout.spec import Group, Slot
from kvferry.plan.places import PageTable, PoolMap
from kvferry.plan.plan import Request
from kvferry.protocol.messages import MAX_PAGES, Table

# Pages of all groups that follow tokens, or group by group.
Pages = Sequence[int] | Mapping[str, Sequence[int]]
# The request's state row, in all slot groups or group by group.
Rows = int | Mapping[str, int]


class Shelf:
    """What one rank holds, as far as page tables are concerned."""

    def __init__(self, layout: Layout, rank: int, pools: PoolMap) -> None:
        held = layout.rank_holdings(rank)
        self._page_tokens = layout.page_tokens
        self._holdings: dict[str, Holding] = {}
        for holding in held:
            self._holdings.setdefault(holding.group, holding)
        groups = [layout.spec.group(name) for name in self._holdings]
        self._num_pages = {group.name: _num_pages(pools, group) for group in groups}
        self._slots = [group.name for group in groups if isinstance(group.kind, Slot)]
        self._paged = [group for group in groups if not isinstance(group.kind, Slot)]

    # ------------------------------------------------------------ all at once

    def tables(self, request: Request, pages: Pages, rows: Rows | None) -> tuple[Table, ...]:
        """The tables of a whole request, from the first page that it may touch on."""
        tables = []
        for group in self._paged:
            given = tuple(_pages_of(group.name, pages))
            first = self._first_page(group, request, len(given))
            self._demand_good(group.name, given)
            tables.append(Table(group.name, given, first))
        for name in self._slots:
            row = (_row_of(name, rows),)
            self._demand_good(name, row)
            tables.append(Table(name, row))
        return tuple(tables)

    def _first_page(self, group: Group, request: Request, num_given: int) -> int:
        """Pages are counted from the request's start, or from the first one that it needs."""
        everything = self._local_pages(group.name, Span(0, request.num_tokens))
        needed = self._local_pages(group.name, group.owed(request.num_tokens, request.prefix))
        if num_given >= everything.end:
            return 0
        if num_given == len(needed):
            return needed.first
        raise InputError(
            f"group {group.name!r} was given {num_given} pages; give all {everything.end} of the "
            f"request, or just the {len(needed)} that are to be filled"
        )

    # ------------------------------------------------------------ chunk by chunk

    def chunk(self, tokens: Span, pages: Pages) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Per group, the first page of a chunk and the pages that the chunk touches."""
        chunks = {}
        for group in self._paged:
            local = self._local_pages(group.name, tokens)
            given = tuple(_pages_of(group.name, pages))
            if len(given) != len(local):
                raise InputError(
                    f"tokens {tokens} touch {len(local)} pages of group {group.name!r}, "
                    f"and {len(given)} were given"
                )
            self._demand_good(group.name, given)
            chunks[group.name] = (local.first, given)
        return chunks

    def rows(self, rows: Rows | None) -> dict[str, int]:
        """The state row of each slot group."""
        found = {name: _row_of(name, rows) for name in self._slots}
        for name, row in found.items():
            self._demand_good(name, (row,))
        return found

    def _local_pages(self, group: str, tokens: Span) -> Span:
        """The pages that hold this rank's share of those tokens."""
        held = self._holdings[group].tokens
        mine = held.clip(tokens)
        first = held.local_index(mine.first)
        if not mine.num_tokens:
            return Span(first // self._page_tokens, first // self._page_tokens)
        last = held.local_index(mine.last)
        return Span(first // self._page_tokens, last // self._page_tokens + 1)

    def _demand_good(self, group: str, pages: Sequence[int]) -> None:
        most = self._num_pages[group]
        if pages and not (min(pages) >= 0 and max(pages) < most):
            raise InputError(
                f"group {group!r} names page {min(pages)} or {max(pages)}, "
                f"but its pool has pages 0..{most - 1}"
            )
        if len(pages) > MAX_PAGES:
            raise InputError(
                f"group {group!r} names {len(pages)} pages, and a room has {MAX_PAGES} at most; "
                f"use larger pages"
            )
        if len(set(pages)) != len(pages):
            raise InputError(f"group {group!r} names a page twice; each holds other tokens")


def _num_pages(pools: PoolMap, group: Group) -> int:
    return min(pools.of(group.name, tensor.name).num_pages for tensor in group.tensors)


def _pages_of(group: str, pages: Pages) -> Sequence[int]:
    if not isinstance(pages, Mapping):
        return _whole_numbers(group, pages)
    if group not in pages:
        raise InputError(f"group {group!r} has no pages; pass them as pages={{{group!r}: [...]}}")
    return _whole_numbers(group, pages[group])


def _whole_numbers(group: str, pages: Sequence[int]) -> list[int]:
    """Python integers, whatever the engine counts with."""
    try:
        # Arrays and tensors have this; their own integers can't travel.
        listed = pages.tolist() if hasattr(pages, "tolist") else pages
        return [page.__index__() for page in listed]
    except (AttributeError, TypeError):
        raise InputError(f"pages of group {group!r} are whole numbers in a flat list") from None


def _row_of(group: str, rows: Rows | None) -> int:
    row = rows.get(group) if isinstance(rows, Mapping) else rows
    if row is None:
        raise InputError(f"group {group!r} holds state; pass the request's row as states=...")
    return row.__index__()


class Reach:
    """How far a room's tables reach, as its engine has said; checked before anything is done."""

    def __init__(self) -> None:
        self._reach: dict[str, tuple[int, int]] = {}

    def extend(self, chunks: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Take in a chunk. Raises ``InputError``, and then nothing was taken in."""
        reach = dict(self._reach)
        for group, (first, pages) in chunks.items():
            start, end = reach.get(group, (first, first))
            if not pages:
                continue
            if not start <= first <= end:
                raise InputError(
                    f"group {group!r} skips pages; push its chunks in the order of their tokens"
                )
            reach[group] = start, max(end, first + len(pages))
        self._reach = reach


class GrowingTables:
    """A source's tables of one room, as its engine fills them."""

    def __init__(self) -> None:
        self._pages: dict[str, list[int]] = {}
        self._first: dict[str, int] = {}
        self._made: dict[str, PageTable] = {}

    def add(self, chunks: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Take in a chunk that fits. The page that two chunks share is named by both."""
        for group, (first, pages) in chunks.items():
            if not pages:
                continue
            known = self._pages.setdefault(group, [])
            start = self._first.setdefault(group, first)
            known[first - start : first - start + len(pages)] = pages
            self._made.pop(group, None)

    def add_rows(self, rows: Mapping[str, int]) -> None:
        """Take in the state rows."""
        for group, row in rows.items():
            self._pages[group], self._first[group] = [row], 0
            self._made.pop(group, None)

    def tables(self) -> dict[str, PageTable]:
        """As a binding takes them."""
        for group, pages in self._pages.items():
            if group not in self._made:
                self._made[group] = PageTable(pages, self._first[group])
        return dict(self._made)
