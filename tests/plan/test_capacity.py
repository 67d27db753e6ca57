"""What a load does to instances: queues against their formulas, limits, and conservation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import PRESETS, Request, estimate, reshard
from kvferry.plan.capacity import (
    MAX_TURNS,
    HandOffCost,
    Resource,
    ServingLoad,
    hand_off_cost,
    limits_of,
    predict,
)

# A hand-off of 20 ms, for all of which the prefill rank is busy.
COST = HandOffCost(0.02, 0.02, 0.001, 1 << 28, 1 << 27, 1 << 27, True)


def load(**changes: Any) -> ServingLoad:
    """A load whose only queue is the hand-off, unless changed."""
    fields = {"requests_per_s": 25.0, "num_input": 1000, "num_output": 1}
    fields |= {"num_prefill": 1, "num_decode": 1, "prefill_tokens_per_s": 1e12, "token_s": 1e-9}
    return ServingLoad(**fields | {"cache_tokens": 1 << 40} | changes)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
def test_one_link_is_a_queue_with_a_constant_service_time(share: float) -> None:
    """Pollaczek-Khinchine for M/D/1: the mean number in the system."""
    seen = predict(load(requests_per_s=share / COST.send_s), COST, num_requests=200_000)
    expected = share + share**2 / (2 * (1 - share))
    assert seen.in_flight == pytest.approx(expected, rel=0.05)
    assert seen.busy[Resource.SENDING] == pytest.approx(share)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_hand_offs_that_take_many_turns_share_the_link(share: float) -> None:
    """A shared processor: the mean number in the system is that of M/M/1 for any service time."""
    cost = COST._replace(num_turns=40)
    seen = predict(load(requests_per_s=share / COST.send_s), cost, num_requests=100_000)
    assert seen.in_flight == pytest.approx(share / (1 - share), rel=0.07)


def test_an_idle_link_adds_only_the_hand_off_itself() -> None:
    seen = predict(load(requests_per_s=0.01), COST, num_requests=2000)
    assert seen.added_s.p50 == pytest.approx(COST.alone_s)
    assert seen.link_wait_s.p99 == pytest.approx(0.0, abs=1e-6)


def test_a_busy_decode_rank_delays_hand_offs_from_different_prefills() -> None:
    cost = COST._replace(send_s=0.001, receive_s=0.02)
    few = predict(load(requests_per_s=40, num_prefill=8), cost)
    many = predict(load(requests_per_s=40, num_prefill=8, num_decode=8), cost)
    assert few.first is Resource.RECEIVING
    assert few.added_s.p99 > 2 * many.added_s.p99


def test_requests_wait_for_the_cache_of_decode() -> None:
    """Decode has room for four requests of 100 ms, so forty a second."""
    full = load(num_input=10, num_output=10, token_s=0.008, cache_tokens=80, requests_per_s=36)
    seen = predict(full, COST._replace(send_s=0.0))
    assert seen.first is Resource.CACHE
    assert seen.limits[Resource.CACHE] == pytest.approx(40)
    assert seen.decode_tokens <= 80
    assert seen.ready_s.p99 > 2 * seen.added_s.p99


def test_an_overload_is_said_and_bounded_by_the_cache() -> None:
    seen = predict(load(requests_per_s=100, cache_tokens=50 * 1001), COST, num_requests=5000)
    assert not seen.is_stable
    assert seen.first is Resource.SENDING
    assert seen.in_flight <= 50


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1, 200),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1e-4, 0.05),
    st.floats(1e-4, 0.05),
)
def test_littles_law_holds(
    rate: float, num_prefill: int, num_decode: int, send_s: float, receive_s: float
) -> None:
    """The mean number in flight is the rate times the mean time, and nothing is lost."""
    cost = HandOffCost(max(send_s, receive_s), send_s, receive_s, 1, 1, 1, False)
    one = load(requests_per_s=rate, num_prefill=num_prefill, num_decode=num_decode)
    limits = limits_of(one, cost)
    seen = predict(one, cost, num_requests=4000)
    assert seen.limits == limits
    if seen.is_stable and max(seen.busy.values()) < 0.8:
        assert seen.added_s.p50 * rate * 0.7 <= seen.in_flight <= seen.added_s.p99 * rate * 1.3


def test_equal_seeds_give_equal_predictions() -> None:
    assert predict(load(), COST, seed=3) == predict(load(), COST, seed=3)
    assert predict(load(), COST, seed=3) != predict(load(), COST, seed=4)


def test_the_cost_of_a_hand_off_is_that_of_its_busiest_ranks() -> None:
    spec = attention(layers=4, kv_heads=4, head_dim=64)
    plan = reshard(Layout(spec, Parallel(tp=4)), Layout(spec, Parallel(tp=2)))
    costs = estimate(plan, Request(1024), PRESETS["nixl-host"])
    cost = hand_off_cost(costs)
    assert cost.num_bytes == plan.payload_bytes(Request(1024))
    assert cost.sent_bytes == cost.num_bytes // 4
    assert cost.received_bytes == cost.num_bytes // 2
    assert cost.alone_s == costs.predicted_s() + costs.link_cost.room_s
    assert 0 < cost.receive_s < cost.alone_s
    assert 0 < cost.send_s <= cost.alone_s


def test_only_mapped_writes_go_one_after_the_other() -> None:
    spec = attention(layers=64, kv_heads=8, head_dim=128)
    whole, half = Layout(spec), Layout(spec, Parallel(tp=2))

    def turns(source: Layout, preset: str) -> int:
        plan = reshard(source, whole)
        return hand_off_cost(estimate(plan, Request(256), PRESETS[preset])).num_turns

    assert turns(half, "shm") == 1
    # Half the heads of a page are many pieces: 32 MiB of each source in slots of 16 MiB.
    assert turns(half, "nixl-host") == 2
    # Whole pages are written directly.
    assert turns(whole, "nixl-host") == MAX_TURNS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"requests_per_s": 0.0}, "requests_per_s must be above 0"),
        ({"num_decode": 0}, "num_decode must be at least 1"),
        ({"num_prefill": 5000}, "at most 4096 instances"),
        ({"cache_tokens": 1000}, "give a larger one"),
    ],
)
def test_an_impossible_load_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        load(**change)
