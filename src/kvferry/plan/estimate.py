"""Estimates: what a plan costs for a request, before any page is allocated.

The page tables are invented: either no two pages of the request are adjacent, as on a busy server,
or all are. ``bind`` then counts the pieces, as for real pages. All ranks get the same invented
pages, so moves of the same size and position have the same pieces and are bound once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard, find_shard
from kvferry.layout.pages import local_tokens
from kvferry.layout.tokens import Pattern, Tokens
from kvferry.plan.bind import PagedView, RankPair, bind
from kvferry.plan.choose import BlockShape, Choice, TransferMode, choose, shape_of
from kvferry.plan.cost import LinkCost
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Move, Plan, Request

# Limit on the pages that an estimate visits, over all moves that differ. Takes about two seconds.
MAX_PAGE_VISITS = 1 << 23


class MoveEstimate(NamedTuple):
    """One move of the request, with its shape and its chosen mode."""

    move: Move
    shape: BlockShape
    choice: Choice


class Estimate(NamedTuple):
    """The predicted cost of a request: every move that carries something."""

    moves: tuple[MoveEstimate, ...]
    link_cost: LinkCost

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the request."""
        return sum(one.shape.num_bytes for one in self.moves)

    def pieces(self, mode: TransferMode) -> int:
        """Return the number of pieces of the whole request with a mode."""
        match mode:
            case TransferMode.RUNS:
                return sum(one.shape.runs for one in self.moves)
            case TransferMode.SLICES:
                return sum(one.shape.slices for one in self.moves)
            case TransferMode.STAGED:
                return sum(self.link_cost.num_slots(one.shape.num_bytes) for one in self.moves)

    def is_open(self, mode: TransferMode) -> bool:
        """Return whether a mode is open to every move."""
        return all(mode in one.choice.seconds for one in self.moves)

    def carried(self, mode: TransferMode) -> int:
        """Return the bytes of the moves that chose a mode."""
        return sum(one.shape.num_bytes for one in self.moves if one.choice.mode is mode)

    @property
    def chosen(self) -> TransferMode:
        """The mode that carries the most bytes."""
        return max(TransferMode, key=self.carried)

    def predicted_s(self, mode: TransferMode | None = None) -> float:
        """Return the predicted seconds with ``mode``, or with each move's chosen mode.

        Sources work in parallel, and the writes to one target share its link, so the slowest rank
        of either side decides.
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
    """Bind every move to invented pages, choose its mode and predict its time.

    ``scattered`` says whether a request's pages lie apart or side by side.
    """
    moves = [
        (move, _signature(plan, move, tokens))
        for move in plan.moves
        if (tokens := plan.tokens_of(move, request)).num_tokens
    ]
    examples = {signature: move for move, signature in moves}
    _check_num_pages(examples)
    shapes = {one: _shape(plan, move, request, one, scattered) for one, move in examples.items()}
    choices = {one: choose(shape, link_cost, override) for one, shape in shapes.items()}
    rows = [MoveEstimate(move, shapes[one], choices[one]) for move, one in moves]
    return Estimate(tuple(rows), link_cost)


class _EndSignature(NamedTuple):
    """The facts that decide the pieces of a move at one end: units, page boundaries, pages."""

    num_units: int
    first: int
    held: Pattern
    pages: Span


class _MoveSignature(NamedTuple):
    """The facts that decide the pieces of a move. Equal signatures mean equal numbers of pieces."""

    group: str
    num_layers: int
    num_units: int
    tokens: Tokens
    source: _EndSignature
    target: _EndSignature


def _signature(plan: Plan, move: Move, tokens: Tokens) -> _MoveSignature:
    group = plan.spec.group(move.group)
    layers = group.layers_in(move.layers)

    def end(layout: Layout, shards: tuple[Shard, ...]) -> _EndSignature:
        held = find_shard(shards, move.group, layers[0])
        local = local_tokens(layout, group, held, tokens)
        # Counted from the first token, ranks that take turns are alike.
        around = local.held.shifted(tokens.first)
        return _EndSignature(len(held.units), local.first, around, local.pages)

    source = end(plan.source, plan.held[move.source])
    target = end(plan.target, plan.wanted[move.target])
    counted = tokens.counted()
    return _MoveSignature(move.group, len(layers), len(move.units), counted, source, target)


def _check_num_pages(examples: Iterable[_MoveSignature]) -> None:
    """Refuse an estimate that would take minutes and gigabytes."""
    visits = sum(len(end.pages) for one in examples for end in (one.source, one.target))
    if visits > MAX_PAGE_VISITS:
        raise InputError(
            f"the estimate would visit {visits} pages of the request "
            f"(limit {MAX_PAGE_VISITS}); use a larger page or fewer tokens"
        )


def _shape(
    plan: Plan, move: Move, request: Request, signature: _MoveSignature, scattered: bool
) -> BlockShape:
    gap = 2 if scattered else 1
    pair = RankPair(move.source, move.target)
    source = _invented_view(plan.source, move.source, move.group, signature.source.pages, gap)
    target = _invented_view(plan.target, move.target, move.group, signature.target.pages, gap)
    return shape_of(bind(plan, pair, request, source, target, moves=(move,)))


def _invented_view(layout: Layout, rank: int, group: str, pages: Span, gap: int) -> PagedView:
    """Return pages that lie ``gap`` apart, for one group and the pages that a move touches."""
    pools = contiguous_pools(layout, rank, pages.end * gap)
    table = np.arange(pages.first, pages.end, dtype=np.int64) * gap
    return PagedView(pools.map, {group: PageTable(table, pages.first)})
