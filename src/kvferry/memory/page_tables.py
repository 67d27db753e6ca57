"""Page tables as an engine gives them: page numbers in any order, chunk by chunk or at once.

Pure. What is wrong is said before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.pages import local_pages
from kvferry.layout.spec import Group, StateRow, Window
from kvferry.plan.places import PageTable, PoolMap
from kvferry.plan.plan import Request
from kvferry.protocol.messages import MAX_PAGES, PageTableMessage

# Pages of all groups that follow tokens, or group by group. In a push None stands for a page that a
# window has dropped.
Pages = Sequence[int | None] | Mapping[str, Sequence[int | None]]
# The request's state row, in all slot groups or group by group.
Rows = int | Mapping[str, int]
# Per group, the place of a chunk's first page in the request, and the pages.
Chunk = Mapping[str, tuple[int, tuple[int, ...]]]
# Where no page was named yet, or a window's page was dropped. No binding takes it for one.
UNKNOWN = -1


class PageTableValidator:
    """What one rank holds, as far as page tables are concerned."""

    def __init__(self, layout: Layout, rank: int, pools: PoolMap) -> None:
        held = layout.rank_shards(rank)
        self.num_layers = layout.spec.num_layers
        self._layout = layout
        self._shards: dict[str, Shard] = {}
        for shard in held:
            self._shards.setdefault(shard.group, shard)
        groups = [layout.spec.group(name) for name in self._shards]
        self._layers = {
            group.name: [
                n for h in held if h.group == group.name for n in group.layers_in(h.layers)
            ]
            for group in groups
        }
        self._num_pages = {group.name: _num_pages(pools, group) for group in groups}
        self._slots = [group.name for group in groups if isinstance(group.kind, StateRow)]
        self._paged = [group for group in groups if not isinstance(group.kind, StateRow)]

    # ------------------------------------------------------------ all at once

    def tables(
        self, request: Request, pages: Pages, rows: Rows | None
    ) -> tuple[PageTableMessage, ...]:
        """The tables of a whole request, from the first page that it may touch on."""
        tables = []
        for group in self._paged:
            given = tuple(page for page in _pages_of(group.name, pages) if page is not None)
            first = self._first_page(group, request, len(given))
            self._demand_good(group.name, given)
            tables.append(PageTableMessage(group.name, given, first))
        for name in self._slots:
            row = (_row_of(name, rows),)
            self._demand_good(name, row)
            tables.append(PageTableMessage(name, row))
        return tuple(tables)

    def _first_page(self, group: Group, request: Request, num_given: int) -> int:
        """Pages are counted from the request's start, or from the first one that it needs."""
        everything = self._local_pages(group, Span(0, request.num_tokens))
        needed = self._local_pages(group, group.owed(request.num_tokens, request.prefix))
        if num_given >= everything.end:
            return 0
        if num_given == len(needed):
            return needed.first
        raise InputError(
            f"group {group.name!r} was given {num_given} pages; give all {everything.end} of the "
            f"request, or just the {len(needed)} that are to be filled"
        )

    # ------------------------------------------------------------ chunk by chunk

    def chunk(
        self,
        tokens: Span,
        pages: Pages,
        layers: Span | None = None,
        known: Chunk | None = None,
    ) -> Chunk:
        """The pages that a chunk touches, in groups of which this rank holds such layers.

        What is as in ``known`` was found to be good, and is given back as the same object.
        """
        chunks: dict[str, tuple[int, tuple[int, ...]]] = {}
        for group in self._paged:
            if not self._has(group.name, layers):
                continue
            local = self._local_pages(group, tokens)
            gaps = isinstance(group.kind, Window)
            named: list[Any] = _pages_of(group.name, pages, gaps=gaps)
            given = tuple([UNKNOWN if p is None else p for p in named] if gaps else named)
            before = (known or {}).get(group.name)
            if before == (local.first, given) and len(given) == len(local):
                chunks[group.name] = before
                continue
            self._demand_good(group.name, [p for p in named if p is not None] if gaps else named)
            if len(given) != len(local):
                raise InputError(
                    f"tokens {tokens} touch {len(local)} pages of group {group.name!r}, "
                    f"and {len(given)} were given"
                )
            chunks[group.name] = (local.first, given)
        return chunks

    def rows(
        self, rows: Rows | None, layers: Span | None = None, known: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The state row of each slot group of which this rank holds such layers.

        ``known`` are those that were named before.
        """
        known = known or {}
        mine = [name for name in self._slots if self._has(name, layers)]
        found = {name: _row_of(name, rows, known.get(name)) for name in mine}
        for name, row in found.items():
            self._demand_good(name, (row,))
            if row != known.get(name, row):
                raise InputError(
                    f"group {name!r} was given the row {row}, and {known[name]} before; "
                    f"a request has one row in each group"
                )
        return found

    def _has(self, group: str, layers: Span | None) -> bool:
        return layers is None or any(layer in layers for layer in self._layers[group])

    def _local_pages(self, group: Group, tokens: Span) -> Span:
        """The pages that hold this rank's share of those tokens."""
        return local_pages(self._layout, group, self._shards[group.name], tokens)

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


def _pages_of(group: str, pages: Pages, *, gaps: bool = False) -> list[int | None]:
    """Of one group. Where there may be no ``gaps``, every page has a number."""
    if not isinstance(pages, Mapping):
        return _numbers(group, pages, gaps=gaps)
    if group not in pages:
        raise InputError(f"group {group!r} has no pages; pass them as pages={{{group!r}: [...]}}")
    return _numbers(group, pages[group], gaps=gaps)


def _numbers(group: str, pages: Sequence[int | None], *, gaps: bool) -> list[int | None]:
    """Python integers, whatever the engine counts with."""
    try:
        # Arrays and tensors have this; their own integers can't travel.
        listed: Sequence[Any] = pages.tolist() if hasattr(pages, "tolist") else pages
        if not gaps:
            return list(map(index, listed))
        return [None if page is None else page.__index__() for page in listed]
    except (AttributeError, TypeError):
        raise InputError(f"pages of group {group!r} are whole numbers in a flat list") from None


def _row_of(group: str, rows: Rows | None, known: int | None = None) -> int:
    row = rows.get(group) if isinstance(rows, Mapping) else rows
    row = known if row is None else row
    if row is None:
        raise InputError(f"group {group!r} holds state; pass the request's row as states=...")
    return row.__index__()


class KnownPages:
    """The pages of one group of one room, as far as they were named, in any order."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.pages: list[int] = []

    @property
    def num_pages(self) -> int:
        """Those that were named."""
        return len(self.pages) - self.pages.count(UNKNOWN)

    def takes(self, first: int, pages: Sequence[int]) -> bool:
        """Whether no other page was named before for one of these places."""
        skip = first - self.first
        known = self.pages[max(0, skip) : max(0, skip + len(pages))]
        given = pages[max(0, -skip) :]
        return all(one in (UNKNOWN, two) for one, two in zip(known, given, strict=False))

    def put(self, first: int, pages: Sequence[int]) -> bool:
        """Take in pages from that place on; whether one of them is new."""
        if first < self.first:
            self.pages[:0] = [UNKNOWN] * (self.first - first)
            self.first = first
        at = first - self.first
        self.pages += [UNKNOWN] * (at - len(self.pages))
        if self.pages[at : at + len(pages)] == list(pages):
            return False
        self.pages[at : at + len(pages)] = pages
        return True


class TableReach:
    """What an engine has said of a room's pages; checked before anything is done."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPages] = {}
        # What was named last of each group, and comes again layer by layer.
        self.latest: Chunk = {}

    def extend(self, chunk: Chunk) -> None:
        """Take in a chunk. Raises ``InputError``, and then nothing was taken in."""
        new = {group: its for group, its in chunk.items() if its is not self.latest.get(group)}
        for group, (first, pages) in new.items():
            known = self._known.get(group)
            if known is None or not pages:
                continue
            if not known.takes(first, pages):
                raise InputError(
                    f"group {group!r} names other pages for tokens that had some before; "
                    f"all layers of a group have the same"
                )
            far = max(known.first + len(known.pages), first + len(pages))
            if far - min(known.first, first) > MAX_PAGES:
                raise InputError(f"group {group!r} names pages too far apart; push nearer tokens")
        for group, (first, pages) in new.items():
            if pages:
                self._known.setdefault(group, KnownPages(first)).put(first, pages)
        self.latest = {**self.latest, **new}


class PageTableBuilder:
    """A source's tables of one room, as its engine fills them."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPages] = {}
        self._made: dict[str, PageTable] = {}

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk that fits. The page that two chunks share is named by both."""
        for group, (first, pages) in chunk.items():
            if not pages:
                continue
            known = self._known.setdefault(group, KnownPages(first))
            # What was bound before is found again by its table, so that one must stay.
            if known.put(first, pages):
                self._made.pop(group, None)

    def add_rows(self, rows: Mapping[str, int]) -> None:
        """Take in the state rows."""
        self.add({group: (0, (row,)) for group, row in rows.items()})

    @property
    def num_pages(self) -> int:
        """Of the group that has most."""
        return max((known.num_pages for known in self._known.values()), default=0)

    def tables(self) -> dict[str, PageTable]:
        """As a binding takes them."""
        for group, known in self._known.items():
            if group not in self._made:
                self._made[group] = PageTable(known.pages, known.first)
        return dict(self._made)
