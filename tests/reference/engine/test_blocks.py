"""Pages: shared by equal beginnings, given back once, never in two places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import Misuse
from kvferry.reference.engine.blocks import BlockAllocation, Blocks

SIZE = 4


def take(blocks: Blocks, prompt: list[int], extra: int = 0) -> BlockAllocation:
    allocation = blocks.allocate(prompt, len(prompt) + extra, reuse=len(prompt))
    assert allocation is not None
    blocks.check()
    return allocation


def fill(blocks: Blocks, prompt: list[int], extra: int = 0) -> BlockAllocation:
    allocation = take(blocks, prompt, extra)
    blocks.publish(allocation, prompt)
    blocks.check()
    return allocation


def test_an_equal_beginning_is_shared_up_to_the_last_full_page() -> None:
    blocks = Blocks(8, SIZE)
    one = fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    two = take(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert two.prefix == 8
    assert two.pages[:2] == one.pages[:2]
    assert two.pages[2] != one.pages[2]
    assert blocks.num_used == 4


def test_equal_tokens_behind_another_beginning_are_not_shared() -> None:
    blocks = Blocks(8, SIZE)
    fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert take(blocks, [0, 2, 3, 4, 5, 6, 7, 8]).prefix == 0
    assert take(blocks, [5, 6, 7, 8]).prefix == 0


def test_pages_survive_their_request_until_the_room_is_needed() -> None:
    blocks = Blocks(4, SIZE)
    old = fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.release(old)
    assert blocks.num_used == 0
    again = take(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (again.prefix, again.pages) == (8, old.pages)
    blocks.release(again)
    # Three of four pages: the end of the old prompt goes before its beginning.
    blocks.release(take(blocks, list(range(20, 32))))
    assert take(blocks, [1, 2, 3, 4, 5, 6, 7, 8]).prefix == 4


def test_unpublished_pages_are_not_shared() -> None:
    blocks = Blocks(8, SIZE)
    take(blocks, [1, 2, 3, 4])
    assert take(blocks, [1, 2, 3, 4]).prefix == 0


def test_reuse_bounds_what_is_shared() -> None:
    blocks = Blocks(8, SIZE)
    fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    allocation = blocks.allocate([1, 2, 3, 4, 5, 6, 7, 8], 8, reuse=7)
    assert allocation is not None
    assert allocation.prefix == 4


def test_two_requests_with_equal_contents_share_one_copy_later() -> None:
    blocks = Blocks(8, SIZE)
    one, two = take(blocks, [1, 2, 3, 4]), take(blocks, [1, 2, 3, 4])
    for allocation in (one, two):
        blocks.publish(allocation, [1, 2, 3, 4])
        blocks.check()
    three = take(blocks, [1, 2, 3, 4])
    assert three.pages == one.pages
    for allocation in (one, two, three):
        blocks.release(allocation)
        blocks.check()
    assert blocks.num_used == 0


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    blocks = Blocks(4, SIZE)
    allocation = take(blocks, [1, 2, 3])
    blocks.release(allocation)
    with pytest.raises(Misuse, match="once"):
        blocks.release(allocation)
    blocks.check()
    assert blocks.num_used == 0


def test_too_few_pages_change_nothing() -> None:
    blocks = Blocks(4, SIZE)
    take(blocks, [1])
    assert blocks.allocate([2], 13, reuse=1) is None
    blocks.check()
    assert blocks.num_used == 1


def test_kept_pages_that_a_request_shares_are_not_counted_as_free_for_it() -> None:
    """Four kept pages, all of them the request's own prefix: there is no fifth."""
    blocks = Blocks(4, SIZE)
    prompt = list(range(16))
    blocks.release(fill(blocks, prompt))
    assert blocks.allocate([*prompt, 99], 17, reuse=16) is None
    blocks.check()
    assert take(blocks, prompt).prefix == 16


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("take"),
                # Few tokens, so that beginnings are often equal.
                st.lists(st.integers(0, 1), min_size=1, max_size=14),
                st.integers(0, 6),
            ),
            st.tuples(st.just("drop"), st.integers(0, 20), st.just(0)),
        ),
        max_size=40,
    )
)
def test_every_page_is_in_one_place_whatever_happens(
    steps: list[tuple[str, list[int] | int, int]],
) -> None:
    blocks = Blocks(9, SIZE)
    live: list[tuple[list[int], BlockAllocation]] = []
    contents: dict[int, list[int]] = {}
    for _, what, extra in steps:
        if isinstance(what, int):
            if live:
                blocks.release(live.pop(what % len(live))[1])
        elif allocation := blocks.allocate(what, len(what) + extra, reuse=len(what)):
            shared = allocation.prefix // SIZE
            for i, page in enumerate(allocation.pages[:shared]):
                assert contents[page] == what[: (i + 1) * SIZE]
            for i, page in enumerate(allocation.pages[shared:], shared):
                assert all(page not in other.pages for _, other in live)
                contents[page] = what[: (i + 1) * SIZE]
            blocks.publish(allocation, what)
            live.append((what, allocation))
        blocks.check()
        assert blocks.num_used == len({page for _, a in live for page in a.pages})
    for _, allocation in live:
        blocks.release(allocation)
    blocks.check()
    assert blocks.num_used == 0


@pytest.mark.parametrize("size", [4, 16, 24, 64])
@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(20, 190)), max_size=12
    ),
    asked=st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(0, 190)),
)
def test_what_is_held_of_a_chain_has_its_tokens(
    size: int, history: list[tuple[int, int, int]], asked: tuple[int, int, int]
) -> None:
    """Also if pages between were evicted, and if two sequences differ within a page."""
    blocks = Blocks(640 // size, size)
    contents: dict[int, tuple[int, ...]] = {}
    for kind, shared, length in history:
        tokens = sequence(kind, shared, length)
        if (allocation := blocks.allocate(tokens, length, reuse=length)) is None:
            continue
        for number in range(allocation.prefix // size, length // size):
            contents[allocation.pages[number]] = tokens[: (number + 1) * size]
        blocks.publish(allocation, tokens)
        blocks.release(allocation)
    tokens = sequence(*asked)
    held, digest = blocks.hold(blocks.chain_of(tokens).short)
    blocks.check()
    assert 0 <= held.prefix <= len(tokens)
    assert digest == (blocks.chain_of(tokens).digest(held.prefix) if held.prefix else b"")
    for number, page in enumerate(held.pages):
        end = min((number + 1) * size, held.prefix)
        assert contents[page][:end] == tokens[:end]
    assert blocks.num_used == len(held.pages) == blocks.pages_for(held.prefix)
    blocks.release(held)
    blocks.check()
    assert blocks.num_used == 0


def sequence(kind: int, shared: int, length: int) -> tuple[int, ...]:
    """Sequences of all kinds begin alike."""
    return tuple(i % 7 if i < shared else 10 * kind + i % 5 for i in range(length))


def test_all_full_pages_of_a_sequence_are_held() -> None:
    for size, held_tokens in ((4, 96), (16, 96), (24, 96), (64, 64)):
        blocks, tokens = Blocks(40, size), tuple(range(100))
        blocks.release(fill(blocks, list(tokens)))
        held, _ = blocks.hold(blocks.chain_of((*tokens, *range(60))).short)
        assert held.prefix == held_tokens
        # Half of what is held, and another end.
        held, _ = blocks.hold(blocks.chain_of((*tokens[:50], *range(60))).short)
        assert held.prefix == 48
        held, _ = blocks.hold(blocks.chain_of(tokens[1:60]).short)
        assert held.pages == []


def test_what_is_held_is_not_evicted() -> None:
    blocks, tokens = Blocks(4, 16), tuple(range(64))
    blocks.release(fill(blocks, list(tokens)))
    held, _ = blocks.hold(blocks.chain_of(tokens[:32]).short)
    blocks.release(take(blocks, list(range(500, 532))))
    assert blocks.allocate([1], 48, reuse=1) is None
    blocks.release(held)
    assert take(blocks, list(tokens[:32])).prefix == 32
