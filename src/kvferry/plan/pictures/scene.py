"""The geometry of a picture: where cards and bands stand. Values only, no markup.

A card shows twice what one rank holds. Its *map* has a column for each unit of the model and a
row for each layer. Its *rail*, on the edge that faces the bands, is where moves begin or end. The
rail is divided by layers, then by token sets, then by units, so no two moves into a target
share a place on it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group
from kvferry.plan.describe import rank_coordinates
from kvferry.plan.pictures.captions import plural, unit_word
from kvferry.plan.pictures.colours import unit_colour
from kvferry.plan.plan import Move, Plan, Request
from kvferry.plan.units import human_bytes

WIDTH, MARGIN, COLUMNS_TOP = 1400.0, 36.0, 148.0
CARD_WIDTH, MAP_WIDTH, RAIL_WIDTH = 344.0, 118.0, 12.0
# A column of more cards than this shows its first and last ranks only.
MAX_CARDS, EDGE_CARDS, HIDDEN_HEIGHT = 64, 16, 64.0
# Share of a card that a group gets at least, or a group of few bytes would be invisible.
MIN_GROUP_SHARE = 0.25
# Height of a shard at least, for the same reason.
MIN_SHARD_HEIGHT = 2.0
# More bands would be a grey smear, and a file too large for browsers.
MAX_BANDS = 2000
# Limits on strands: of all bands together, and of one band by units and by layers.
MAX_STRANDS, MAX_UNIT_STRANDS, MAX_LAYER_STRANDS = 1600, 16, 16
# Opacity of a band. Bands that begin at the same place reach it together.
OPACITY = 0.64


class PictureSide(StrEnum):
    """The column that a rank stands in."""

    SOURCE = "source"
    TARGET = "target"

    @property
    def engine(self) -> str:
        """What the engines of this side do."""
        return "prefill" if self is PictureSide.SOURCE else "decode"

    def rank_of(self, move: Move) -> int:
        """Return the rank of a move on this side."""
        return move.source if self is PictureSide.SOURCE else move.target


class Box(NamedTuple):
    """An upright rectangle."""

    x: float
    y: float
    w: float
    h: float


class Extent(NamedTuple):
    """A vertical extent on a rail."""

    top: float
    bottom: float


class CarriedMove(NamedTuple):
    """A move that carries something for this request. ``number`` is its index in the plan."""

    number: int
    move: Move
    num_bytes: int


@dataclass(frozen=True)
class Section:
    """One group on one card.

    ``cuts`` are the edges of shards and moves among the group's layers. ``idle`` says that the
    rank holds a part of the group that none of its moves carries.
    """

    group: Group
    map: Box
    rail: Box
    shards: tuple[Shard, ...]
    cuts: tuple[int, ...]
    token_sets: tuple[Tokens, ...]
    idle: bool

    @property
    def interleaved(self) -> bool:
        """Whether the rank holds every n-th token only."""
        return self.shards[0].tokens.step > 1

    def depth(self, layers: Span) -> tuple[float, float]:
        """Return where these layers begin and end among the group's, from 0 to 1."""
        places = self.group.places_in(layers)
        return places.first / len(self.group.layers), places.end / len(self.group.layers)

    def block(self, layers: Span, units: Span, min_height: float = 0.0) -> Box:
        """Return the place of these layers and units on the map."""
        (first, end), column = self.depth(layers), self.map.w / self.group.units
        x, y = self.map.x + column * units.first, self.map.y + self.map.h * first
        return Box(x, y, column * len(units), max(min_height, self.map.h * (end - first)))

    def rail_block(self, layers: Span) -> Box:
        """Return the place of these layers on the rail."""
        block = self.block(layers, Span(0, 1), MIN_SHARD_HEIGHT)
        return Box(self.rail.x, block.y, self.rail.w, block.h)

    def extent(self, places: Span, units: Span, tokens: Tokens) -> Extent:
        """Return the place on the rail of these units and tokens, in layers between two cuts."""
        interval = bisect_right(self.cuts, places.first) - 1
        first, end = self.cuts[interval : interval + 2]
        held = self.shards[0].units
        lane = self.token_sets.index(tokens)
        begin = (lane + (units.first - held.first) / len(held)) / len(self.token_sets)
        share = len(units) / len(held) / len(self.token_sets)
        # A cut of the other card may divide this interval: take the same part of it.
        top = first + (end - first) * begin + share * (places.first - first)
        row = self.rail.h / len(self.group.layers)
        return Extent(self.rail.y + row * top, self.rail.y + row * (top + share * len(places)))


@dataclass(frozen=True)
class Card:
    """One rank, or the ranks that are left out in the middle of a long column."""

    side: PictureSide
    ranks: Span
    box: Box
    name: str
    place: str = ""
    tip: str = ""
    sections: tuple[Section, ...] = ()

    @property
    def hidden(self) -> bool:
        """Whether the card stands for several ranks."""
        return len(self.ranks) > 1

    def section(self, group: str) -> Section | None:
        """Return the section of a group, if the card shows it."""
        return next((one for one in self.sections if one.group.name == group), None)

    def extent(self, move: Move, places: Span, units: Span) -> Extent:
        """Return where these layers and units of a move begin or end."""
        section = self.section(move.group)
        if section is not None:
            return section.extent(places, units, move.tokens)
        rank = self.side.rank_of(move)
        middle = self.box.y + self.box.h * (rank - self.ranks.first + 0.5) / len(self.ranks)
        return Extent(middle - 0.5, middle + 0.5)

    def block(self, move: Move) -> Box | None:
        """Return the place of a move on the map, if the card shows one."""
        section = self.section(move.group)
        return None if section is None else section.block(move.layers, move.units)


# The cards of one side by rank. Ranks that are left out share a card.
Column = Mapping[int, Card]


class Strand(NamedTuple):
    """A ribbon of one colour between two rails."""

    source: Extent
    target: Extent
    colour: str


@dataclass(frozen=True)
class Band:
    """One move as drawn. ``blocks`` are its places on the two maps, if they are shown."""

    carried: CarriedMove
    strands: tuple[Strand, ...]
    opacity: float
    blocks: tuple[Box | None, Box | None]


@dataclass(frozen=True)
class Scene:
    """The whole picture. ``carried`` are all moves, ``bands`` those that are drawn."""

    plan: Plan
    request: Request
    height: float
    cards: tuple[Card, ...]
    carried: tuple[CarriedMove, ...]
    bands: tuple[Band, ...]
    hints: tuple[str, ...]
    notes: tuple[str, ...]

    def num_bytes(self, group: str | None = None) -> int:
        """Return the payload, of one group or of all."""
        return sum(one.num_bytes for one in self.carried if group in (None, one.move.group))


def scene(plan: Plan, request: Request) -> Scene:
    """Return the geometry of a plan's picture for a request."""
    carried = tuple(
        CarriedMove(number, move, num_bytes)
        for number, move in enumerate(plan.moves)
        if (num_bytes := plan.bytes_of(move, request))
    )
    sizes: Counter[str] = Counter()
    for one in carried:
        sizes[one.move.group] += one.num_bytes
    total = max(1, sizes.total())
    shares = {g.name: max(MIN_GROUP_SHARE, sizes[g.name] / total) for g in plan.spec.groups}
    layouts = plan.source, plan.target
    most = max(_num_cards(layout.num_ranks) for layout in layouts)
    height = max(min(640.0, 300.0 + 85.0 * most), (25.0 if most > 40 else 30.0) * most)
    source, target = (
        _column(side, layout, carried, shares, height)
        for side, layout in zip(PictureSide, layouts, strict=True)
    )
    cards = tuple(dict.fromkeys((*source.values(), *target.values())))
    bands = tuple(_bands(plan, carried, source, target))
    hints = _hints(plan, cards) if carried else ()
    return Scene(
        plan, request, height, cards, carried, bands, hints, _notes(plan, carried, bands, cards)
    )


# ---------------------------------------------------------------- cards


def _num_cards(num_ranks: int) -> int:
    return num_ranks if num_ranks <= MAX_CARDS else 2 * EDGE_CARDS + 1


def _card_boxes(x: float, num_ranks: int, height: float) -> Iterator[tuple[Span, Box]]:
    """Return each card's ranks and box, from top to bottom."""
    count = _num_cards(num_ranks)
    gap = 18.0 if count <= 6 else 8.0 if count <= 24 else 4.0
    spans = [Span(rank, rank + 1) for rank in range(num_ranks)]
    middle = 0.0
    if count < num_ranks:
        spans[EDGE_CARDS:-EDGE_CARDS] = [Span(EDGE_CARDS, num_ranks - EDGE_CARDS)]
        middle = HIDDEN_HEIGHT
    each = (height - gap * (count - 1) - middle) / (count - bool(middle))
    y = COLUMNS_TOP
    for span in spans:
        h = each if len(span) == 1 else middle
        yield span, Box(x, y, CARD_WIDTH, h)
        y += h + gap


def _column(
    side: PictureSide,
    layout: Layout,
    carried: Sequence[CarriedMove],
    shares: Mapping[str, float],
    height: float,
) -> Column:
    shards = layout.shards()
    moves: dict[int, list[CarriedMove]] = {}
    for one in carried:
        moves.setdefault(side.rank_of(one.move), []).append(one)
    column: dict[int, Card] = {}
    x = MARGIN if side is PictureSide.SOURCE else WIDTH - MARGIN - CARD_WIDTH
    verb = "sends" if side is PictureSide.SOURCE else "receives"
    for ranks, box in _card_boxes(x, layout.num_ranks, height):
        rank, name = ranks.first, f"{side.engine} {ranks.first}"
        if len(ranks) > 1:
            hidden = f"… {plural(len(ranks), 'more rank')} ({name}–{ranks.end - 1})"
            card = Card(side, ranks, box, hidden)
        else:
            mine = moves.get(rank, [])
            place = " · ".join(rank_coordinates(layout, rank))
            size = human_bytes(sum(one.num_bytes for one in mine))
            head = f"{name} ({place})" if place else name
            tip = f"{head}\n{verb} {size} in {plural(len(mine), 'move')}"
            its = [one.move for one in mine]
            sections = tuple(_sections(side, layout, shards[rank], its, shares, box))
            place = place if sections else "holds nothing"
            card = Card(side, ranks, box, name, place, tip, sections)
        column |= dict.fromkeys(range(ranks.first, ranks.end), card)
    return column


def _sections(
    side: PictureSide,
    layout: Layout,
    shards: Sequence[Shard],
    moves: Sequence[Move],
    shares: Mapping[str, float],
    box: Box,
) -> list[Section]:
    """Return a card's sections from top to bottom. Heights follow the groups' shares."""
    held = {shard.group for shard in shards}
    groups = [group for group in layout.spec.groups if group.name in held]
    padding = min(8.0, box.h / 8)
    gap = 6.0 if box.h / max(1, len(groups)) > 24 else 1.0
    free = box.h - 2 * padding - gap * (len(groups) - 1)
    total = sum(shares[group.name] for group in groups)
    if side is PictureSide.SOURCE:
        rail_x = box.x + CARD_WIDTH - RAIL_WIDTH
        map_x = rail_x - 6 - MAP_WIDTH
    else:
        rail_x, map_x = box.x, box.x + RAIL_WIDTH + 6
    sections = []
    y = box.y + padding
    for group in groups:
        mine = tuple(shard for shard in shards if shard.group == group.name)
        its = [move for move in moves if move.group == group.name]
        h = free * shares[group.name] / total
        spans = [shard.layers for shard in mine] + [move.layers for move in its]
        edges = {edge for span in spans for edge in _edges(group, span)}
        sets = {move.tokens for move in its} or {mine[0].tokens}
        section = Section(
            group=group,
            map=Box(map_x, y, MAP_WIDTH, h),
            rail=Box(rail_x, y, RAIL_WIDTH, h),
            shards=mine,
            cuts=tuple(sorted(edges)),
            token_sets=tuple(sorted(sets, key=lambda tokens: (tokens.first, tokens.step))),
            idle=_num_cells(group, its) < _num_cells(group, mine) * len(sets),
        )
        sections.append(section)
        y += h + gap
    return sections


def _edges(group: Group, layers: Span) -> tuple[int, int]:
    places = group.places_in(layers)
    return places.first, places.end


def _num_cells(group: Group, parts: Iterable[Shard | Move]) -> int:
    """Return layers times units, summed."""
    return sum(len(group.places_in(part.layers)) * len(part.units) for part in parts)


# ---------------------------------------------------------------- bands


def _bands(
    plan: Plan, carried: Sequence[CarriedMove], source: Column, target: Column
) -> Iterator[Band]:
    """Return a band for each move that can be drawn, in the order of the plan.

    A move needs one end that is shown. If there are too many, those with both ends shown
    come first.
    """

    def num_hidden(one: CarriedMove) -> int:
        return source[one.move.source].hidden + target[one.move.target].hidden

    touching = sorted((one for one in carried if num_hidden(one) < 2), key=num_hidden)
    drawn = sorted(touching[:MAX_BANDS])
    limit = max(1, min(MAX_UNIT_STRANDS, MAX_STRANDS // max(1, len(drawn))))
    # Several targets may want the same block.
    origins = [(m.source, m.group, m.layers, m.units, m.tokens) for _, m, _ in drawn]
    copies = Counter(origins)
    for one, origin in zip(drawn, origins, strict=True):
        ends = source[one.move.source], target[one.move.target]
        yield Band(
            carried=one,
            strands=tuple(_strands(plan, one.move, ends, limit)),
            opacity=1 - (1 - OPACITY) ** (1 / copies[origin]),
            blocks=(ends[0].block(one.move), ends[1].block(one.move)),
        )


def _strands(plan: Plan, move: Move, ends: tuple[Card, Card], limit: int) -> Iterator[Strand]:
    """Return a strand for each stretch of layers and units; those that touch are joined."""
    group, groups = plan.spec.group(move.group), plan.spec.groups
    depth = sum(_edges(group, move.layers)) / 2 / len(group.layers)
    current: Strand | None = None
    for places in _cut_layers(group, move, ends):
        for units in split(move.units, limit):
            middle = (units.first + units.end) / 2 / group.units
            colour = unit_colour(groups.index(group), len(groups), middle, depth)
            source, target = (card.extent(move, places, units) for card in ends)
            strand = Strand(source, target, colour)
            if current is not None and _touches(current, strand):
                source, target = (
                    Extent(a.top, b.bottom) for a, b in zip(current[:2], strand[:2], strict=True)
                )
                strand = Strand(source, target, colour)
            elif current is not None:
                yield current
            current = strand
    if current is not None:
        yield current


def _cut_layers(group: Group, move: Move, ends: Iterable[Card]) -> list[Span]:
    """Return a move's layers, as places in the group, between all cuts of its two cards."""
    first, end = _edges(group, move.layers)
    sections = (card.section(move.group) for card in ends)
    cuts = {cut for section in sections if section for cut in section.cuts if first < cut < end}
    edges = sorted({first, end} | cuts)
    # A move that others cut into too many pieces is drawn as one, with its true thickness.
    edges = [first, end] if len(edges) > MAX_LAYER_STRANDS else edges
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def _touches(one: Strand, two: Strand) -> bool:
    ends = zip(one[:2], two[:2], strict=True)
    return one.colour == two.colour and all(abs(a.bottom - b.top) < 1e-6 for a, b in ends)


def split(span: Span, limit: int) -> list[Span]:
    """Return ``span`` in at most ``limit`` nearly equal parts, in order."""
    parts = min(len(span), limit)
    edges = [span.first + len(span) * part // parts for part in range(parts + 1)]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


# ---------------------------------------------------------------- hints and notes


def _hints(plan: Plan, cards: Iterable[Card]) -> tuple[str, ...]:
    """Return how to read the picture."""
    words = {unit_word(group) for group in plan.spec.groups}
    word = words.pop() if len(words) == 1 else "head or unit"
    hints = [
        f"On a card: a column for each {word}, the first layer on top, later layers paler.",
        "A band is one move, as thick as its share of the rank's part of the group.",
    ]
    sections = [(card.side, section) for card in cards for section in card.sections]
    if any(side is PictureSide.SOURCE and section.idle for side, section in sections):
        hints.append("Grey at a source's edge: held there, but not sent by that rank.")
    if any(section.interleaved for _, section in sections):
        hints.append("Hatched: only the tokens named, interleaved over ranks.")
    return tuple(hints)


def _notes(
    plan: Plan, carried: Sequence[CarriedMove], bands: Sequence[Band], cards: Iterable[Card]
) -> tuple[str, ...]:
    """Return what the picture leaves out."""
    notes = []
    empty = len(plan.moves) - len(carried)
    if empty and carried:
        notes.append(f"Not drawn: {plural(empty, 'move')} with nothing to carry for this request.")
    hidden = [f"{len(card.ranks):,} {card.side.engine}" for card in cards if card.hidden]
    if hidden:
        notes.append(f"Not shown: {' and '.join(hidden)} ranks from the middle.")
    if len(bands) < len(carried):
        missing = plural(len(carried) - len(bands), "move")
        why = "too many" if len(bands) == MAX_BANDS else "between ranks that are not shown"
        notes.append(f"Not drawn: {missing} of {len(carried):,}, {why}.")
    return tuple(notes)
