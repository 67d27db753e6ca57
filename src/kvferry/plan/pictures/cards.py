"""Cards: where they stand and what they show. Decides; writes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group
from kvferry.plan.pictures.colours import unit_colour
from kvferry.plan.pictures.parts import (
    Box,
    Card,
    Cell,
    Elided,
    Held,
    PictureSide,
    Section,
    buckets,
    ordinals,
)
from kvferry.plan.pictures.words import card_tip, holding_lines, place_text, plural, shorten
from kvferry.plan.plan import Move

WIDTH = 1400.0
MARGIN = 36.0
CARD_WIDTH = 344.0
RAIL_WIDTH = 12.0
MAP_WIDTH = 118.0
LABEL_WIDTH = 112.0
COLUMNS_TOP = 148.0

# A longer column shows this many of its first and of its last ranks.
MAX_CARDS = 64
EDGE_CARDS = 16
ELIDED_HEIGHT = 64.0
MAP_COLUMNS = 32

# Smaller than this, a cell of a map could not be seen.
LEAST_CELL = 2.0

# A group with few bytes keeps this share of a card, or one could not see it.
LEAST_WEIGHT = 0.25


class Carried(NamedTuple):
    """A move that has something to carry for this request; ``number`` is its place in the plan."""

    number: int
    move: Move
    num_bytes: int


class Spot(NamedTuple):
    """A place in a column, for one rank or for all that are left out."""

    ranks: Span
    y: float
    h: float


def column_height(*num_ranks: int) -> float:
    """The height that both columns share."""
    most = max(_num_spots(count) for count in num_ranks)
    return max(min(640.0, 300.0 + 85.0 * most), (25.0 if most > 40 else 30.0) * most)


def _num_spots(num_ranks: int) -> int:
    return num_ranks if num_ranks <= MAX_CARDS else 2 * EDGE_CARDS + 1


def spots(num_ranks: int, height: float) -> list[Spot]:
    """A column's places from top to bottom; the middle of a long one is a single place."""
    count = _num_spots(num_ranks)
    gap = 18.0 if count <= 6 else 8.0 if count <= 24 else 4.0
    spans = [Span(rank, rank + 1) for rank in range(num_ranks)]
    middle = 0.0
    if count < num_ranks:
        hidden = Span(EDGE_CARDS, num_ranks - EDGE_CARDS)
        spans = [*spans[:EDGE_CARDS], hidden, *spans[-EDGE_CARDS:]]
        middle = ELIDED_HEIGHT
    each = (height - gap * (count - 1) - middle) / (count - bool(middle))
    heights = [each if len(span) == 1 else middle for span in spans]
    tops = itertools.accumulate((h + gap for h in heights), initial=COLUMNS_TOP)
    return [Spot(span, y, h) for span, y, h in zip(spans, tops, heights, strict=False)]


class Column:
    """One side of the picture: the cards of its ranks."""

    def __init__(
        self,
        side: PictureSide,
        layout: Layout,
        carried: Sequence[Carried],
        weights: Mapping[str, float],
        height: float,
    ) -> None:
        self.side = side
        self._layout = layout
        self._weights = weights
        self._shards = layout.shards()
        self._moves = _by_rank(side, carried)
        self.cards: dict[int, Card] = {}
        self.elided: Elided | None = None
        for spot in spots(layout.num_ranks, height):
            if len(spot.ranks) == 1:
                self.cards[spot.ranks.first] = self._card(spot)
            else:
                self.elided = self._left_out(spot)

    @property
    def _x(self) -> float:
        return MARGIN if self.side is PictureSide.SOURCE else WIDTH - MARGIN - CARD_WIDTH

    def _left_out(self, spot: Spot) -> Elided:
        ranks = f"{self.side.engine} {spot.ranks.first}–{spot.ranks.end - 1}"
        text = f"… {plural(len(spot.ranks), 'more rank')} ({ranks})"
        return Elided(self.side, spot.ranks, Box(self._x, spot.y, CARD_WIDTH, spot.h), text)

    def _card(self, spot: Spot) -> Card:
        rank = spot.ranks.first
        moves = self._moves.get(rank, [])
        box = Box(self._x, spot.y, CARD_WIDTH, spot.h)
        return Card(
            side=self.side,
            rank=rank,
            box=box,
            name=f"{self.side.engine} {rank}",
            place=place_text(self._layout, rank) if self._shards[rank] else "holds nothing",
            tip=card_tip(self.side, self._layout, rank, [one.num_bytes for one in moves]),
            sections=tuple(self._sections(rank, box, [one.move for one in moves])),
        )

    def _sections(self, rank: int, box: Box, moves: list[Move]) -> list[Section]:
        """A card's groups from top to bottom, each as high as its weight."""
        held: dict[str, list[Shard]] = {}
        for shard in self._shards[rank]:
            held.setdefault(shard.group, []).append(shard)
        groups = [group for group in self._layout.spec.groups if group.name in held]
        pad = min(8.0, box.h / 8)
        gap = 6.0 if box.h / max(1, len(groups)) > 24 else 1.0
        room = box.h - 2 * pad - gap * (len(groups) - 1)
        total = sum(self._weights[group.name] for group in groups)
        sections, y = [], box.y + pad
        for group in groups:
            h = room * self._weights[group.name] / total
            mine = [move for move in moves if move.group == group.name]
            sections.append(self._section(group, held[group.name], mine, y, h))
            y += h + gap
        return sections

    def _section(
        self, group: Group, shards: list[Shard], moves: list[Move], y: float, h: float
    ) -> Section:
        groups = self._layout.spec.groups
        lanes = _lanes(moves) or (shards[0].tokens,)
        map_box, rail = self._boxes(y, h)
        return Section(
            group=group,
            map=map_box,
            rail=rail,
            units=shards[0].units,
            cuts=_cuts(group, [*shards, *moves]),
            lanes=lanes,
            held=tuple(_held(map_box, rail, group, shard) for shard in shards),
            cells=_cells(map_box, group, groups.index(group), len(groups), shards),
            interleaved=shards[0].tokens.step > 1,
            idle=_volume(group, moves) < _volume(group, shards) * len(lanes),
            name=shorten(group.name, 15) if len(groups) > 1 or group.units == 1 else "",
            lines=holding_lines(group, shards),
        )

    def _boxes(self, y: float, h: float) -> tuple[Box, Box]:
        """The map and the rail; the rail is on the side of the bands."""
        if self.side is PictureSide.SOURCE:
            rail_x = self._x + CARD_WIDTH - RAIL_WIDTH
            map_x = rail_x - 6 - MAP_WIDTH
        else:
            rail_x = self._x
            map_x = rail_x + RAIL_WIDTH + 6
        return Box(map_x, y, MAP_WIDTH, h), Box(rail_x, y, RAIL_WIDTH, h)


def _by_rank(side: PictureSide, carried: Sequence[Carried]) -> dict[int, list[Carried]]:
    ranks: dict[int, list[Carried]] = {}
    for one in carried:
        rank = one.move.source if side is PictureSide.SOURCE else one.move.target
        ranks.setdefault(rank, []).append(one)
    return ranks


def _cuts(group: Group, blocks: Sequence[Shard | Move]) -> tuple[int, ...]:
    """Where the layers of a rail are divided: at every edge of a shard or a move."""
    return tuple(sorted({edge for block in blocks for edge in ordinals(group, block.layers)}))


def _lanes(moves: Sequence[Move]) -> tuple[Tokens, ...]:
    """The token sets that meet on one card; the plan keeps them disjoint."""
    sets = {move.tokens for move in moves}
    return tuple(sorted(sets, key=lambda tokens: (tokens.first, tokens.step)))


def _volume(group: Group, blocks: Sequence[Shard | Move]) -> int:
    """Layers times units, over all blocks."""
    edges = (ordinals(group, block.layers) for block in blocks)
    spans = zip(edges, blocks, strict=True)
    return sum((end - first) * len(block.units) for (first, end), block in spans)


def _held(map_box: Box, rail: Box, group: Group, shard: Shard) -> Held:
    first, end = (edge / len(group.layers) for edge in ordinals(group, shard.layers))
    along = map_box.w / group.units
    y, h = rail.y + rail.h * first, max(LEAST_CELL, rail.h * (end - first))
    return Held(
        Box(map_box.x + along * shard.units.first, y, along * len(shard.units), h),
        Box(rail.x, y, rail.w, h),
        (first, end),
    )


def _cells(
    box: Box, group: Group, index: int, num_groups: int, shards: Sequence[Shard]
) -> tuple[Cell, ...]:
    """The coloured columns of a map. Depth is shaded over them, so they carry none."""
    along = box.w / group.units
    gap = 1.0 if along >= 5 else 0.0
    cells = []
    for shard in shards:
        block = _held(box, box, group, shard).block
        for units in buckets(shard.units, MAP_COLUMNS):
            place = (units.first + units.end) / 2 / group.units
            width = max(LEAST_CELL, along * len(units) - gap)
            column = Box(box.x + along * units.first, block.y, width, block.h)
            cells.append(Cell(column, unit_colour(index, num_groups, place, 0.0)))
    return tuple(cells)
