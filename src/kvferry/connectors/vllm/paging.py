"""Paging: a request's tokens in vLLM's blocks, as kvferry's cells and pages. Pure.

vLLM's scheduler counts in blocks; its kernels may count in smaller ones, and a page is one of
those. On a GPU a cell is a token. On a CPU the kernels keep the K of a (block, head) transposed,
so a part of a block means nothing anywhere else: there a cell is a whole page.

vLLM's cache groups each have blocks of their own for a request. Where layers see a window, the
blocks before it are given away while the prompt is still computed, and are never named. Where
layers keep state, one block has it, and the others of its list are of no interest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvferry import Group, InputError, Span, touched_pages
from kvferry.connectors.vllm.metadata import BlocksByGroup
from kvferry.connectors.vllm.states import StateSpec

# As a push takes them; None is a page that a window has dropped.
PagesByGroup = dict[str, list[int | None]]


class Paging(msgspec.Struct, frozen=True):
    """How one rank's caches are cut."""

    block_tokens: int
    page_tokens: int
    whole_pages: bool

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.block_tokens % self.page_tokens:
            raise InputError(
                f"vLLM's blocks of {self.block_tokens} tokens are no multiple of its kernels' "
                f"{self.page_tokens}; choose another --block-size"
            )

    @property
    def cell_tokens(self) -> int:
        """Tokens of the smallest part that can be carried."""
        return self.page_tokens if self.whole_pages else 1

    @property
    def page_cells(self) -> int:
        """Cells of a page: what a layout calls its page's tokens."""
        return 1 if self.whole_pages else self.page_tokens

    def cells(self, num_tokens: int) -> int:
        """Cells that hold so many tokens, the last perhaps in part."""
        return touched_pages(Span(0, num_tokens), self.cell_tokens).end

    def full_cells(self, num_tokens: int) -> int:
        """Cells that so many tokens fill."""
        return num_tokens // self.cell_tokens

    def window_cells(self, num_tokens: int) -> int:
        """Cells in which so many tokens can lie, wherever they begin."""
        return -(-(num_tokens - 1) // self.cell_tokens) + 1

    def pages(self, blocks: Sequence[int]) -> list[int]:
        """The pages of those blocks, in the order of the tokens."""
        each = self.block_tokens // self.page_tokens
        return [block * each + part for block in blocks for part in range(each)]

    def touched(self, pages: Sequence[int], first: int, end: int) -> list[int]:
        """Those of a request's pages in which the cells from ``first`` to ``end`` lie."""
        touched = touched_pages(Span(first, end), self.page_cells)
        return list(pages[touched.first : touched.end])


class BlockCuts(msgspec.Struct, frozen=True):
    """What a scheduler names of a request's block lists. ``states``: the place of each that has it.

    Of a list with state that is the block which has it after the last of the tokens.
    """

    block_tokens: int
    states: Mapping[int, StateSpec] = {}

    def named(
        self, blocks: Sequence[Sequence[int]], first_block: int, num_tokens: int
    ) -> BlocksByGroup:
        """The blocks from that number on in which the request's first tokens lie."""
        end = touched_pages(Span(0, num_tokens), self.block_tokens).end
        return tuple(
            tuple(own[spec.block_at(num_tokens) :][:1]) if spec else tuple(own[first_block:end])
            for own, spec in ((own, self.states.get(p)) for p, own in enumerate(blocks))
        )


# A block that no request has: vLLM's own placeholder.
NULL_BLOCK = 0


class BlockTables(msgspec.Struct, frozen=True):
    """Which of vLLM's block lists each of a layout's groups has, by its place among them.

    ``groups`` are those with pages, ``states`` the places of those with state rows.
    """

    paging: Paging
    groups: tuple[Group, ...]
    places: Mapping[str, int]
    states: Mapping[str, int] = {}

    def rows(self, blocks: BlocksByGroup) -> dict[str, int] | None:
        """A request's state rows, if the layout has any. Who wants nothing names no block."""
        rows = {n: blocks[place][0] if blocks else NULL_BLOCK for n, place in self.states.items()}
        return rows or None

    def wanted(self, blocks: BlocksByGroup, num_cells: int, cached: int) -> dict[str, list[int]]:
        """Per group, the pages that a target with so many cached cells wants to have filled."""
        found = {}
        for group in self.groups:
            owed = group.owed(num_cells, cached)
            pages = self.paging.pages(blocks[self.places[group.name]]) if len(owed) else []
            found[group.name] = self.paging.touched(pages, owed.first, owed.end)
        return found


class PushedPages:
    """A prefill request's pages as they are computed, and how far they were pushed."""

    def __init__(self, tables: BlockTables, num_tokens: int) -> None:
        self._tables = tables
        self._paging = paging = tables.paging
        self._num_cells = paging.cells(num_tokens)
        self._pages: dict[int, list[int]] = {place: [] for place in tables.places.values()}
        self.end = 0

    def extend(self, first_block: int, blocks: BlocksByGroup) -> None:
        """These blocks are the request's from there on; one may be named again."""
        each = self._paging.block_tokens // self._paging.page_tokens
        for place, pages in self._pages.items():
            pages[first_block * each :] = self._paging.pages(blocks[place])

    def ahead(self, num_tokens: int, *, last: bool) -> tuple[tuple[int, int], PagesByGroup] | None:
        """The cells that are new when so many tokens are computed, and their pages by group."""
        paging = self._paging
        end = paging.cells(num_tokens) if last else paging.full_cells(num_tokens)
        if end <= self.end:
            return None
        return (self.end, end), {
            group.name: self._named(group, self.end, end) for group in self._tables.groups
        }

    def _named(self, group: Group, first: int, end: int) -> list[int | None]:
        """A group's pages of those cells; vLLM may give those before a window to others."""
        pages = self._paging.touched(self._pages[self._tables.places[group.name]], first, end)
        each = self._paging.page_cells
        kept_from = group.owed(self._num_cells).first // each
        num_dropped = min(len(pages), max(0, kept_from - first // each))
        return [None] * num_dropped + pages[num_dropped:]
