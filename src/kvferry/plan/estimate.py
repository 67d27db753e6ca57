"""What a plan would cost for one request, before any page is allocated.

Page tables are made up: either no two pages of the request are neighbours,
which is what a busy server has, or all of them are. The pieces are then counted
by the same binding that moves real bytes. All ranks get the same made-up pages,
so moves that are alike in size and position fall apart alike and are bound once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard, find_shard
from kvferry.layout.pages import local_tokens
from kvferry.plan.bind import PagedView, RankPair, bind
from kvferry.plan.choose import BlockShape, Choice, TransferMode, choose, shape_of
from kvferry.plan.cost import LinkCost
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Move, Plan, Request

# Pages that an estimate looks at, over all moves that differ: two seconds at most.
MAX_PAGE_VISITS = 1 << 23


class MoveEstimate(NamedTuple):
    """One move of the request, with its chosen mode."""

    move: Move
    shape: BlockShape
    choice: Choice


class Estimate(NamedTuple):
    """Every move that carries something, and the request as a whole."""

    moves: tuple[MoveEstimate, ...]
    link_cost: LinkCost

    @property
    def num_bytes(self) -> int:
        """The payload of the request."""
        return sum(one.shape.num_bytes for one in self.moves)

    def pieces(self, mode: TransferMode) -> int:
        """Pieces the whole request would fall into on that mode."""
        match mode:
            case TransferMode.RUNS:
                return sum(one.shape.runs for one in self.moves)
            case TransferMode.SLICES:
                return sum(one.shape.slices for one in self.moves)
            case TransferMode.STAGED:
                return sum(self.link_cost.num_slots(one.shape.num_bytes) for one in self.moves)

    def is_open(self, mode: TransferMode) -> bool:
        """Whether every move could take that mode."""
        return all(mode in one.choice.seconds for one in self.moves)

    def carried(self, mode: TransferMode) -> int:
        """Bytes of the moves that chose that mode."""
        return sum(one.shape.num_bytes for one in self.moves if one.choice.mode is mode)

    @property
    def chosen(self) -> TransferMode:
        """The mode that carries the most bytes."""
        return max(TransferMode, key=self.carried)

    def predicted_s(self, mode: TransferMode | None = None) -> float:
        """Predicted seconds with every move on ``mode``, or each on its chosen one.

        Sources work side by side and a target's link is shared by all that write
        to it, so the slowest rank of either side decides.
        """
        by_source: dict[int, float] = {}
        by_target: dict[int, float] = {}
        for one in self.moves:
            move, seconds = one.move, one.choice.seconds[mode or one.choice.mode]
            wire = self.link_cost.wire_s(one.shape.num_bytes)
            by_source[move.source] = by_source.get(move.source, 0.0) + seconds
            by_target[move.target] = by_target.get(move.target, 0.0) + wire
        return max((*by_source.values(), *by_target.values()), default=0.0)


def estimate(
    plan: Plan,
    request: Request,
    link_cost: LinkCost,
    *,
    scattered: bool = True,
    override: TransferMode | None = None,
) -> Estimate:
    """Bind every move to made-up pages, choose its mode and predict its time."""
    moves = [
        (move, _likeness(plan, move, tokens))
        for move in plan.moves
        if (tokens := plan.tokens_of(move, request)).num_tokens
    ]
    examples = {likeness: move for move, likeness in moves}
    _demand_few_pages(examples)
    shapes = {one: _shape(plan, move, request, one, scattered) for one, move in examples.items()}
    choices = {one: choose(shape, link_cost, override) for one, shape in shapes.items()}
    rows = [MoveEstimate(move, shapes[one], choices[one]) for move, one in moves]
    return Estimate(tuple(rows), link_cost)


class _EstimateEnd(NamedTuple):
    """What decides how a move falls apart at one end: strides, page boundaries, pages."""

    num_units: int
    first: int
    advance: int
    pages: Span


class _Likeness(NamedTuple):
    """Moves that agree in this fall into the same number of pieces."""

    group: str
    num_layers: int
    num_units: int
    num_tokens: int
    source: _EstimateEnd
    target: _EstimateEnd


def _likeness(plan: Plan, move: Move, tokens: Tokens) -> _Likeness:
    group = plan.spec.group(move.group)
    layers = group.layers_in(move.layers)
    num_tokens = tokens.num_tokens

    def end(layout: Layout, shards: tuple[Shard, ...]) -> _EstimateEnd:
        held = find_shard(shards, move.group, layers[0])
        local = local_tokens(layout, group, held, tokens)
        return _EstimateEnd(len(held.units), local.first, local.advance, local.pages(num_tokens))

    source = end(plan.source, plan.held[move.source])
    target = end(plan.target, plan.wanted[move.target])
    return _Likeness(move.group, len(layers), len(move.units), num_tokens, source, target)


def _demand_few_pages(examples: Iterable[_Likeness]) -> None:
    """Refuse what would take minutes and gigabytes to count."""
    visits = sum(len(end.pages) for one in examples for end in (one.source, one.target))
    if visits > MAX_PAGE_VISITS:
        raise InputError(
            f"the estimate would look at {visits} pages of the request "
            f"(limit {MAX_PAGE_VISITS}); use a larger page or fewer tokens"
        )


def _shape(
    plan: Plan, move: Move, request: Request, likeness: _Likeness, scattered: bool
) -> BlockShape:
    gap = 2 if scattered else 1
    pair = RankPair(move.source, move.target)
    source = _made_up_side(plan.source, move.source, move.group, likeness.source.pages, gap)
    target = _made_up_side(plan.target, move.target, move.group, likeness.target.pages, gap)
    return shape_of(bind(plan, pair, request, source, target, moves=(move,)))


def _made_up_side(layout: Layout, rank: int, group: str, pages: Span, gap: int) -> PagedView:
    """Pages that lie ``gap`` apart, for one group and no more of the request than it needs."""
    pools = contiguous_pools(layout, rank, pages.end * gap)
    table = np.arange(pages.first, pages.end, dtype=np.int64) * gap
    return PagedView(pools.map, {group: PageTable(table, pages.first)})
