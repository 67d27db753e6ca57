"""Mapping of vLLM's blocks to kvferry's pages and cells.

vLLM's scheduler counts in blocks. Its kernels may use smaller blocks, which are kvferry's pages.
A cell is the smallest unit that can be transferred: one token on a GPU, one page on a CPU, where
kernels store the K of a (block, head) transposed.

Each of vLLM's cache groups has its own blocks for a request. Their tokens may differ by group, and
an entry may stand for several tokens. In a window group, vLLM reuses the blocks before the window
while the prompt is still being computed, so they are never transferred. In a state group only one
block of the list holds the state.

With decode context parallelism (DCP) a block holds its tokens of as many ranks, which take turns: a
rank packs its share into its own page of that number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvferry import Group, InputError, Span, Tokens, touched_pages
from kvferry.connectors.vllm.metadata import BlocksByGroup
from kvferry.connectors.vllm.states import StateSpec

# Pages of a push by group; None stands for a page before the window.
PagesByGroup = dict[str, list[int | None]]


class Paging(msgspec.Struct, frozen=True):
    """Block, page and cell sizes of one rank's caches, or of one group.

    ``block_tokens`` is the share of one rank. ``held`` are the tokens of this rank, one of ``dcp``,
    that have an entry. An entry stands for ``entry_tokens``.
    """

    block_tokens: int
    page_tokens: int
    whole_pages: bool
    dcp: int = 1
    held: Tokens = Tokens()
    entry_tokens: int = 1

    def __post_init__(self) -> None:
        if self.whole_pages and self.dcp > 1:
            raise InputError(
                "pages of vLLM's CPU kernels can't be divided by tokens; leave out "
                "--decode-context-parallel-size"
            )
        if self.page_tokens < 1 or self.block_tokens % self.page_tokens:
            raise InputError(
                f"vLLM's blocks of {self.block_tokens} tokens are no multiple of its kernels' "
                f"{self.page_tokens}; choose another --block-size"
            )

    @property
    def cell_tokens(self) -> int:
        """Number of tokens in a cell."""
        return self.page_tokens if self.whole_pages else 1

    @property
    def page_cells(self) -> int:
        """Number of cells in a page that have an entry."""
        return 1 if self.whole_pages else self.page_tokens // self.entry_tokens

    @property
    def layout_page(self) -> int:
        """The page size of the layout, in cells."""
        return 1 if self.whole_pages else self.page_tokens

    def cells(self, num_tokens: int) -> int:
        """Return the number of cells that hold ``num_tokens`` tokens, rounded up."""
        return touched_pages(Span(0, num_tokens), self.cell_tokens).end

    def full_cells(self, num_tokens: int) -> int:
        """Return the number of cells that ``num_tokens`` tokens fill completely."""
        return num_tokens // self.cell_tokens

    def window_cells(self, num_tokens: int) -> int:
        """Return the maximum number of cells that ``num_tokens`` consecutive tokens touch."""
        return -(-(num_tokens - 1) // self.cell_tokens) + 1

    def pages(self, blocks: Sequence[int]) -> list[int]:
        """Return the pages of blocks, in token order."""
        per_block = self.block_tokens // self.page_tokens
        return [block * per_block + i for block in blocks for i in range(per_block)]

    def rest(self, blocks: Sequence[int], num_tokens: int) -> dict[int, int]:
        """Return the pages of the last block that ``num_tokens`` tokens do not fill.

        Each with the number of its entries that are used.
        """
        last_block = (num_tokens - 1) // (self.block_tokens * self.dcp)
        before = last_block * self.block_tokens // self.entry_tokens
        used = len(self._own(0, num_tokens)) - before
        last = enumerate(self.pages(blocks[last_block:][:1]))
        entries = {page: max(0, used - i * self.page_cells) for i, page in last}
        return {page: some for page, some in entries.items() if some < self.page_cells}

    def touched(self, pages: Sequence[int], first: int, end: int) -> list[int]:
        """Return the pages of a request that hold the cells from ``first`` to ``end``."""
        touched = self.places(first, end)
        return list(pages[touched.first : touched.end])

    def places(self, first: int, end: int) -> Span:
        """Return the indices, in a request, of the pages of these cells."""
        return touched_pages(self._own(first, end), self.page_cells)

    def blocks_of(self, first: int, end: int) -> Span:
        """Return the blocks of the tokens from ``first`` to ``end``."""
        return touched_pages(Span(first, end), self.block_tokens * self.dcp)

    def _own(self, first: int, end: int) -> Span:
        """Return this rank's share of these cells, counted from its first cell."""
        mine = self.held.clip(Span(first, end))
        start = self.held.local_index(mine.first)
        return Span(start, start + mine.num_tokens)


class BlockSelector(msgspec.Struct, frozen=True):
    """Selects the blocks to transfer. ``states`` has the state groups by their index.

    Blocks of all groups begin together after every ``block_tokens``, which count the tokens of all
    ranks that share a block. ``sizes`` has the tokens of a block of groups with smaller ones.

    Of a state group's list, only the block with the state after the last token is selected.
    """

    block_tokens: int
    states: Mapping[int, StateSpec] = {}
    sizes: Mapping[int, int] = {}

    def select(
        self, blocks: Sequence[Sequence[int]], first_block: int, num_tokens: int
    ) -> BlocksByGroup:
        """Return the blocks from ``first_block`` on that hold the first ``num_tokens`` tokens.

        ``first_block`` counts blocks of ``block_tokens``, in every group.
        """
        tokens = Span(first_block * self.block_tokens, num_tokens)
        return tuple(self._of_group(place, own, tokens) for place, own in enumerate(blocks))

    def _of_group(self, place: int, blocks: Sequence[int], tokens: Span) -> tuple[int, ...]:
        spec, size = self.states.get(place), self.sizes.get(place, self.block_tokens)
        if spec is not None:
            return tuple(blocks[spec.block_at(tokens.end) :][:1])
        return tuple(blocks[tokens.first // size : touched_pages(Span(0, tokens.end), size).end])


# vLLM's placeholder, which no request owns.
NULL_BLOCK = 0


class BlockTables(msgspec.Struct, frozen=True):
    """Block lists of a layout's groups.

    ``groups`` are the paged groups. ``places`` and ``states`` map paged groups and state groups to
    the index of their vLLM cache group. ``own`` has the sizes of groups that differ from
    ``paging``, whose ``block_tokens`` are a multiple of those of each.
    """

    paging: Paging
    groups: tuple[Group, ...]
    places: Mapping[str, int]
    states: Mapping[str, int] = {}
    own: Mapping[str, Paging] = {}

    def paging_of(self, group: str) -> Paging:
        """Return the block and page sizes of a group."""
        return self.own.get(group, self.paging)

    def rows(self, blocks: BlocksByGroup) -> dict[str, int] | None:
        """Return a request's state rows, if the layout has any. Without blocks none is read."""
        rows = {n: blocks[place][0] if blocks else NULL_BLOCK for n, place in self.states.items()}
        return rows or None

    def wanted(self, blocks: BlocksByGroup, num_cells: int, cached: int) -> dict[str, list[int]]:
        """Return, by group, the pages to receive after ``cached`` cells that are cached here."""
        found = {}
        for group in self.groups:
            owed = group.owed(num_cells, cached)
            paging = self.paging_of(group.name)
            pages = paging.pages(blocks[self.places[group.name]]) if len(owed) else []
            found[group.name] = paging.touched(pages, owed.first, owed.end)
        return found


class PushedPages:
    """Pages of a prefill request, and how many cells were pushed."""

    def __init__(self, tables: BlockTables, num_tokens: int) -> None:
        self._tables = tables
        self._paging = paging = tables.paging
        self._num_cells = paging.cells(num_tokens)
        self._pages: dict[str, list[int]] = {name: [] for name in tables.places}
        self.end = 0

    def extend(self, first_block: int, blocks: BlocksByGroup) -> None:
        """Set the request's blocks from ``first_block`` on. A block may be repeated.

        ``first_block`` counts as in ``BlockSelector.select``.
        """
        for name, pages in self._pages.items():
            paging = self._tables.paging_of(name)
            first = first_block * self._paging.block_tokens // paging.page_tokens
            pages[first:] = paging.pages(blocks[self._tables.places[name]])

    def new_cells(
        self, num_tokens: int, *, last: bool
    ) -> tuple[tuple[int, int], PagesByGroup] | None:
        """Return the cells that become complete with ``num_tokens`` tokens, and their pages."""
        paging = self._paging
        end = paging.cells(num_tokens) if last else paging.full_cells(num_tokens)
        if end <= self.end:
            return None
        return (self.end, end), {
            group.name: self._kept_pages(group, self.end, end) for group in self._tables.groups
        }

    def _kept_pages(self, group: Group, first: int, end: int) -> list[int | None]:
        """Return a group's pages for cells, without those before the window, which vLLM reuses."""
        paging = self._tables.paging_of(group.name)
        pages = paging.touched(self._pages[group.name], first, end)
        kept = group.owed(self._num_cells)
        first_kept = paging.places(kept.first, kept.end).first
        num_dropped = min(len(pages), max(0, first_kept - paging.places(first, end).first))
        return [None] * num_dropped + pages[num_dropped:]
