"""Tests that ``check`` rejects every kind of broken plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from moving import every_nth, plan_of
from msgspec.structs import replace

from kvferry.errors import BrokenPlan
from kvferry.layout import ExplicitSharding, Layout, Parallel, Shard, Span, Tokens, attention
from kvferry.plan import Move, Plan, check, reshard


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
    "late tokens are left out": lambda m: (replace(m[0], tokens=every_nth(0, 100, 2)), *m[1:]),
    "early tokens are left out": lambda m: (replace(m[0], tokens=every_nth(2, None, 2)), *m[1:]),
    "every other token is left out": lambda m: (
        replace(m[0], tokens=every_nth(0, None, 4)),
        *m[1:],
    ),
    "a move is empty": lambda m: (replace(m[0], units=Span(0, 0)), *m),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_rejects_a_plan_that(name: str) -> None:
    plan = good_plan()
    with pytest.raises(BrokenPlan):
        check(broken(plan, *BREAKS[name](plan.moves)))


# ---------------------------------------------------------------- ends and strides of tokens

Moves = tuple[Move, ...]


def shares(*tokens: Tokens) -> ExplicitSharding:
    """Return a sharding with a rank for each token set, with all layers and units."""
    return ExplicitSharding(
        tuple((Shard("kv", Span(0, 2), Span(0, 1), share),) for share in tokens)
    )


def swapped(plan: Plan, index: int, **changes: object) -> Plan:
    moves = list(plan.moves)
    moves[index] = replace(moves[index], **changes)
    return broken(plan, *moves)


def spans_plan() -> Plan:
    """Return a plan from one source with everything to targets with these token sets."""
    spec = attention(layers=2, kv_heads=1, head_dim=1)
    plan = plan_of(spec, Parallel(), shares(Tokens(0, 10), Tokens(10, 30), Tokens(30, None)))
    assert [move.tokens for move in plan.moves] == [
        Tokens(0, 10),
        Tokens(10, 30),
        Tokens(30, None),
    ]
    return plan


@pytest.mark.parametrize("tokens", [Tokens(10, 29), Tokens(11, 30), every_nth(10, 30, 2)])
def test_span_short_by_a_token_is_rejected(tokens: Tokens) -> None:
    with pytest.raises(BrokenPlan, match="0 times, not 1"):
        check(swapped(spans_plan(), 1, tokens=tokens))


@pytest.mark.parametrize("tokens", [Tokens(10, 31), Tokens(9, 30), Tokens(10, None)])
def test_span_that_is_too_long_is_rejected(tokens: Tokens) -> None:
    with pytest.raises(BrokenPlan, match="its target holds"):
        check(swapped(spans_plan(), 1, tokens=tokens))


def test_gap_far_from_the_beginning_is_detected() -> None:
    """It shows only at the end of the first half and at the start of the second."""
    plan = spans_plan()
    late = replace(plan.moves[2], tokens=Tokens(30, 1000))
    rest = replace(plan.moves[2], tokens=Tokens(1001, None))
    check(broken(plan, *plan.moves[:2], late, replace(rest, tokens=Tokens(1000, None))))
    with pytest.raises(BrokenPlan, match="token 1000 0 times"):
        check(broken(plan, *plan.moves[:2], late, rest))
    with pytest.raises(BrokenPlan, match="token 999 2 times"):
        check(broken(plan, *plan.moves[:2], late, replace(rest, tokens=Tokens(999, None))))


def test_a_source_with_an_end_cannot_send_beyond_it() -> None:
    spec = attention(layers=2, kv_heads=1, head_dim=1)
    plan = plan_of(spec, shares(Tokens(0, 10), Tokens(10, None)), Parallel())
    for tokens in (Tokens(0, 11), Tokens(0, None)):
        with pytest.raises(BrokenPlan, match="its source holds"):
            check(swapped(plan, 0, tokens=tokens))
    # The end is the holder's; that the target lacks nothing does not help.
    with pytest.raises(BrokenPlan, match="its source holds"):
        check(broken(plan, replace(plan.moves[0], tokens=Tokens())))


@pytest.mark.parametrize(
    "tokens",
    [
        Tokens(1, None),  # every token, of which the source has every third
        every_nth(1, None, 2),  # a stride that is no multiple of the source's
        every_nth(0, None, 3),  # the right stride on another residue
    ],
)
def test_a_source_cannot_send_between_its_strides(tokens: Tokens) -> None:
    spec = attention(layers=2, kv_heads=1, head_dim=1)
    plan = plan_of(spec, Parallel(cp=3), Parallel())
    assert plan.moves[1].tokens == every_nth(1, None, 3)
    with pytest.raises(BrokenPlan, match="its source holds"):
        check(swapped(plan, 1, tokens=tokens))


def test_coarser_strides_are_accepted_if_complete() -> None:
    spec = attention(layers=2, kv_heads=1, head_dim=1)
    plan = plan_of(spec, Parallel(cp=2), Parallel())
    halves = [replace(plan.moves[0], tokens=every_nth(first, None, 4)) for first in (0, 2)]
    check(broken(plan, *halves, plan.moves[1]))
    with pytest.raises(BrokenPlan, match="0 times"):
        check(broken(plan, halves[0], plan.moves[1]))


def test_check_counts_only_what_a_target_holds() -> None:
    """A grid of the whole model for each target would take 16 GiB here."""
    spec = attention(layers=64, kv_heads=4096, head_dim=1)
    plan = reshard(Layout(spec, Parallel(tp=4096)), Layout(spec, Parallel(tp=4096)))
    check(plan)
    with pytest.raises(BrokenPlan, match="target 4000 would get group 'kv' layer 3 unit 4000"):
        check(swapped(plan, 4000, layers=Span(0, 3)))
