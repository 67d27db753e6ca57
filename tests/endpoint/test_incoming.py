"""Tests of the pages of a failed room that the engine must not use."""

from __future__ import annotations

from endpoint.fleets import HEADS, HYBRID, layout

from kvferry.endpoint.incoming import pages_of
from kvferry.layout.intervals import Span
from kvferry.plan.plan import Block
from kvferry.protocol.messages import PageTableMessage

PLAIN = layout(HEADS, 4)


def lacking(group: str, first: int, end: int, layers: Span | None = None) -> Block:
    return Block(group, layers or Span(0, 1), Span(first, end))


def test_every_page_that_lacks_something_is_bad() -> None:
    tables = (PageTableMessage("kv", (7, 3, 11, 5)),)
    missing = [lacking("kv", 5, 6), lacking("kv", 11, 13, Span(2, 3))]
    assert pages_of(PLAIN, 0, tables, missing) == {"kv": [3, 11, 5]}
    assert pages_of(PLAIN, 0, tables, []) == {}


def test_bad_pages_behind_a_prefix_and_with_state() -> None:
    its = layout(HYBRID, 4)
    tables = (
        PageTableMessage("full", (8, 9), 2),
        PageTableMessage("near", (1,), 3),
        PageTableMessage("conv", (4,)),
    )
    missing = [lacking("full", 9, 10), lacking("conv", 15, 16, Span(1, 2))]
    assert pages_of(its, 0, tables, missing) == {"full": [8], "conv": [4]}


def test_bad_pages_of_one_rank_of_context_parallelism() -> None:
    its = layout(HEADS, 4, cp=2)
    tables = (PageTableMessage("kv", (6, 2)),)
    # Tokens 1, 3, 5, 7 are on its first page, 9 on its second; 8 is another rank's.
    assert pages_of(its, 1, tables, [lacking("kv", 7, 9)]) == {"kv": [6]}
    assert pages_of(its, 1, tables, [lacking("kv", 8, 10)]) == {"kv": [2]}
    assert pages_of(its, 1, tables, [lacking("kv", 8, 9)]) == {}
