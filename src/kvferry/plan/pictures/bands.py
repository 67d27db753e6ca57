"""Bands, made from moves: where each begins, where it ends, in which colours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.spec import Group
from kvferry.plan.pictures.cards import Carried, Column
from kvferry.plan.pictures.colours import unit_colour
from kvferry.plan.pictures.parts import (
    Band,
    Box,
    Section,
    Strand,
    Stretch,
    buckets,
    ordinals,
)
from kvferry.plan.pictures.words import move_texts, move_tip
from kvferry.plan.plan import Move, Plan, Request

# More bands than this are a grey smear, and a file that no browser likes.
MAX_BANDS = 2000
# Strands of all bands together; a move of many units gets fewer where there are many moves.
STRAND_BUDGET = 1600
MAX_STRANDS = 16
# A move that other moves cut into more pieces than this is drawn in one, at its true thickness.
MAX_PIECES = 16
# How dense a band is drawn; several that begin at the same place reach this together.
INK = 0.64


def drawable(source: Column, target: Column, carried: Sequence[Carried]) -> list[Carried]:
    """The moves that get a band, in the plan's order.

    A move needs one end that is shown. Where there are too many, those with
    both ends shown come first.
    """
    touching = []
    for one in carried:
        shown = (one.move.source in source.cards) + (one.move.target in target.cards)
        if shown:
            touching.append((-shown, one))
    touching.sort(key=lambda pair: (pair[0], pair[1].number))
    return sorted((one for _, one in touching[:MAX_BANDS]), key=lambda one: one.number)


def bands(
    plan: Plan, request: Request, source: Column, target: Column, carried: Sequence[Carried]
) -> tuple[Band, ...]:
    """One band for each move that can be drawn."""
    drawn = drawable(source, target, carried)
    limit = max(1, min(MAX_STRANDS, STRAND_BUDGET // max(1, len(drawn))))
    total = sum(one.num_bytes for one in carried)
    copies = Counter(_origin(one.move) for one in drawn)
    return tuple(
        Band(
            index=one.number,
            move=one.move,
            num_bytes=one.num_bytes,
            tip=move_tip(move_texts(plan, one.move, request, one.num_bytes, total)),
            strands=tuple(_strands(plan, one.move, source, target, limit)),
            ink=1 - (1 - INK) ** (1 / copies[_origin(one.move)]),
            blocks=(
                _block(source, one.move.source, one.move),
                _block(target, one.move.target, one.move),
            ),
        )
        for one in drawn
    )


def _origin(move: Move) -> tuple[int, str, Span, Span, Tokens]:
    return move.source, move.group, move.layers, move.units, move.tokens


def _section(column: Column, rank: int, move: Move) -> Section | None:
    card = column.cards.get(rank)
    return None if card is None else card.section(move.group)


def _block(column: Column, rank: int, move: Move) -> Box | None:
    section = _section(column, rank, move)
    return None if section is None else section.block(move)


def _strands(
    plan: Plan, move: Move, source: Column, target: Column, limit: int
) -> Iterator[Strand]:
    """A ribbon for each piece of layers and each few units; touching ones are joined."""
    group = plan.spec.group(move.group)
    ends = (_section(source, move.source, move), _section(target, move.target, move))
    current: Strand | None = None
    for layers in _pieces(group, move, ends):
        for units in buckets(move.units, limit):
            strand = Strand(
                _end(source, ends[0], move.source, move, layers, units),
                _end(target, ends[1], move.target, move, layers, units),
                _colour(plan, group, move, units),
            )
            if current is not None and _continues(current, strand):
                strand = _joined(current, strand)
            elif current is not None:
                yield current
            current = strand
    if current is not None:
        yield current


def _pieces(group: Group, move: Move, ends: Sequence[Section | None]) -> list[Span]:
    """The move's layers, as ordinals, between all cuts of the two cards it joins."""
    first, end = ordinals(group, move.layers)
    cuts = {cut for section in ends if section is not None for cut in section.cuts}
    edges = sorted({first, end} | {cut for cut in cuts if first < cut < end})
    if len(edges) > MAX_PIECES:
        edges = [first, end]
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def _end(
    column: Column, section: Section | None, rank: int, move: Move, layers: Span, units: Span
) -> Stretch:
    if section is not None:
        return section.stretch(layers, units, move.tokens)
    assert column.elided is not None
    return column.elided.stretch(rank)


def _colour(plan: Plan, group: Group, move: Move, units: Span) -> str:
    first, end = ordinals(group, move.layers)
    depth = (first + end) / 2 / len(group.layers)
    place = (units.first + units.end) / 2 / group.units
    groups = plan.spec.groups
    return unit_colour(groups.index(group), len(groups), place, depth)


def _continues(one: Strand, two: Strand) -> bool:
    same = one.colour == two.colour
    return same and all(
        abs(a.bottom - b.top) < 1e-6
        for a, b in ((one.source, two.source), (one.target, two.target))
    )


def _joined(one: Strand, two: Strand) -> Strand:
    return Strand(
        Stretch(one.source.top, two.source.bottom),
        Stretch(one.target.top, two.target.bottom),
        one.colour,
    )
