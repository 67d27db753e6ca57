"""Which pages hold which tokens. The one place that says so.

A rank keeps its tokens of a request one after another, page by page: its *local tokens*, counted
from 0. Pages are counted in the same way, from the request's first; which pages of the pool they
are, a page table says. A slot group has one row a request, which counts as page 0.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group, StateRow


class LocalTokens(NamedTuple):
    """Tokens of a request as one rank keeps them: ``first``, then every ``advance``-th."""

    page_tokens: int
    first: int
    advance: int = 1

    @property
    def start(self) -> tuple[int, int]:
        """The page of the first, and its place in that page."""
        return divmod(self.first, self.page_tokens)

    def pages(self, num_tokens: int) -> Span:
        """The pages from that of the first to that of the last of so many; none for none."""
        page_tokens, first, advance = self
        page = first // page_tokens
        if num_tokens == 0:
            return Span(page, page)
        return Span(page, (first + (num_tokens - 1) * advance) // page_tokens + 1)


def touched_pages(tokens: Span, page_tokens: int) -> Span:
    """The pages that tokens lie in where every token is kept; none for no tokens."""
    return LocalTokens(page_tokens, tokens.first).pages(len(tokens))


def local_tokens(layout: Layout, group: Group, held: Shard, tokens: Tokens) -> LocalTokens:
    """Where a rank of ``layout`` keeps these tokens, all of which it holds."""
    if isinstance(group.kind, StateRow):
        return LocalTokens(1, 0)
    mine = held.tokens
    first = mine.local_index(tokens.first)
    return LocalTokens(layout.page_tokens, first, tokens.step // mine.step)


def local_pages(layout: Layout, group: Group, held: Shard, tokens: Span) -> Span:
    """The pages in which a rank of ``layout`` keeps its share of these tokens."""
    if isinstance(group.kind, StateRow):
        return Span(0, 1)
    mine = held.tokens.clip(tokens)
    first = held.tokens.local_index(mine.first)
    return LocalTokens(layout.page_tokens, first).pages(mine.num_tokens)
