"""Statistics of replies."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.stats import Range, Spread, spread, summarise, tpot_s


def test_percentiles_lie_between_neighbours() -> None:
    assert spread([3.0]) == Spread(3.0, 3.0)
    assert spread([1.0, None, 2.0]) == Spread(1.5, 1.99)
    assert spread([0.0, 50.0, 100.0]) == Spread(50.0, 99.0)


@given(st.lists(st.floats(0, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = spread(values)
    assert found is not None
    assert [found.p50, found.p99] == pytest.approx([cuts[49], cuts[98]])


def answered(
    began: float, ttft_s: float, total_s: float, tokens: int, **fields: object
) -> LoadReply:
    usage = {"completion_tokens": tokens, "prompt_tokens": 10}
    reply = LoadReply(began=began, total_s=total_s, usage=usage, finish="length")
    reply.stamps = [ttft_s, total_s]
    reply.report = dict(fields)
    return reply


def test_tpot_leaves_out_the_first_token() -> None:
    assert tpot_s(answered(0, 1.0, 4.0, 4)) == 1.0
    assert tpot_s(answered(0, 1.0, 4.0, 1)) is None
    whole = answered(0, 4.0, 4.0, 4)
    whole.stamps = [4.0]
    assert tpot_s(whole) is None
    assert tpot_s(LoadReply()) is None


def test_a_level_counts_what_was_answered() -> None:
    replies = [
        answered(100.0, 1.0, 4.0, 4, bytes=7, mode="slices"),
        answered(101.0, 3.0, 9.0, 4, bytes=5, mode="slices"),
        LoadReply(began=102.0, total_s=6.0, error="gone"),
        LoadReply(began=102.0, total_s=1.0, error="later"),
    ]
    level = summarise(2, replies)
    assert (level.requests, level.failed, level.first_failure) == (4, 2, "gone")
    assert level.seconds == 10.0
    assert (level.requests_per_s, level.output_tokens_per_s) == (0.2, 0.8)
    assert level.ttft_s == spread([1.0, 3.0])
    assert level.tpot_s == spread([1.0, 2.0])
    assert level.total_s == spread([4.0, 9.0])
    assert (level.prompt_tokens, level.output_tokens) == (Range(10, 10), Range(4, 4))
    assert level.carried_bytes == 12


def test_a_level_without_replies() -> None:
    for replies in ([], [LoadReply(began=1.0, error="gone")]):
        level = summarise(1, replies)
        assert (level.ttft_s, level.tpot_s, level.total_s) == (None, None, None)
        assert (level.prompt_tokens, level.carried_bytes) == (None, None)
        assert (level.requests_per_s, level.output_tokens_per_s) == (0.0, 0.0)


def test_a_range_of_one_value_is_that_value() -> None:
    assert (str(Range(4, 4)), str(Range(3, 4))) == ("4", "3 to 4")
