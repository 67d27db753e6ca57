"""Maps tokens to pages. No other module does.

A rank stores its tokens of a request in order, page by page: its *local tokens*, counted from 0.
Pages are counted from the request's first page, and a page table maps them to pages of the pool. A
state group has one row per request, which counts as page 0.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group, StateRow


class LocalTokens(NamedTuple):
    """Tokens of a request on one rank: from local token ``first`` on, every ``advance``-th."""

    page_tokens: int
    first: int
    advance: int = 1

    @property
    def start(self) -> tuple[int, int]:
        """The page of the first token, and its index in that page."""
        return divmod(self.first, self.page_tokens)

    def pages(self, num_tokens: int) -> Span:
        """Return the pages from that of the first to that of the last of ``num_tokens`` tokens."""
        page_tokens, first, advance = self
        page = first // page_tokens
        if num_tokens == 0:
            return Span(page, page)
        return Span(page, (first + (num_tokens - 1) * advance) // page_tokens + 1)


def touched_pages(tokens: Span, page_tokens: int) -> Span:
    """Return the pages of these tokens on a rank that holds every token."""
    return LocalTokens(page_tokens, tokens.first).pages(len(tokens))


def local_tokens(layout: Layout, group: Group, held: Shard, tokens: Tokens) -> LocalTokens:
    """Return where a rank of ``layout`` keeps these tokens. It must hold all of them."""
    if isinstance(group.kind, StateRow):
        return LocalTokens(1, 0)
    mine = held.tokens
    first = mine.local_index(tokens.first)
    return LocalTokens(layout.page_tokens, first, tokens.step // mine.step)


def local_pages(layout: Layout, group: Group, held: Shard, tokens: Span) -> Span:
    """Return the pages in which a rank of ``layout`` keeps its share of these tokens."""
    if isinstance(group.kind, StateRow):
        return Span(0, 1)
    mine = held.tokens.clip(tokens)
    first = held.tokens.local_index(mine.first)
    return LocalTokens(layout.page_tokens, first).pages(mine.num_tokens)
