"""Tests of the planner against the oracle: exhaustive where possible, else by Hypothesis."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import plan_of
from oracle import assert_exactly_once

from kvferry.errors import ReasonCode, Refused
from kvferry.layout import (
    CacheSpec,
    ExplicitSharding,
    Group,
    Layout,
    Paged,
    Parallel,
    Shard,
    Span,
    StateRow,
    Tensor,
    attention,
)
from kvferry.layout.spec import DType
from kvferry.plan import Plan, Request, check, reshard
from kvferry.testing.strategies import MAX_TOKENS, pairs


def legal(heads: int) -> list[int]:
    return [tp for tp in range(1, 17) if heads % tp == 0 or tp % heads == 0]


@pytest.mark.parametrize(
    ("heads", "source_tp"), [(heads, tp) for heads in range(1, 17) for tp in legal(heads)]
)
def test_every_tp_pair_and_every_pp_pair(heads: int, source_tp: int) -> None:
    """Each TP pair with every PP size of both sides; four TP pairs have all PP pairs together."""
    spec = attention(layers=5, kv_heads=heads, head_dim=1)
    for number, target_tp in enumerate(legal(heads)):
        for source_pp in range(1, 5):
            target_pp = (source_tp + number + source_pp) % 4 + 1
            plan = plan_of(
                spec,
                Parallel(tp=source_tp, pp=source_pp),
                Parallel(tp=target_tp, pp=target_pp),
            )
            assert_exactly_once(plan, Request(1))


@pytest.mark.parametrize(("source_cp", "target_cp"), list(itertools.product(range(1, 7), repeat=2)))
def test_every_cp_pair(source_cp: int, target_cp: int) -> None:
    spec = attention(layers=3, kv_heads=2, head_dim=1)
    plan = plan_of(spec, Parallel(tp=2, cp=source_cp), Parallel(tp=4, pp=2, cp=target_cp))
    for request in (Request(1), Request(61), Request(61, 17), Request(61, 60), Request(61, 61)):
        assert_exactly_once(plan, request)


@settings(max_examples=300, deadline=None)
@given(pairs(), st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS))
def test_any_layout_to_any_layout(pair: tuple[Layout, Layout], tokens: int, prefix: int) -> None:
    plan = reshard(*pair)
    check(plan)
    assert_exactly_once(plan, Request(tokens, min(tokens, prefix)))


# ---------------------------------------------------------------- refusals


def refusal(source: Layout, target: Layout) -> list[ReasonCode]:
    with pytest.raises(Refused) as caught:
        reshard(source, target)
    return [reason.code for reason in caught.value.reasons]


def half(units: Span) -> Layout:
    spec = attention(layers=2, kv_heads=4, head_dim=1)
    return Layout(spec, ExplicitSharding(((Shard("kv", Span(0, 2), units),),)))


def test_a_source_that_lacks_heads_is_refused() -> None:
    whole = Layout(attention(layers=2, kv_heads=4, head_dim=1))
    assert refusal(half(Span(0, 3)), whole) == [ReasonCode.INCOMPLETE]


def test_a_target_that_lacks_heads_is_refused() -> None:
    whole = Layout(attention(layers=2, kv_heads=4, head_dim=1))
    assert refusal(whole, half(Span(1, 4))) == [ReasonCode.INCOMPLETE]


def test_absurd_interleaving_is_refused_quickly() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1)
    sides = (Layout(spec, Parallel(cp=251)), Layout(spec, Parallel(cp=241)))
    assert refusal(*sides) == [ReasonCode.TOO_LARGE]


# ---------------------------------------------------------------- plans as values


def test_plans_compare_by_content_and_print_well() -> None:
    spec = attention(layers=4, kv_heads=4, head_dim=1)
    one, two = (plan_of(spec, Parallel(tp=2, cp=2), Parallel(tp=4)) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest
    assert repr(one) == f"<Plan TP2·CP2 → TP4, 8 moves, {one.digest[:12]}>"
    assert "0 (cp0 tp0)" in str(one)
    assert one != Plan(one.source, one.target, one.moves[1:])


def test_digest_depends_on_moves_and_not_on_paging() -> None:
    spec = attention(layers=4, kv_heads=4, head_dim=8)
    wide = attention(layers=4, kv_heads=4, head_dim=16)

    def digest(spec: CacheSpec, tp: int, page: int) -> str:
        return reshard(Layout(spec, Parallel(tp=tp), page_tokens=page), Layout(spec)).digest

    assert digest(spec, 2, 16) == digest(spec, 2, 64)
    assert len({digest(spec, 2, 16), digest(spec, 4, 16), digest(wide, 2, 16)}) == 3


def test_digest_depends_on_rank_counts_even_if_moves_are_equal() -> None:
    spec = attention(layers=2, kv_heads=2, head_dim=1)
    whole = Shard("kv", Span(0, 2), Span(0, 2))
    one, idle = Layout(spec), Layout(spec, ExplicitSharding(((whole,), ())))
    plans = [Plan(*sides, reshard(one, one).moves) for sides in ((one, one), (idle, one))]
    plans.append(Plan(one, idle, plans[0].moves))
    for plan in plans:
        check(plan)
    assert len({plan.digest for plan in plans}) == 3


def test_pairs_and_payload_are_read_from_the_plan() -> None:
    spec = attention(layers=64, kv_heads=8, head_dim=128)
    plan = plan_of(spec, Parallel(tp=4), Parallel(tp=2))
    assert plan.sources_of(1) == (2, 3)
    assert plan.targets_of(2) == (1,)
    assert plan.between(0, 1) == ()
    assert plan.payload_bytes(Request(8192)) == 2 * 64 * 8 * 128 * 2 * 8192
    assert plan.payload_bytes(Request(8192, 8192)) == 0


def test_groups_follow_their_own_units() -> None:
    kv = Group("kv", Paged(), (1, 3), 2, (Tensor("k", DType.BFLOAT16, 1),))
    state = Group("s", StateRow(), (0, 2), 8, (Tensor("s", DType.FLOAT32, 1),))
    plan = plan_of(CacheSpec(4, (kv, state)), Parallel(tp=4, pp=2), Parallel(tp=8))
    assert_exactly_once(plan, Request(5))
