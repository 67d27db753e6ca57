"""The planner against the oracle: exhaustively where that is possible, by Hypothesis elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oracle import assert_exactly_once

from kvferry.errors import BrokenPlan, ReasonCode, Refused
from kvferry.layout import (
    ALL_TOKENS,
    CacheSpec,
    Group,
    Holding,
    Layout,
    Paged,
    Parallel,
    Slot,
    Span,
    Stated,
    Tensor,
    Tokens,
    attention,
)
from kvferry.layout.spec import DType
from kvferry.plan import Move, Plan, Request, check, reshard
from kvferry.plan.reshard import token_classes
from kvferry.testing.strategies import MAX_TOKENS, pairs


def plan_of(spec: CacheSpec, source: Parallel, target: Parallel) -> Plan:
    plan = reshard(Layout(spec, source), Layout(spec, target))
    check(plan)
    return plan


def legal(heads: int) -> list[int]:
    return [tp for tp in range(1, 17) if heads % tp == 0 or tp % heads == 0]


@pytest.mark.parametrize("heads", range(1, 17))
def test_every_tp_pair_and_every_pp_pair(heads: int) -> None:
    spec = attention(layers=5, kv_heads=heads, head_dim=1)
    for source_tp, target_tp in itertools.product(legal(heads), repeat=2):
        for source_pp, target_pp in itertools.product(range(1, 5), repeat=2):
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


# ---------------------------------------------------------------- sharing


def carried(plan: Plan) -> list[int]:
    loads = [0] * plan.source.num_ranks
    for move in plan.moves:
        loads[move.source] += plan.bytes_of(move, Request(1))
    return loads


@pytest.mark.parametrize(
    ("source_tp", "target_tp"), list(itertools.product([1, 2, 4, 8, 16], repeat=2))
)
def test_replicas_share_the_work_evenly(source_tp: int, target_tp: int) -> None:
    plan = plan_of(
        attention(layers=16, kv_heads=2, head_dim=1), Parallel(tp=source_tp), Parallel(tp=target_tp)
    )
    loads = carried(plan)
    assert max(loads) == min(loads) > 0


def test_layers_that_do_not_divide_are_shared_to_within_one_layer() -> None:
    spec = attention(layers=61, kv_heads=1, head_dim=1)
    loads = carried(plan_of(spec, Parallel(tp=8), Parallel()))
    assert max(loads) - min(loads) == spec.groups[0].unit_bytes


def test_equal_layouts_with_replicas_go_one_to_one() -> None:
    plan = plan_of(attention(layers=4, kv_heads=2, head_dim=1), Parallel(tp=8), Parallel(tp=8))
    assert [(move.source, move.target) for move in plan.moves] == [(i, i) for i in range(8)]


def test_with_too_few_layers_the_replicas_take_turns() -> None:
    spec = attention(layers=1, kv_heads=4, head_dim=1)
    plan = plan_of(spec, Parallel(tp=16), Parallel())
    assert len({move.source % 4 for move in plan.moves}) == 4


def test_state_rows_are_not_split_by_context_parallelism() -> None:
    group = Group("s", Slot(), (0, 1), 2, (Tensor("s", DType.FLOAT32, 3),))
    plan = plan_of(CacheSpec(2, (group,)), Parallel(tp=2, cp=2), Parallel(cp=3))
    assert all(move.tokens == ALL_TOKENS for move in plan.moves)
    assert_exactly_once(plan, Request(9))


# ---------------------------------------------------------------- token classes


@given(
    st.lists(
        st.builds(
            lambda first, length, step: Tokens(
                first, None if length is None else first + length, step
            ),
            st.integers(0, 9),
            st.none() | st.integers(1, 20),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_token_classes_partition_and_never_straddle(sets: list[Tokens]) -> None:
    classes = token_classes(sets, "g")
    for token in range(60):
        mine = [c for c in classes if token in c]
        assert len(mine) == 1
        for tokens in sets:
            assert (token in tokens) == (mine[0].first in tokens)


# ---------------------------------------------------------------- what is refused


def refusal(source: Layout, target: Layout) -> list[ReasonCode]:
    with pytest.raises(Refused) as caught:
        reshard(source, target)
    return [reason.code for reason in caught.value.reasons]


def half(units: Span) -> Layout:
    spec = attention(layers=2, kv_heads=4, head_dim=1)
    return Layout(spec, Stated(((Holding("kv", Span(0, 2), units),),)))


def test_a_source_that_lacks_heads_is_refused() -> None:
    whole = Layout(attention(layers=2, kv_heads=4, head_dim=1))
    assert refusal(half(Span(0, 3)), whole) == [ReasonCode.INCOMPLETE]


def test_a_target_that_lacks_heads_is_refused() -> None:
    whole = Layout(attention(layers=2, kv_heads=4, head_dim=1))
    assert refusal(whole, half(Span(1, 4))) == [ReasonCode.INCOMPLETE]


def test_an_absurd_interleaving_is_refused_quickly() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1)
    sides = (Layout(spec, Parallel(cp=251)), Layout(spec, Parallel(cp=241)))
    assert refusal(*sides) == [ReasonCode.TOO_LARGE]


# ---------------------------------------------------------------- the proof can fail


def good_plan() -> Plan:
    spec = attention(layers=4, kv_heads=4, head_dim=1)
    return plan_of(spec, Parallel(tp=2, cp=2), Parallel(tp=4))


def broken(plan: Plan, *moves: Move) -> Plan:
    return Plan(plan.source, plan.target, tuple(moves))


BREAKS: dict[str, Callable[[tuple[Move, ...]], tuple[Move, ...]]] = {
    "a move is missing": lambda m: m[1:],
    "a move comes twice": lambda m: (*m, m[0]),
    "two moves overlap by a unit": lambda m: (*m, replace(m[0], layers=Span(0, 1))),
    "the source does not hold it": lambda m: (replace(m[0], source=3), *m[1:]),
    "the source does not exist": lambda m: (replace(m[0], source=99), *m[1:]),
    "the target does not want it": lambda m: (replace(m[0], target=3), *m[1:]),
    "the source index is off": lambda m: (replace(m[0], source_unit=1), *m[1:]),
    "the target index is off": lambda m: (replace(m[0], target_unit=1), *m[1:]),
    "a layer is left out": lambda m: (replace(m[0], layers=Span(1, 4)), *m[1:]),
    "a token class is doubled": lambda m: (replace(m[0], tokens=Tokens()), *m[1:]),
    "late tokens are left out": lambda m: (replace(m[0], tokens=Tokens(0, 100, 2)), *m[1:]),
    "early tokens are left out": lambda m: (replace(m[0], tokens=Tokens(2, None, 2)), *m[1:]),
    "every other token is left out": lambda m: (replace(m[0], tokens=Tokens(0, None, 4)), *m[1:]),
    "a move is empty": lambda m: (replace(m[0], units=Span(0, 0)), *m),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_notices_when(name: str) -> None:
    plan = good_plan()
    with pytest.raises(BrokenPlan):
        check(broken(plan, *BREAKS[name](plan.moves)))


# ---------------------------------------------------------------- plans as values


def test_plans_compare_by_content_and_print_well() -> None:
    one, two = good_plan(), good_plan()
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest
    assert repr(one) == f"<Plan TP2·CP2 → TP4, 8 moves, {one.digest[:12]}>"
    assert "0 (cp0 tp0)" in str(one)
    assert one != broken(one, *one.moves[1:])


def test_the_digest_depends_on_what_travels_and_not_on_paging() -> None:
    spec = attention(layers=4, kv_heads=4, head_dim=8)
    wide = attention(layers=4, kv_heads=4, head_dim=16)

    def digest(spec: CacheSpec, tp: int, page: int) -> str:
        return reshard(Layout(spec, Parallel(tp=tp), page_tokens=page), Layout(spec)).digest

    assert digest(spec, 2, 16) == digest(spec, 2, 64)
    assert len({digest(spec, 2, 16), digest(spec, 4, 16), digest(wide, 2, 16)}) == 3


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
    state = Group("s", Slot(), (0, 2), 8, (Tensor("s", DType.FLOAT32, 1),))
    plan = plan_of(CacheSpec(4, (kv, state)), Parallel(tp=4, pp=2), Parallel(tp=8))
    assert_exactly_once(plan, Request(5))
