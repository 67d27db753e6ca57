"""The scene: the whole picture put together of columns, bands, words. Still no markup."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout.intervals import Span
from kvferry.layout.spec import Group
from kvferry.plan.pictures.bands import MAX_BANDS, bands
from kvferry.plan.pictures.cards import (
    COLUMNS_TOP,
    LEAST_WEIGHT,
    WIDTH,
    Carried,
    Column,
    column_height,
)
from kvferry.plan.pictures.colours import unit_colour
from kvferry.plan.pictures.parts import Band, LegendKey, PictureSide, Row, Scene, buckets
from kvferry.plan.pictures.words import (
    group_text,
    heading,
    move_texts,
    nothing_text,
    plural,
    shorten,
    subtitle,
    title,
    unit_word,
)
from kvferry.plan.plan import Plan, Request

MAX_ROWS = 200
MAX_KEYS = 8
KEY_COLOURS = 32
LINE = 24.0


def scene(plan: Plan, request: Request) -> Scene:
    """Everything that the picture of this plan, for this request, shows."""
    carried = [
        Carried(index, move, num_bytes)
        for index, move in enumerate(plan.moves)
        if (num_bytes := plan.bytes_of(move, request))
    ]
    total = sum(one.num_bytes for one in carried)
    sizes = _group_sizes(plan, carried)
    height = column_height(plan.source.num_ranks, plan.target.num_ranks)
    weights = {name: max(LEAST_WEIGHT, size / max(1, total)) for name, size in sizes.items()}
    source = Column(PictureSide.SOURCE, plan.source, carried, weights, height)
    target = Column(PictureSide.TARGET, plan.target, carried, weights, height)
    drawn = bands(plan, request, source, target, carried)
    keys = tuple(_keys(plan, sizes))
    notes = tuple(_notes(plan, carried, drawn, (source, target)))
    hints = _hints(plan, (source, target)) if carried else ()
    floor = COLUMNS_TOP + height
    return Scene(
        width=WIDTH,
        height=floor + 36 + LINE * (max(len(keys), len(hints)) + len(notes)),
        floor=floor,
        title=title(plan),
        subtitle=subtitle(plan, request, total, len(carried)),
        headings=(
            heading(PictureSide.SOURCE, plan.source),
            heading(PictureSide.TARGET, plan.target),
        ),
        cards=(*source.cards.values(), *target.cards.values()),
        elided=tuple(column.elided for column in (source, target) if column.elided is not None),
        bands=drawn,
        keys=keys,
        hints=hints,
        notes=notes,
        message="" if carried else nothing_text(plan, request),
        rows=_rows(plan, request, carried, total),
        more_rows=_more_rows(carried),
    )


def _group_sizes(plan: Plan, carried: Sequence[Carried]) -> dict[str, int]:
    sizes = {group.name: 0 for group in plan.spec.groups}
    for one in carried:
        sizes[one.move.group] += one.num_bytes
    return sizes


def _keys(plan: Plan, sizes: dict[str, int]) -> list[LegendKey]:
    groups = plan.spec.groups
    keys = [
        LegendKey(
            shorten(group.name, 15),
            _swatches(group, index, len(groups)),
            group_text(group, sizes[group.name]),
        )
        for index, group in enumerate(groups[:MAX_KEYS])
    ]
    if len(groups) > MAX_KEYS:
        keys.append(LegendKey("…", (), f"{plural(len(groups) - MAX_KEYS, 'more group')}"))
    return keys


def _swatches(group: Group, index: int, num_groups: int) -> tuple[str, ...]:
    return tuple(
        unit_colour(index, num_groups, (units.first + units.end) / 2 / group.units, 0.0)
        for units in buckets(Span(0, group.units), KEY_COLOURS)
    )


def _hints(plan: Plan, columns: Sequence[Column]) -> tuple[str, ...]:
    """How to read the picture."""
    words = {unit_word(group) for group in plan.spec.groups}
    word = words.pop() if len(words) == 1 else "head or unit"
    hints = [
        f"On a card: a column for each {word}, the first layer on top, later layers paler.",
        "A band is one move, as thick as its share of the rank's part of the group.",
    ]
    sections = [
        [section for card in column.cards.values() for section in card.sections]
        for column in columns
    ]
    if any(section.idle for section in sections[0]):
        hints.append("Grey at a source's edge: held there, but not sent by that rank.")
    if any(section.interleaved for section in sections[0] + sections[1]):
        hints.append("Hatched: only the tokens named, interleaved over ranks.")
    return tuple(hints)


def _notes(
    plan: Plan, carried: Sequence[Carried], drawn: Sequence[Band], columns: Sequence[Column]
) -> list[str]:
    """What the picture does not show. It never leaves anything out silently."""
    notes = []
    idle = len(plan.moves) - len(carried)
    if idle and carried:
        notes.append(f"Not drawn: {plural(idle, 'move')} with nothing to carry for this request.")
    hidden = [column.elided for column in columns if column.elided is not None]
    if hidden:
        ranks = " and ".join(f"{len(one.ranks):,} {one.side.engine}" for one in hidden)
        notes.append(f"Not shown: {ranks} ranks from the middle.")
    if len(drawn) < len(carried):
        missing = plural(len(carried) - len(drawn), "move")
        why = "too many" if len(drawn) == MAX_BANDS else "between ranks that are not shown"
        notes.append(f"Not drawn: {missing} of {len(carried):,}, {why}.")
    return notes


def _rows(plan: Plan, request: Request, carried: Sequence[Carried], total: int) -> tuple[Row, ...]:
    return tuple(
        Row(one.number, move_texts(plan, one.move, request, one.num_bytes, total))
        for one in carried[:MAX_ROWS]
    )


def _more_rows(carried: Sequence[Carried]) -> str:
    left = len(carried) - MAX_ROWS
    return f"… and {plural(left, 'more move')}." if left > 0 else ""
