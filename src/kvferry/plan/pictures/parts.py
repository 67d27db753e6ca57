"""The parts of a picture: plain values with coordinates, no markup.

Each card shows what a rank holds twice. Its *map* has a column for every unit
of the model and runs down through its layers, so one sees which part of the
model the rank has. Its *rail*, on the side where the bands are, is where each
move begins or ends: first by layers, then by tokens, then by units, so that
no two moves into a target ever share a place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.spec import Group
from kvferry.plan.plan import Move


class PictureSide(StrEnum):
    """Which column a rank stands in."""

    SOURCE = "source"
    TARGET = "target"

    @property
    def engine(self) -> str:
        """What the ranks of this side do."""
        return "prefill" if self is PictureSide.SOURCE else "decode"


class Box(NamedTuple):
    """An upright rectangle."""

    x: float
    y: float
    w: float
    h: float


class Stretch(NamedTuple):
    """A vertical extent, from ``top`` down to ``bottom``."""

    top: float
    bottom: float


class Cell(NamedTuple):
    """A coloured rectangle of a map."""

    box: Box
    colour: str


class Held(NamedTuple):
    """One shard: its block on the map and on the rail, and how deep in the model it lies.

    ``depth`` are its first and its last layer's places among the group's
    layers, between 0 and 1; the drawing gets paler with it.
    """

    block: Box
    rail: Box
    depth: tuple[float, float]


@dataclass(frozen=True)
class Section:
    """One group on one card. ``cuts`` are ordinals among the group's layers.

    ``idle``: the rank holds a part of the group that none of its moves carries.
    """

    group: Group
    map: Box
    rail: Box
    units: Span
    cuts: tuple[int, ...]
    lanes: tuple[Tokens, ...]
    held: tuple[Held, ...]
    cells: tuple[Cell, ...]
    interleaved: bool
    idle: bool
    name: str
    lines: tuple[str, ...]

    def block(self, move: Move) -> Box:
        """Where the map shows what ``move`` carries."""
        first, end = ordinals(self.group, move.layers)
        down, along = self.map.h / len(self.group.layers), self.map.w / self.group.units
        return Box(
            self.map.x + along * move.units.first,
            self.map.y + down * first,
            along * len(move.units),
            down * (end - first),
        )

    def stretch(self, layers: Span, units: Span, tokens: Tokens) -> Stretch:
        """Where the rail has those units of those layers, which lie between two cuts."""
        interval = bisect_right(self.cuts, layers.first) - 1
        first, end = self.cuts[interval], self.cuts[interval + 1]
        lane, num_lanes = self.lanes.index(tokens), len(self.lanes)
        edges = [
            first + (end - first) * (lane + (unit - self.units.first) / len(self.units)) / num_lanes
            for unit in (units.first, units.end)
        ]
        # Another card's cut may divide this interval: take the same part of it.
        part = (edges[1] - edges[0]) / (end - first)
        top = edges[0] + part * (layers.first - first)
        down = self.rail.h / len(self.group.layers)
        bottom = top + part * len(layers)
        return Stretch(self.rail.y + down * top, self.rail.y + down * bottom)


@dataclass(frozen=True)
class Card:
    """One rank: where its card stands, what is written on it, what it holds."""

    side: PictureSide
    rank: int
    box: Box
    name: str
    place: str
    tip: str
    sections: tuple[Section, ...]

    def section(self, group: str) -> Section:
        """The part of the card that shows that group."""
        return next(section for section in self.sections if section.group.name == group)


@dataclass(frozen=True)
class Elided:
    """One card that stands for the middle ranks of a long column."""

    side: PictureSide
    ranks: Span
    box: Box
    text: str

    def stretch(self, rank: int) -> Stretch:
        """Where the bands of a rank that is not shown begin or end."""
        middle = self.box.y + self.box.h * (rank - self.ranks.first + 0.5) / len(self.ranks)
        return Stretch(middle - 0.5, middle + 0.5)


class Strand(NamedTuple):
    """A ribbon of one colour from a stretch of a source to a stretch of a target."""

    source: Stretch
    target: Stretch
    colour: str


@dataclass(frozen=True)
class Band:
    """One move of the plan as drawn: its strands and its numbers in words.

    ``blocks`` are what it carries on the two maps, as far as those are shown.
    ``ink`` is how dense it is drawn: bands that begin at the same place, because
    several targets want the same block, share what a single one would get.
    """

    index: int
    move: Move
    num_bytes: int
    tip: str
    strands: tuple[Strand, ...]
    ink: float
    blocks: tuple[Box | None, Box | None]


@dataclass(frozen=True)
class LegendKey:
    """One line of the legend: a group's colours and its facts."""

    name: str
    colours: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Row:
    """One line of the table of moves; ``index`` is the move's place in the plan."""

    index: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """The whole picture, ready to be written down."""

    width: float
    height: float
    floor: float
    title: str
    subtitle: str
    headings: tuple[str, str]
    cards: tuple[Card, ...]
    elided: tuple[Elided, ...]
    bands: tuple[Band, ...]
    keys: tuple[LegendKey, ...]
    hints: tuple[str, ...]
    notes: tuple[str, ...]
    message: str
    rows: tuple[Row, ...]
    more_rows: str


def ordinals(group: Group, layers: Span) -> tuple[int, int]:
    """The places, among the group's own layers, of those inside ``layers``."""
    return bisect_left(group.layers, layers.first), bisect_left(group.layers, layers.end)


def buckets(span: Span, limit: int) -> Iterator[Span]:
    """``span`` in at most ``limit`` nearly equal parts, in order."""
    parts = min(len(span), limit)
    for part in range(parts):
        first, end = (len(span) * edge // parts for edge in (part, part + 1))
        yield Span(span.first + first, span.first + end)
