"""What a plan would cost for one request, before any page is allocated.

Page tables are made up: either no two pages of the request are neighbours,
which is what a busy server has, or all of them are. The pieces are then counted
by the same binding that moves real bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from kvferry.layout.layout import Layout
from kvferry.layout.spec import Slot
from kvferry.plan.bind import Pair, Side, bind
from kvferry.plan.choose import Choice, Constants, Path, Shape, choose, num_slots, shape_of
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Move, Plan, Request


class MoveEstimate(NamedTuple):
    """One move of the request, with its chosen path."""

    move: Move
    shape: Shape
    choice: Choice


class Estimate(NamedTuple):
    """Every move that carries something, and the request as a whole."""

    moves: tuple[MoveEstimate, ...]
    constants: Constants

    @property
    def num_bytes(self) -> int:
        """The payload of the request."""
        return sum(one.shape.num_bytes for one in self.moves)

    def pieces(self, path: Path) -> int:
        """Pieces the whole request would fall into on that path."""
        match path:
            case Path.RUNS:
                return sum(one.shape.runs for one in self.moves)
            case Path.SLICES:
                return sum(one.shape.slices for one in self.moves)
            case Path.STAGED:
                return sum(num_slots(one.shape.num_bytes, self.constants) for one in self.moves)

    def is_open(self, path: Path) -> bool:
        """Whether every move could take that path."""
        return all(path in one.choice.seconds for one in self.moves)

    def carried(self, path: Path) -> int:
        """Bytes of the moves that chose that path."""
        return sum(one.shape.num_bytes for one in self.moves if one.choice.path is path)

    @property
    def chosen(self) -> Path:
        """The path that carries the most bytes."""
        return max(Path, key=self.carried)

    def predicted_s(self, path: Path | None = None) -> float:
        """Predicted seconds with every move on ``path``, or each on its chosen one.

        Sources work side by side and a target's link is shared by all that write
        to it, so the slowest rank of either side decides.
        """
        by_source: dict[int, float] = {}
        by_target: dict[int, float] = {}
        for one in self.moves:
            move, seconds = one.move, one.choice.seconds[path or one.choice.path]
            wire = one.shape.num_bytes / self.constants.bytes_per_s
            by_source[move.source] = by_source.get(move.source, 0.0) + seconds
            by_target[move.target] = by_target.get(move.target, 0.0) + wire
        return max((*by_source.values(), *by_target.values()), default=0.0)


def estimate(
    plan: Plan,
    request: Request,
    constants: Constants,
    *,
    scattered: bool = True,
    override: Path | None = None,
) -> Estimate:
    """Bind every move to made-up pages, choose its path and predict its time."""

    @cache
    def side(role: str, rank: int) -> Side:
        layout = plan.source if role == "source" else plan.target
        return _made_up_side(layout, rank, request.num_tokens, scattered)

    rows = []
    for move in plan.moves:
        if not plan.tokens_of(move, request).num_tokens:
            continue
        ends = side("source", move.source), side("target", move.target)
        only = Plan(plan.source, plan.target, (move,))
        shape = shape_of(bind(only, Pair(move.source, move.target), request, *ends))
        rows.append(MoveEstimate(move, shape, choose(shape, constants, override)))
    return Estimate(tuple(rows), constants)


def _made_up_side(layout: Layout, rank: int, num_tokens: int, scattered: bool) -> Side:
    gap = 2 if scattered else 1
    num_pages = -(-num_tokens // layout.page_tokens)
    pools = contiguous_pools(layout, rank, num_pages * gap)
    tables = {
        group.name: PageTable(
            [0] if isinstance(group.kind, Slot) else np.arange(num_pages, dtype=np.int64) * gap
        )
        for group in layout.spec.groups
    }
    return Side(pools.map, tables)
