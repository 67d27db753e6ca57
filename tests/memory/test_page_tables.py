"""Tests of page tables as engines give them: at once or chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from endpoint.fleets import HEADS, HYBRID, layout, with_pages

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout
from kvferry.memory.page_tables import (
    UNKNOWN,
    PageHistory,
    Pages,
    PageTableBuilder,
    PageTableValidator,
)
from kvferry.plan.places import contiguous_pools
from kvferry.plan.plan import Request
from kvferry.protocol.messages import MAX_PAGES, PageTableMessage

NUM_PAGES = 20
PLAIN = layout(HEADS, 4)


def validator(its: Layout = PLAIN, rank: int = 0, num_pages: int = NUM_PAGES) -> PageTableValidator:
    return PageTableValidator(its, rank, contiguous_pools(its, rank, num_pages, 6).map)


# ---------------------------------------------------------------- all at once


@pytest.mark.parametrize(
    "pages",
    [
        [7, 3, 11],
        (7, 3, 11),
        np.array([7, 3, 11]),
        torch.tensor([7, 3, 11], dtype=torch.int32),
        [np.int64(7), np.int32(3), 11],
        {"kv": [7, 3, 11]},
        {"kv": np.array([7, 3, 11]), "more": [1]},
    ],
)
def test_pages_of_any_order_and_type(pages: Pages) -> None:
    (table,) = validator().tables(Request(10), pages, None)
    assert table == PageTableMessage("kv", (7, 3, 11), 0)
    assert {type(page) for page in table.pages} == {int}


def test_all_pages_or_only_those_to_fill() -> None:
    # 18 tokens are five pages; the first 9 are cached, so two pages need nothing.
    request = Request(18, prefix=9)
    assert validator().tables(request, [5, 6, 7, 8, 9], None)[0] == PageTableMessage(
        "kv", (5, 6, 7, 8, 9), 0
    )
    assert validator().tables(request, [7, 8, 9], None)[0] == PageTableMessage("kv", (7, 8, 9), 2)
    # An engine may have set more aside for what is to be decoded.
    assert validator().tables(request, [5, 6, 7, 8, 9, 0], None)[0].first_page == 0
    with pytest.raises(InputError, match="given 4 pages; give all 5 of the request, or only the 3"):
        validator().tables(request, [5, 6, 7, 8], None)


def test_fully_cached_request_needs_no_pages() -> None:
    assert validator().tables(Request(8, prefix=8), [], None)[0].pages == ()


def test_context_parallel_rank_counts_its_own_tokens() -> None:
    # Every second token: 5 of 10 here, so two pages.
    split = layout(HEADS, 4, cp=2)
    assert validator(split, 1).tables(Request(10), [3, 4], None)[0].pages == (3, 4)
    with pytest.raises(InputError, match="give all 2"):
        validator(split, 1).tables(Request(10), [3], None)


def test_state_rows_and_windows() -> None:
    its = validator(layout(HYBRID, 4))
    # The window keeps 20 of 40 tokens: pages 5 to 9.
    pages = {"full": range(10), "near": range(5, 10)}
    tables = {t.group: t for t in its.tables(Request(40), pages, {"conv": 2, "ssm": 3})}
    assert tables["near"] == PageTableMessage("near", (5, 6, 7, 8, 9), 5)
    assert tables["conv"].pages == (2,)
    assert tables["ssm"].pages == (3,)
    tables = {t.group: t for t in its.tables(Request(40), range(10), 4)}
    assert tables["near"].first_page == 0
    assert tables["conv"].pages == tables["ssm"].pages == (4,)


@pytest.mark.parametrize(
    ("pages", "rows", "problem"),
    [
        ([1, 2, 1], 0, "names a page twice"),
        ([1, 2, 20], 0, r"its pool has pages 0\.\.19"),
        ([-1, 2, 3], 0, r"names page -1 or 3"),
        ([1.0, 2.0, 3.0], 0, "must be whole numbers in a flat list"),
        ([[1, 2, 3]], 0, "must be whole numbers in a flat list"),
        ("abc", 0, "must be whole numbers in a flat list"),
        (5, 0, "must be whole numbers in a flat list"),
        (None, 0, "must be whole numbers in a flat list"),
        ({"near": [1, 2, 3]}, 0, "group 'full' has no pages; pass them as pages="),
        ([1, 2, 3], None, "group 'conv' holds state; pass the request's row as states="),
        ([1, 2, 3], {"conv": 1}, "group 'ssm' holds state"),
        ([1, 2, 3], 6, r"its pool has pages 0\.\.5"),
    ],
)
def test_invalid_tables_are_refused(pages: Pages, rows: int | None, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        validator(layout(HYBRID, 4)).tables(Request(12), pages, rows)


def test_groups_with_pages_of_different_sizes_need_names() -> None:
    its = validator(with_pages(layout(HYBRID, 4), near=8))
    # The window keeps 20 of 41 tokens, from the middle of its third page on.
    pages = {"full": range(11), "near": [4, 2, 9, 1]}
    tables = {t.group: t for t in its.tables(Request(41), pages, 1)}
    assert tables["full"].pages == tuple(range(11))
    assert tables["near"] == PageTableMessage("near", (4, 2, 9, 1), 2)
    chunk = its.chunk(Span(6, 13), {"full": [1, 2, 3], "near": [None, 6]})
    assert chunk == {"full": (1, (1, 2, 3)), "near": (0, (UNKNOWN, 6))}
    with pytest.raises(InputError, match=r"one list .* \(full 4, near 8\); pass pages={'full'"):
        its.tables(Request(41), range(11), 1)
    with pytest.raises(InputError, match="one list of pages"):
        its.chunk(Span(6, 13), [1, 2, 3])
    # A stage that has one of the groups takes a list.
    staged = with_pages(layout(HYBRID, 4, pp=4), near=8)
    assert validator(staged, 3).tables(Request(5), [3, 1], None)[0].pages == (3, 1)


def test_number_of_pages_is_limited() -> None:
    its = layout(HEADS, 1)
    many = range(MAX_PAGES + 1)
    with pytest.raises(InputError, match="use larger pages"):
        validator(its, num_pages=len(many)).tables(Request(len(many)), many, None)


# ---------------------------------------------------------------- chunk by chunk


def test_chunk_has_the_pages_it_touches() -> None:
    its, growing = validator(), PageTableBuilder()
    for tokens, pages in [((0, 6), [4, 9]), ((6, 7), [9]), ((7, 13), [9, 2, 0])]:
        growing.add(its.chunk(Span(*tokens), pages))
    table = growing.tables()["kv"]
    assert (table.pages.tolist(), table.first_page) == ([4, 9, 2, 0], 0)
    # The same again, as when credits are asked for first, changes nothing.
    growing.add(its.chunk(Span(7, 13), [9, 2, 0]))
    assert growing.tables()["kv"].pages.tolist() == [4, 9, 2, 0]


def test_window_pages_may_be_dropped() -> None:
    """Only windows have dropped pages. Other groups need every page."""
    its = validator(layout(HYBRID, 4))
    pages: Pages = {"full": [1, 2, 3], "near": [None, None, 3]}
    assert its.chunk(Span(0, 12), pages)["near"] == (0, (UNKNOWN, UNKNOWN, 3))
    with pytest.raises(InputError, match="whole numbers"):
        its.chunk(Span(0, 12), {"full": [None, 2, 3], "near": [1, 2, 3]})
    with pytest.raises(InputError, match="names page -1"):
        its.chunk(Span(0, 12), {"full": [1, 2, 3], "near": [UNKNOWN, 2, 3]})


def test_chunks_may_begin_after_a_cached_prefix() -> None:
    its, growing = validator(), PageTableBuilder()
    growing.add(its.chunk(Span(8, 12), [3]))
    growing.add(its.chunk(Span(12, 14), [1]))
    table = growing.tables()["kv"]
    assert (table.pages.tolist(), table.first_page) == ([3, 1], 2)


def test_chunks_in_any_order() -> None:
    its, reach, growing = validator(), PageHistory(), PageTableBuilder()
    for span, pages in [(Span(8, 12), [3]), (Span(16, 18), [5]), (Span(2, 6), [7, 0])]:
        chunk = its.chunk(span, pages)
        reach.extend(chunk)
        growing.add(chunk)
    table = growing.tables()["kv"]
    assert (table.pages.tolist(), table.first_page) == ([7, 0, 3, UNKNOWN, 5], 0)
    growing.add(its.chunk(Span(12, 16), [9]))
    assert growing.tables()["kv"].pages.tolist() == [7, 0, 3, 9, 5]
    with pytest.raises(InputError, match="touch 2 pages of group 'kv', but 1 were given"):
        its.chunk(Span(7, 9), [3])


def test_layers_share_the_pages_of_a_token() -> None:
    its, reach, growing = validator(), PageHistory(), PageTableBuilder()
    for layers in (Span(2, 3), Span(0, 1)):
        chunk = its.chunk(Span(4, 12), [3, 5], layers)
        reach.extend(chunk)
        growing.add(chunk)
        table = growing.tables()["kv"]
    # Bindings are found again by the table, so what is no news must not make another.
    assert growing.tables()["kv"] is table
    for span, pages in [(Span(4, 8), [5]), (Span(0, 5), [1, 2]), (Span(11, 13), [6, 7])]:
        with pytest.raises(InputError, match="names other pages than before for the same tokens"):
            reach.extend(its.chunk(span, pages))
    reach.extend(its.chunk(Span(11, 13), [5, 7]))
    with pytest.raises(InputError, match="too far apart"):
        reach.extend(its.chunk(Span(1 << 30, (1 << 30) + 1), [1]))


def test_repeated_pages_are_returned_unchecked() -> None:
    made, tokens, pages = validator(), Span(0, 8), [3, 4]
    first = made.chunk(tokens, pages)
    again = made.chunk(tokens, pages, Span(0, 1), first)
    assert again["kv"] is first["kv"]
    # An engine may use its list again for something else.
    pages[1] = NUM_PAGES
    with pytest.raises(InputError, match=f"page 3 or {NUM_PAGES}"):
        made.chunk(tokens, pages, Span(1, 2), first)
    with pytest.raises(InputError, match=r"3 pages .* but 2 were given"):
        made.chunk(Span(0, 9), [3, 4], Span(1, 2), first)
    # The same pages for other tokens are another chunk.
    assert made.chunk(Span(8, 16), [3, 4], None, first) == {"kv": (2, (3, 4))}


def test_changed_pages_are_detected_after_repeated_ones() -> None:
    known, grown = PageHistory(), PageTableBuilder()
    chunk, other = {"kv": (0, (3, 4))}, {"kv": (0, (3, 5))}
    for _ in range(2):
        known.extend(chunk)
        grown.add(chunk)
    table = grown.tables()["kv"]
    grown.add(chunk)
    assert grown.tables()["kv"] is table
    with pytest.raises(InputError, match="names other pages"):
        known.extend(other)
    # Nothing of it was taken in.
    known.extend(chunk)
    known.extend({"kv": (2, (6,))})
    with pytest.raises(InputError, match="names other pages"):
        known.extend(other)


def test_chunk_needs_pages_only_of_groups_with_its_layers() -> None:
    its = validator(layout(HYBRID, 4))
    assert its.chunk(Span(0, 4), {"full": [1]}, Span(0, 1)) == {"full": (0, (1,))}
    assert its.chunk(Span(0, 4), {"near": [2]}, Span(1, 3)) == {"near": (0, (2,))}
    assert its.chunk(Span(0, 4), {}, Span(2, 3)) == {}
    with pytest.raises(InputError, match="group 'full' has no pages"):
        its.chunk(Span(0, 4), {"near": [2]}, Span(1, 4))


def test_chunk_without_tokens_of_this_rank() -> None:
    its, growing = validator(layout(HEADS, 4, cp=2), 1), PageTableBuilder()
    growing.add(its.chunk(Span(0, 1), []))
    assert growing.tables() == {}


def test_state_rows_without_layers() -> None:
    its, growing = validator(layout(HYBRID, 4)), PageTableBuilder()
    growing.add_rows(its.rows({"conv": 1, "ssm": 5}))
    assert growing.tables()["ssm"].pages.tolist() == [5]
    with pytest.raises(InputError, match="states="):
        its.rows(None)


def test_state_rows_of_some_layers() -> None:
    its = validator(layout(HYBRID, 4))
    assert its.rows(4, Span(0, 1)) == {}
    assert its.rows(4, Span(0, 2)) == {"conv": 4}
    assert its.rows({"ssm": 5}, known={"conv": 4}) == {"conv": 4, "ssm": 5}
    with pytest.raises(InputError, match="'conv' was given row 3, but 4 before"):
        its.rows(3, known={"conv": 4})
