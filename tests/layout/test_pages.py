"""Tests of the pages of tokens, against placing every token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import (
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Paged,
    Pattern,
    Shard,
    Span,
    StateRow,
    Tensor,
    Tokens,
    Window,
)
from kvferry.layout.pages import (
    LocalTokens,
    local_pages,
    local_tokens,
    page_period,
    touched_pages,
)

SIZES = st.integers(1, 9)
SPANS = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda two: Span(*sorted(two)))
KINDS = st.sampled_from([Paged(), Window(7)])


def group_of(kind: Paged | Window | StateRow) -> Group:
    return Group("kv", kind, (0,), 1, (Tensor("k", DType.UINT8, 1),))


def layout_of(group: Group, held: Shard, page_tokens: int) -> Layout:
    return Layout(CacheSpec(1, (group,)), ExplicitSharding(((held,),)), page_tokens=page_tokens)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    size = draw(st.integers(1, 4))
    pattern = Pattern.interleaved(draw(st.integers(0, size - 1)), size, draw(st.integers(1, 5)))
    first = draw(st.integers(0, 6))
    end = draw(st.none() | st.integers(first, 80))
    return Shard("kv", Span(0, 1), Span(0, 1), Tokens(first, end, pattern))


def kept(held: Shard, end: int = 100) -> list[int]:
    """Return the positions that a rank keeps. The index of each is its local index."""
    return [token for token in range(end) if token in held.tokens]


def as_span(pages: set[int]) -> Span:
    return Span(min(pages), max(pages) + 1)


@given(SPANS, SIZES)
def test_pages_if_every_token_is_kept(tokens: Span, size: int) -> None:
    pages = touched_pages(tokens, size)
    assert set(range(pages.first, pages.end)) == {
        token // size for token in range(tokens.first, tokens.end)
    }


@given(shards(), KINDS, SPANS, SIZES)
def test_pages_of_a_share(held: Shard, kind: Paged | Window, tokens: Span, size: int) -> None:
    group = group_of(kind)
    pages = local_pages(layout_of(group, held, size), group, held, tokens)
    expected = {place // size for place, token in enumerate(kept(held)) if token in tokens}
    assert set(range(pages.first, pages.end)) == expected


@given(shards(), SIZES, st.data())
def test_places_of_some_tokens_of_a_share(held: Shard, size: int, data: st.DataObject) -> None:
    mine = kept(held)
    if not mine:
        return
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(mine) - 1)] * 2)))
    tokens = held.tokens.clip(Span(mine[first], mine[last] + 1))
    group = group_of(Paged())
    local = local_tokens(layout_of(group, held, size), group, held, tokens)
    assert local == LocalTokens(size, first, last, held.tokens.pattern)
    assert local.start == (first // size, first % size)
    assert local.pages == as_span({place // size for place in range(first, last + 1)})


@given(shards(), SIZES)
def test_places_in_pages_repeat_with_the_page_period(held: Shard, size: int) -> None:
    pattern = held.tokens.pattern
    period = page_period(layout_of(group_of(Paged()), held, size), held)
    for token in range(2 * pattern.period):
        assert (token in pattern) == (token + period in pattern)
        assert (pattern.below(token) - pattern.below(token + period)) % size == 0


@given(shards(), SPANS, SIZES)
def test_a_state_row_is_page_0(held: Shard, tokens: Span, size: int) -> None:
    group = group_of(StateRow())
    layout = layout_of(group, held, size)
    assert local_pages(layout, group, held, tokens) == Span(0, 1)
    assert local_tokens(layout, group, held, Tokens(5, 6)).pages == Span(0, 1)
