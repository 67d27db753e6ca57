"""Page tables as an engine gives them: at once, or chunk by chunk in any order.

The engine's page numbers are validated here, before anything is sent.
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

# Pages of all groups that follow tokens, if their pages are of one size, or by group. In a push,
# None is a page that a window has dropped.
Pages = Sequence[int | None] | Mapping[str, Sequence[int | None]]
# The request's state row, in all state groups or by group.
Rows = int | Mapping[str, int]
# By group, the index in the request of a chunk's first page, and the pages.
Chunk = Mapping[str, tuple[int, tuple[int, ...]]]
# An entry whose page is not known yet, or was dropped by a window. ``bind`` refuses it.
UNKNOWN = -1


class PageTableValidator:
    """Validates one rank's page tables and state rows against its layout and pools."""

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
        self._state_groups = [group.name for group in groups if isinstance(group.kind, StateRow)]
        self._token_groups = [group for group in groups if not isinstance(group.kind, StateRow)]
        self._page_sizes = {
            group.name: layout.tokens_per_page(group) for group in self._token_groups
        }
        self._needs_names = len({*self._page_sizes.values()}) > 1

    # ------------------------------------------------------------ all at once

    def tables(
        self, request: Request, pages: Pages, rows: Rows | None
    ) -> tuple[PageTableMessage, ...]:
        """Return the tables of a whole request, to be sent to a source."""
        self._check_named(pages)
        tables = []
        for group in self._token_groups:
            given = tuple(page for page in _pages_of(group.name, pages) if page is not None)
            first = self._first_page(group, request, len(given))
            self._check_pages(group.name, given)
            tables.append(PageTableMessage(group.name, given, first))
        for name in self._state_groups:
            row = (_row_of(name, rows),)
            self._check_pages(name, row)
            tables.append(PageTableMessage(name, row))
        return tuple(tables)

    def _first_page(self, group: Group, request: Request, num_given: int) -> int:
        """Return the index of the first given page: 0, or the first page to be filled."""
        tokens, owed = Span(0, request.num_tokens), group.owed(request.num_tokens, request.prefix)
        everything = self._local_pages(group, tokens)
        needed = everything if owed == tokens else self._local_pages(group, owed)
        if num_given >= everything.end:
            return 0
        if num_given == len(needed):
            return needed.first
        raise InputError(
            f"group {group.name!r} was given {num_given} pages; give all {everything.end} of the "
            f"request, or only the {len(needed)} to be filled"
        )

    # ------------------------------------------------------------ chunk by chunk

    def chunk(
        self,
        tokens: Span,
        pages: Pages,
        layers: Span | None = None,
        known: Chunk | None = None,
    ) -> Chunk:
        """Return the pages that a chunk touches, in groups of which this rank holds these layers.

        ``known`` is a chunk that was validated before. A group that has the same pages there is
        not validated again, and its entry of ``known`` is returned.
        """
        self._check_named(pages)
        chunks: dict[str, tuple[int, tuple[int, ...]]] = {}
        for group in self._token_groups:
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
            self._check_pages(group.name, [p for p in named if p is not None] if gaps else named)
            if len(given) != len(local):
                raise InputError(
                    f"tokens {tokens} touch {len(local)} pages of group {group.name!r}, "
                    f"but {len(given)} were given; pass one page for each"
                )
            chunks[group.name] = (local.first, given)
        return chunks

    def rows(
        self, rows: Rows | None, layers: Span | None = None, known: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Return the state row of each state group of which this rank holds these layers.

        ``known`` are the rows that were given before. They may not change.
        """
        known = known or {}
        mine = [name for name in self._state_groups if self._has(name, layers)]
        found = {name: _row_of(name, rows, known.get(name)) for name in mine}
        for name, row in found.items():
            self._check_pages(name, (row,))
            if row != known.get(name, row):
                raise InputError(
                    f"group {name!r} was given row {row}, but {known[name]} before; "
                    f"a request has one row in each group"
                )
        return found

    def _has(self, group: str, layers: Span | None) -> bool:
        return layers is None or any(layer in layers for layer in self._layers[group])

    def _local_pages(self, group: Group, tokens: Span) -> Span:
        """Return the pages that hold this rank's share of these tokens."""
        return local_pages(self._layout, group, self._shards[group.name], tokens)

    def _check_named(self, pages: Pages) -> None:
        if self._needs_names and not isinstance(pages, Mapping):
            sizes = ", ".join(f"{name} {size}" for name, size in self._page_sizes.items())
            raise InputError(
                f"one list of pages can't serve groups whose pages hold different numbers of "
                f"tokens ({sizes}); pass pages={{{next(iter(self._page_sizes))!r}: [...], ...}}"
            )

    def _check_pages(self, group: str, pages: Sequence[int]) -> None:
        most = self._num_pages[group]
        if pages and not (min(pages) >= 0 and max(pages) < most):
            raise InputError(
                f"group {group!r} names page {min(pages)} or {max(pages)}, "
                f"but its pool has pages 0..{most - 1}"
            )
        if len(pages) > MAX_PAGES:
            raise InputError(
                f"group {group!r} names {len(pages)} pages, but a room may have {MAX_PAGES}; "
                f"use larger pages"
            )
        if len(set(pages)) != len(pages):
            raise InputError(f"group {group!r} names a page twice; give each page once")


def _num_pages(pools: PoolMap, group: Group) -> int:
    return min(pools.of(group.name, tensor.name).num_pages for tensor in group.tensors)


def _pages_of(group: str, pages: Pages, *, gaps: bool = False) -> list[int | None]:
    """Return the pages of one group. Without ``gaps`` every page has a number."""
    if not isinstance(pages, Mapping):
        return _numbers(group, pages, gaps=gaps)
    if group not in pages:
        raise InputError(f"group {group!r} has no pages; pass them as pages={{{group!r}: [...]}}")
    return _numbers(group, pages[group], gaps=gaps)


def _numbers(group: str, pages: Sequence[int | None], *, gaps: bool) -> list[int | None]:
    """Return the page numbers as Python integers."""
    try:
        # Arrays and tensors have tolist(). Their own integers cannot be encoded.
        listed: Sequence[Any] = pages.tolist() if hasattr(pages, "tolist") else pages
        if not gaps:
            return list(map(index, listed))
        return [None if page is None else page.__index__() for page in listed]
    except (AttributeError, TypeError):
        raise InputError(f"pages of group {group!r} must be whole numbers in a flat list") from None


def _row_of(group: str, rows: Rows | None, known: int | None = None) -> int:
    row = rows.get(group) if isinstance(rows, Mapping) else rows
    row = known if row is None else row
    if row is None:
        raise InputError(f"group {group!r} holds state; pass the request's row as states=...")
    return row.__index__()


class KnownPages:
    """The pages of one group of one room as far as they are known, from page ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.pages: list[int] = []

    @property
    def num_pages(self) -> int:
        """Number of known pages."""
        return len(self.pages) - self.pages.count(UNKNOWN)

    def agrees(self, first: int, pages: Sequence[int]) -> bool:
        """Return whether no other page is known for one of these entries."""
        skip = first - self.first
        known = self.pages[max(0, skip) : max(0, skip + len(pages))]
        given = pages[max(0, -skip) :]
        return all(one in (UNKNOWN, two) for one, two in zip(known, given, strict=False))

    def put(self, first: int, pages: Sequence[int]) -> bool:
        """Set the pages from entry ``first`` on. Return whether one of them is new."""
        if first < self.first:
            self.pages[:0] = [UNKNOWN] * (self.first - first)
            self.first = first
        at = first - self.first
        self.pages += [UNKNOWN] * (at - len(self.pages))
        if self.pages[at : at + len(pages)] == list(pages):
            return False
        self.pages[at : at + len(pages)] = pages
        return True


class PageHistory:
    """The pages that an engine has given for a room so far. Refuses conflicting pages."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPages] = {}
        # The latest chunk of each group, which is given again for other layers.
        self.latest: Chunk = {}

    def extend(self, chunk: Chunk) -> None:
        """Add a chunk. If it raises ``InputError``, nothing was added."""
        new = {group: its for group, its in chunk.items() if its is not self.latest.get(group)}
        for group, (first, pages) in new.items():
            known = self._known.get(group)
            if known is None or not pages:
                continue
            if not known.agrees(first, pages):
                raise InputError(
                    f"group {group!r} names other pages than before for the same tokens; "
                    f"all layers of a group share their pages"
                )
            far = max(known.first + len(known.pages), first + len(pages))
            if far - min(known.first, first) > MAX_PAGES:
                raise InputError(f"group {group!r} names pages too far apart; push closer tokens")
        for group, (first, pages) in new.items():
            if pages:
                self._known.setdefault(group, KnownPages(first)).put(first, pages)
        self.latest = {**self.latest, **new}


class PageTableBuilder:
    """A source's page tables of one room, filled chunk by chunk."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPages] = {}
        self._tables: dict[str, PageTable] = {}

    def add(self, chunk: Chunk) -> None:
        """Add a validated chunk. Two chunks may share a page."""
        for group, (first, pages) in chunk.items():
            if not pages:
                continue
            known = self._known.setdefault(group, KnownPages(first))
            # Bindings are cached by table, so an unchanged table must stay the same object.
            if known.put(first, pages):
                self._tables.pop(group, None)

    def add_rows(self, rows: Mapping[str, int]) -> None:
        """Add validated state rows."""
        self.add({group: (0, (row,)) for group, row in rows.items()})

    @property
    def page_counts(self) -> dict[str, int]:
        """Number of known pages by group."""
        return {group: known.num_pages for group, known in self._known.items()}

    def tables(self) -> dict[str, PageTable]:
        """Return the tables by group, as ``bind`` takes them."""
        for group, known in self._known.items():
            if group not in self._tables:
                self._tables[group] = PageTable(known.pages, known.first)
        return dict(self._tables)
