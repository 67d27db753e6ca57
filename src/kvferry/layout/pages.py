"""Maps tokens to pages. No other module does.

A rank stores its tokens of a request in order, page by page: its *local tokens*, counted from 0.
Pages are counted from the request's first page, and a page table maps them to pages of the pool. A
state group has one row per request, which counts as page 0.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group, StateRow
from kvferry.layout.tokens import EVERY, Pattern, Tokens


class LocalTokens(NamedTuple):
    """Where a rank keeps some tokens of a request: from its local token ``first`` on to ``last``.

    ``held`` is what the rank holds around them. The local index of each follows from it.
    """

    page_tokens: int
    first: int
    last: int
    held: Pattern

    @property
    def start(self) -> tuple[int, int]:
        """The page of the first token, and its index in that page."""
        return divmod(self.first, self.page_tokens)

    @property
    def pages(self) -> Span:
        """The pages from that of the first token to that of the last."""
        return Span(self.first // self.page_tokens, self.last // self.page_tokens + 1)


def touched_pages(tokens: Span, page_tokens: int) -> Span:
    """Return the pages of these tokens on a rank that holds every token."""
    first = tokens.first // page_tokens
    return Span(first, (tokens.end - 1) // page_tokens + 1 if len(tokens) else first)


def local_tokens(layout: Layout, group: Group, held: Shard, tokens: Tokens) -> LocalTokens:
    """Return where a rank of ``layout`` keeps these tokens, of which it must hold all."""
    if isinstance(group.kind, StateRow):
        return LocalTokens(1, 0, 0, EVERY)
    mine = held.tokens
    first, last = mine.local_index(tokens.first), mine.local_index(tokens.last)
    return LocalTokens(layout.page_entries(group), first, last, mine.pattern)


def local_pages(layout: Layout, group: Group, held: Shard, tokens: Span) -> Span:
    """Return the pages in which a rank of ``layout`` keeps its share of these tokens."""
    if isinstance(group.kind, StateRow):
        return Span(0, 1)
    mine = held.tokens.clip(tokens)
    first = held.tokens.local_index(mine.first)
    return touched_pages(Span(first, first + mine.num_tokens), layout.page_entries(group))


def page_period(layout: Layout, held: Shard) -> int:
    """Return after how many positions the places of a rank's tokens in its pages repeat."""
    pattern, entries = held.tokens.pattern, layout.page_entries(layout.spec.group(held.group))
    return pattern.period * (entries // gcd(entries, pattern.density))
