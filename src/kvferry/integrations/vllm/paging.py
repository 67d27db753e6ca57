"""Paging: a request's tokens in vLLM's blocks, as kvferry's cells and pages. Pure.

vLLM's scheduler counts in blocks; its kernels may count in smaller ones, and a page is one of
those. On a GPU a cell is a token. On a CPU the kernels keep the K of a (block, head) transposed,
so a part of a block means nothing anywhere else: there a cell is a whole page.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry import InputError


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
        return -(-num_tokens // self.cell_tokens)

    def full_cells(self, num_tokens: int) -> int:
        """Cells that so many tokens fill."""
        return num_tokens // self.cell_tokens

    def pages(self, blocks: Sequence[int]) -> list[int]:
        """The pages of those blocks, in the order of the tokens."""
        each = self.block_tokens // self.page_tokens
        return [block * each + part for block in blocks for part in range(each)]

    def touched(self, pages: Sequence[int], first: int, end: int) -> list[int]:
        """Those of a request's pages in which the cells from ``first`` to ``end`` lie."""
        return list(pages[first // self.page_cells : -(-end // self.page_cells)])


class PushedPages:
    """A prefill request's pages as they are computed, and how far they were pushed."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._pages: list[int] = []
        self.end = 0

    def extend(self, first_block: int, blocks: Sequence[int]) -> None:
        """These blocks are the request's from there on; one may be named again."""
        each = self._paging.block_tokens // self._paging.page_tokens
        self._pages[first_block * each :] = self._paging.pages(blocks)

    def ahead(self, num_tokens: int, *, last: bool) -> tuple[tuple[int, int], list[int]] | None:
        """The cells that are new when so many tokens are computed, and their pages."""
        paging = self._paging
        end = paging.cells(num_tokens) if last else paging.full_cells(num_tokens)
        if end <= self.end:
            return None
        return (self.end, end), paging.touched(self._pages, self.end, end)
