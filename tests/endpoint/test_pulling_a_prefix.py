"""Instances that are source and target at once pull cached prefixes from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from endpoint.caching import WAIT_S, CachingInstance, chain_of
from endpoint.fleets import eventually

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.lookups import PrefixQuery
from kvferry.endpoint.rank_agreement import RankAgreement
from kvferry.errors import InputError
from kvferry.prefix import PrefixChain
from kvferry.protocol.outcome import Done, Failure, FailureCode

FIRST = list(range(100))
# Another turn of the conversation that begins with FIRST.
SECOND = [*FIRST, *range(500, 560)]
# The same with a part of its history removed.
STRIPPED = [*FIRST[:50], *FIRST[70:], *range(500, 560)]


@pytest.fixture(params=[(1, 16, 2, 4), (2, 4, 1, 64)], ids=["tp1-tp2", "tp2-tp1"])
def two(request: pytest.FixtureRequest) -> Iterator[tuple[CachingInstance, CachingInstance]]:
    tp, page, other_tp, other_page = request.param
    with (
        CachingInstance("a", tp=tp, page=page) as one,
        CachingInstance("b", tp=other_tp, page=other_page) as other,
    ):
        yield one, other


def pulled(handles: list[Incoming]) -> int:
    """Return the tokens that every rank has got."""
    agreement = RankAgreement(len(handles))
    for rank, handle in enumerate(handles):
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Done), outcome
        handle.wait_released(WAIT_S)
        agreement.end(rank, outcome)
    assert {handle.num_tokens for handle in handles} == {agreement.pulled}
    return agreement.pulled


def check(
    instance: CachingInstance, pages: list[int], tokens: Sequence[int], first: int, end: int
) -> None:
    """Check that exactly the tokens from ``first`` to ``end`` are in the pages of every rank."""
    for rank in instance.ranks:
        assert np.array_equal(rank.at(pages, first, end), rank.expected(tokens)[:, :, first:end])
        size = instance.layout.page_tokens * len(pages)
        assert not rank.at(pages, 0, first).any()
        assert not rank.at(pages, end, size).any()


def unpinned(instance: CachingInstance) -> bool:
    return all(out.released for outs in instance.pinned.values() for out in outs)


def test_the_longest_common_prefix_arrives(two: tuple[CachingInstance, CachingInstance]) -> None:
    holder, asker = two
    holder.cache(FIRST)
    holder.cache(STRIPPED)
    handles, pages = asker.pull("turn-2", holder, SECOND)
    assert pulled(handles) == 96
    check(asker, pages, SECOND, 0, 96)
    assert {handle.metadata for handle in handles} == {b"held"}
    eventually(lambda: unpinned(holder))
    assert len(holder.queries) == 1, "one answer for all ranks"
    assert (holder.queries[0].tokens, holder.queries[0].prefix) == (160, 0)
    assert 0 < holder.queries[0].deadline_s <= WAIT_S


def test_a_changed_history_cuts_the_pull(two: tuple[CachingInstance, CachingInstance]) -> None:
    holder, asker = two
    holder.cache(SECOND)
    handles, pages = asker.pull("turn-3", holder, STRIPPED)
    assert pulled(handles) == 48
    check(asker, pages, STRIPPED, 0, 48)


def test_only_what_is_missing_travels(two: tuple[CachingInstance, CachingInstance]) -> None:
    holder, asker = two
    holder.cache(SECOND)
    handles, pages = asker.pull("rest", holder, SECOND, prefix=100)
    assert pulled(handles) == 160
    check(asker, pages, SECOND, 100, 160)
    eventually(lambda: unpinned(holder))
    carried = sum(sum(out.carried.values()) for outs in holder.pinned.values() for out in outs)
    token_bytes = sum(rank.expected([0]).nbytes for rank in asker.ranks)
    assert carried == 60 * token_bytes


@pytest.mark.parametrize("prefix", [0, 96, 97])
def test_a_holder_without_more_answers_at_once(
    two: tuple[CachingInstance, CachingInstance], prefix: int
) -> None:
    holder, asker = two
    if prefix:
        holder.cache(FIRST)
    handles, pages = asker.pull("nothing", holder, SECOND, prefix=prefix)
    assert pulled(handles) == 0
    assert {handle.outcome for handle in handles} == {Done(pulled=0)}
    check(asker, pages, SECOND, 0, 0)
    assert holder.pinned == {}


def test_a_source_without_a_look_up_holds_nothing(
    two: tuple[CachingInstance, CachingInstance],
) -> None:
    _, asker = two
    with CachingInstance("c", tp=1, page=16, answers=False) as third:
        third.cache(FIRST)
        handles, _ = asker.pull("unasked", third, FIRST)
        assert pulled(handles) == 0
        assert third.queries == []


def test_both_pull_from_each_other_at_once(two: tuple[CachingInstance, CachingInstance]) -> None:
    one, other = two
    one.cache(FIRST)
    other.cache(SECOND[60:])
    rooms = [
        (one, other, one.pull(f"to-a-{n}", other, SECOND[60:]), SECOND[60:]) for n in range(2)
    ] + [(other, one, other.pull(f"to-b-{n}", one, FIRST), FIRST) for n in range(2)]
    for asker, _, (handles, pages), tokens in rooms:
        assert pulled(handles) == 96
        check(asker, pages, tokens, 0, 96)
    eventually(lambda: unpinned(one) and unpinned(other))


def test_a_holder_of_another_sequence_is_refused(
    two: tuple[CachingInstance, CachingInstance],
) -> None:
    """The salt differs, but the holder answers as if it did not."""
    holder, asker = two
    holder.cache(FIRST, extra={"salt": "another tenant"})
    tokens, _, pages = holder.cached.pop()

    class Lying(PrefixChain):
        def common_tokens(self, asked: bytes) -> int:
            return 96

    salted = chain_of(FIRST, extra={"salt": "another tenant"})
    lying = Lying(salted._digests)
    holder.cached.append((tokens, lying, pages))
    handles, _ = asker.pull("lies", holder, FIRST)
    codes = {failure.code for h in handles if isinstance(failure := h.wait(WAIT_S), Failure)}
    assert FailureCode.CONTENT_DIFFERS in codes
    for handle in handles:
        handle.abort()
        handle.wait_released(WAIT_S)
        assert handle.num_tokens == 0
        assert handle.bad_pages["kv"]
    eventually(lambda: unpinned(holder))


def test_a_pull_that_is_given_up_is_unpinned(two: tuple[CachingInstance, CachingInstance]) -> None:
    holder, asker = two
    holder.cache(FIRST)
    holder.may_answer.clear()
    handles, _ = asker.pull("given-up", holder, FIRST)
    assert holder.asked.wait(WAIT_S)
    for handle in handles:
        handle.abort()
        assert isinstance(handle.wait(WAIT_S), Failure)
        handle.wait_released(WAIT_S)
    holder.may_answer.set()
    eventually(lambda: bool(holder.pinned) and unpinned(holder))


def test_a_look_up_that_raises_holds_nothing(
    two: tuple[CachingInstance, CachingInstance], caplog: pytest.LogCaptureFixture
) -> None:
    holder, asker = two

    def broken(query: PrefixQuery) -> int:
        raise OSError("the index is gone")

    holder.ranks[0].source.on_pull(broken)
    handles, _ = asker.pull("broken", holder, FIRST)
    assert pulled(handles) == 0
    assert "lookup-failed endpoint=a/0 room='broken'" in caplog.text
    holder.ranks[0].source.on_pull(lambda query: 17)
    handles, _ = asker.pull("odd", holder, FIRST)
    assert pulled(handles) == 0
    assert "return a multiple of 16" in caplog.text


def test_a_pull_of_less_than_a_span_is_refused(
    two: tuple[CachingInstance, CachingInstance],
) -> None:
    holder, asker = two
    with pytest.raises(InputError, match="pull at least 16 tokens"):
        asker.pull("short", holder, FIRST[:15])
