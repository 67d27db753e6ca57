"""The geometry of a picture: where cards and bands stand. Values only, no markup.

A card shows twice what one rank holds. Its *map* has a column for each unit of the model and a
row for each layer. Its *rail*, on the edge that faces the bands, is where moves begin or end: they
are stacked by layers, then by tokens, then by units, each as thick as its share of the bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group
from kvferry.plan.plan import Move, Plan, Request

WIDTH, MARGIN, COLUMNS_TOP = 1400.0, 36.0, 148.0
CARD_WIDTH, MAP_WIDTH, RAIL_WIDTH = 344.0, 118.0, 12.0
# Only this many ranks of each side are shown.
MAX_CARDS = 48
# Share of a card that a group gets at least, or a group of few bytes would be invisible.
MIN_GROUP_SHARE = 0.25
# More bands would be a grey smear, and a file too large for browsers.
MAX_BANDS = 1000


class PictureSide(StrEnum):
    """The column that a rank stands in."""

    SOURCE = "source"
    TARGET = "target"

    @property
    def engine(self) -> str:
        """The work of this side's engines."""
        return "prefill" if self is PictureSide.SOURCE else "decode"

    def layout_of(self, plan: Plan) -> Layout:
        """Return the layout of this side."""
        return plan.source if self is PictureSide.SOURCE else plan.target

    def rank_of(self, move: Move) -> int:
        """Return the rank of a move on this side."""
        return move.source if self is PictureSide.SOURCE else move.target


class Box(NamedTuple):
    """An upright rectangle."""

    x: float
    y: float
    w: float
    h: float


class CarriedMove(NamedTuple):
    """A move that carries something for this request. ``number`` is its index in the plan."""

    number: int
    move: Move
    num_bytes: int


class Section(NamedTuple):
    """One group on one card. ``ends`` has the place on the rail of each move, by its number."""

    group: Group
    map: Box
    rail: Box
    shards: tuple[Shard, ...]
    ends: Mapping[int, Box]

    def block(self, layers: Span, units: Span) -> Box:
        """Return the place of these layers and units on the map."""
        places = self.group.places_in(layers)
        column, row = self.map.w / self.group.units, self.map.h / len(self.group.layers)
        x, y = self.map.x + column * units.first, self.map.y + row * places.first
        return Box(x, y, column * len(units), row * len(places))


class Card(NamedTuple):
    """One rank, with the moves that it sends or receives."""

    side: PictureSide
    rank: int
    box: Box
    moves: tuple[CarriedMove, ...]
    sections: tuple[Section, ...]

    def ends(self) -> Iterator[tuple[int, Box]]:
        """Yield the place of every move on the rail."""
        for section in self.sections:
            yield from section.ends.items()


class Band(NamedTuple):
    """One move as drawn, between its places on two rails."""

    carried: CarriedMove
    source: Box
    target: Box


@dataclass(frozen=True)
class Scene:
    """The whole picture of a plan for a request."""

    plan: Plan
    request: Request

    @cached_property
    def carried(self) -> tuple[CarriedMove, ...]:
        """All moves that carry something."""
        return tuple(
            CarriedMove(number, move, num_bytes)
            for number, move in enumerate(self.plan.moves)
            if (num_bytes := self.plan.bytes_of(move, self.request))
        )

    @cached_property
    def sizes(self) -> Counter[str]:
        """The payload of each group."""
        sizes = Counter({group.name: 0 for group in self.plan.spec.groups})
        for one in self.carried:
            sizes[one.move.group] += one.num_bytes
        return sizes

    @cached_property
    def height(self) -> float:
        """The height of a column of cards."""
        most = min(MAX_CARDS, max(self.plan.source.num_ranks, self.plan.target.num_ranks))
        return max(min(640.0, 300.0 + 85.0 * most), 30.0 * most)

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards of both sides, from top to bottom."""
        return tuple(card for side in PictureSide for card in self._column(side))

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        """The moves between shown ranks. Thin ones are last, or thick ones would hide them."""
        sources, targets = (
            {number: end for card in self.cards if card.side is side for number, end in card.ends()}
            for side in PictureSide
        )
        bands = [
            Band(one, sources[one.number], targets[one.number])
            for one in sorted(self.carried, key=lambda one: -one.num_bytes)
            if one.number in sources and one.number in targets
        ]
        return tuple(bands[:MAX_BANDS])

    def _column(self, side: PictureSide) -> Iterator[Card]:
        layout = side.layout_of(self.plan)
        count = min(layout.num_ranks, MAX_CARDS)
        gap = 18.0 if count <= 6 else 8.0 if count <= 24 else 4.0
        x = MARGIN if side is PictureSide.SOURCE else WIDTH - MARGIN - CARD_WIDTH
        h = (self.height - gap * (count - 1)) / count
        for rank, shards in enumerate(layout.shards()[:count]):
            box = Box(x, COLUMNS_TOP + rank * (h + gap), CARD_WIDTH, h)
            moves = tuple(one for one in self.carried if side.rank_of(one.move) == rank)
            yield Card(side, rank, box, moves, tuple(self._sections(side, shards, moves, box)))

    def _sections(
        self, side: PictureSide, shards: Sequence[Shard], moves: Sequence[CarriedMove], box: Box
    ) -> Iterator[Section]:
        """Return a card's sections from top to bottom. Heights follow the groups' sizes."""
        held = {shard.group for shard in shards}
        groups = [group for group in self.plan.spec.groups if group.name in held]
        padding = min(8.0, box.h / 8)
        gap = 6.0 if box.h / max(1, len(groups)) > 24 else 1.0
        free = box.h - 2 * padding - gap * (len(groups) - 1)
        least = MIN_GROUP_SHARE * max(1, self.sizes.total())
        weights = [max(least, self.sizes[group.name]) for group in groups]
        rail_x, map_x = box.x, box.x + RAIL_WIDTH + 6
        if side is PictureSide.SOURCE:
            rail_x, map_x = box.x + box.w - RAIL_WIDTH, box.x + box.w - RAIL_WIDTH - 6 - MAP_WIDTH
        y = box.y + padding
        for group, weight in zip(groups, weights, strict=True):
            mine = tuple(shard for shard in shards if shard.group == group.name)
            h = free * weight / sum(weights)
            rail = Box(rail_x, y, RAIL_WIDTH, h)
            its = [one for one in moves if one.move.group == group.name]
            whole = (Move(group.name, 0, 0, s.layers, s.units, 0, 0, s.tokens) for s in mine)
            num_held = sum(self.plan.bytes_of(move, self.request) for move in whole)
            ends = _stack(rail, its, num_held)
            yield Section(group, Box(map_x, y, MAP_WIDTH, h), rail, mine, ends)
            y += h + gap


def split(span: Span, limit: int) -> list[Span]:
    """Return ``span`` in at most ``limit`` nearly equal parts, in order."""
    parts = min(len(span), limit)
    edges = [span.first + len(span) * part // parts for part in range(parts + 1)]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def _stack(rail: Box, moves: Sequence[CarriedMove], num_held: int) -> dict[int, Box]:
    """Return each move's place on a rail, which stands for the larger of the bytes held and sent.

    A source that sends a part to several targets sends more bytes than it holds.
    """
    scale = rail.h / max(1, num_held, sum(one.num_bytes for one in moves))
    ends = {}
    y = rail.y
    for one in sorted(moves, key=lambda one: (one.move.layers, one.move.tokens.first, one.number)):
        ends[one.number] = Box(rail.x, y, rail.w, one.num_bytes * scale)
        y += one.num_bytes * scale
    return ends
