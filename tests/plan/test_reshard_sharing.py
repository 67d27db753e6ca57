"""Tests that replicas share the work, and that adjacent moves are joined."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from moving import plan_of
from oracle import assert_exactly_once

from kvferry.layout import (
    ALL_TOKENS,
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
    Tokens,
    attention,
)
from kvferry.layout.spec import DType
from kvferry.plan import Plan, Request, check, reshard
from kvferry.testing.strategies import pairs


def share_of(tokens: Tokens) -> Fraction:
    return Fraction(tokens.pattern.density, tokens.pattern.period)


def weights(plan: Plan, group: Group) -> list[Fraction]:
    """Return what each source sends of a group: layers × units × share of the tokens."""
    loads = [Fraction(0)] * plan.source.num_ranks
    for move in plan.moves:
        if move.group == group.name:
            cells = len(group.layers_in(move.layers)) * len(move.units)
            loads[move.source] += cells * share_of(move.tokens)
    return loads


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


def test_replicas_alternate_if_layers_are_few() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1)
    plan = plan_of(spec, Parallel(tp=4), Parallel(cp=8))
    assert [move.source for move in plan.moves] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_state_rows_are_not_split_by_context_parallelism() -> None:
    group = Group("s", StateRow(), (0, 1), 2, (Tensor("s", DType.FLOAT32, 3),))
    plan = plan_of(CacheSpec(2, (group,)), Parallel(tp=2, cp=2), Parallel(cp=3))
    assert all(move.tokens == ALL_TOKENS for move in plan.moves)
    assert_exactly_once(plan, Request(9))


@pytest.mark.parametrize(
    ("source", "target", "layers", "heads"),
    [
        (Parallel(tp=4), Parallel(tp=2, pp=4), 4, 2),
        (Parallel(tp=8), Parallel(tp=4, pp=8), 8, 4),
        (Parallel(tp=2), Parallel(cp=8), 3, 1),
    ],
)
def test_uneven_shares_of_one_cell_are_balanced_in_the_next(
    source: Parallel, target: Parallel, layers: int, heads: int
) -> None:
    spec = attention(layers=layers, kv_heads=heads, head_dim=1)
    loads = weights(plan_of(spec, source, target), spec.groups[0])
    assert max(loads) == min(loads) > 0


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_equal_sources_differ_by_one_layer_of_one_cell(
    pair: tuple[Layout, Layout],
) -> None:
    plan = reshard(*pair)
    for group in plan.spec.groups:
        loads = weights(plan, group)
        alike: dict[frozenset[Shard], list[Fraction]] = {}
        for rank, shards in enumerate(plan.held):
            mine = frozenset(shard for shard in shards if shard.group == group.name)
            alike.setdefault(mine, []).append(loads[rank])
        for mine, shared in alike.items():
            widest = max((len(shard.units) for shard in mine), default=0)
            parts = (share_of(move.tokens) for move in plan.moves if move.group == group.name)
            assert max(shared) - min(shared) <= widest * max(parts, default=1)


# ---------------------------------------------------------------- joining


def sparse(*layers: int) -> CacheSpec:
    tensors = (Tensor("k", DType.INT8, 1),)
    return CacheSpec(layers[-1] + 1, (Group("kv", Paged(), layers, 2, tensors),))


def others_cut_at(layer: int, end: int) -> ExplicitSharding:
    """Return a sharding in which rank 0 holds unit 0, and the others cut unit 1 at ``layer``."""
    return ExplicitSharding(
        (
            (Shard("kv", Span(0, end), Span(0, 1)),),
            (Shard("kv", Span(0, layer), Span(1, 2)),),
            (Shard("kv", Span(layer, end), Span(1, 2)),),
        )
    )


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 3), (1, 3), (0, 2, 3)])
def test_moves_cut_by_other_ranks_are_joined(layers: tuple[int, ...]) -> None:
    """They are joined even across layers that the group does not have."""
    plan = plan_of(sparse(*layers), Parallel(), others_cut_at(2, 4))
    assert [move.target for move in plan.moves] == [0, 1, 2]
    assert plan.moves[0].layers == Span(layers[0], 4)
    assert_exactly_once(plan, Request(1))


def test_moves_with_another_sources_layers_between_are_not_joined() -> None:
    """Two replicas alternate, so each sends every other layer to the same target."""
    tensors = (Tensor("k", DType.INT8, 1),)
    spec = CacheSpec(4, (Group("kv", Paged(), (0, 1, 2, 3), 2, tensors),))
    plan = plan_of(spec, ExplicitSharding(((Shard("kv", Span(0, 4), Span(0, 2)),),) * 2),
                   others_cut_at(2, 4))  # fmt: skip
    mine = [(move.source, move.layers) for move in plan.moves if move.target == 0]
    assert mine == [(0, Span(0, 1)), (0, Span(2, 3)), (1, Span(1, 2)), (1, Span(3, 4))]
    check(plan)
