"""The drawing of a scene as one ``<svg>`` element."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from kvferry.layout.intervals import Span
from kvferry.layout.tokens import EVERY
from kvferry.plan.describe import kind_text, rank_coordinates
from kvferry.plan.pictures import captions
from kvferry.plan.pictures.scene import (
    CARD_WIDTH,
    COLUMNS_TOP,
    MARGIN,
    WIDTH,
    Band,
    Box,
    Card,
    PictureSide,
    Scene,
    Section,
    split,
)
from kvferry.plan.plan import Plan, Request
from kvferry.plan.units import human_bytes

FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
STYLE = f"""
.kvf {{ font-family: {FONT}; font-size: 13px; }}
.kvf .paper {{ fill: #ffffff; }}
.kvf text {{ fill: #1c2430; }}
.kvf .title {{ font-size: 34px; font-weight: 700; letter-spacing: -0.5px; }}
.kvf .subtitle {{ font-size: 16px; fill: #4b5565; }}
.kvf .heading, .kvf .name {{ font-size: 15px; font-weight: 600; }}
.kvf .label {{ font-weight: 600; }}
.kvf .small {{ font-size: 11.5px; font-weight: 600; }}
.kvf .muted {{ fill: #566071; font-weight: 400; }}
.kvf .box {{ fill: #ffffff; stroke: #cfd6e0; }}
.kvf .void {{ fill: #eef1f5; }}
.kvf .held {{ fill: #dbe1ea; }}
.kvf .band path {{ fill-opacity: 0.64; stroke-opacity: 0.6; stroke-width: 0.8; }}
.kvf .band:hover path {{ fill-opacity: 0.92; }}
.kvf .hatch {{ stroke: #ffffff; stroke-width: 2.2; stroke-opacity: 0.75; }}
"""
_HATCH = (
    '<pattern id="kvf-hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V7"/></pattern>'
)
# The colours of units: evenly spaced in OKLCH, from teal over violet to amber. Lightness rises all
# the way, so units stay in order for colour-blind readers and in print.
_RAMP = "02707e 0a75c2 7b6fd4 bc6cc1 e97295 fc8a5e f0b135"
_STOPS = tuple(tuple(bytes.fromhex(stop)) for stop in _RAMP.split())
# Share of its part of the ramp that a group leaves unused at each end, so that groups differ.
_RAMP_MARGIN = 0.12
# Share of white in bands of a group's last layer. Those of the first layer have none.
_PALEST = 0.32
LINE_HEIGHT, LEGEND_WIDTH = 24.0, 112.0
# Limits on the strips of different colour: of one card or band, and of all bands together.
MAX_COLOURS, MAX_STRIPS = 32, 1600
# Thinner blocks and ribbons vanish on a projector.
MIN_BLOCK, MIN_RIBBON = 2.0, 0.8
_HINTS = (
    "On a card: a column for each head or unit, a row for each layer.",
    "A band is one move, as thick as its share of the bytes. Later layers are paler.",
    "Grey on the edge of a card: bytes that no band carries.",
)
# Characters that XML cannot carry, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Return any text as the content of an element or a quoted attribute."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def as_svg(plan: Plan, request: Request) -> str:
    """Return an SVG document that shows what a plan moves for a request."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + drawing(Scene(plan, request)) + "\n"


def drawing(scene: Scene) -> str:
    """Return the picture as one element, for a file of its own or inside a page."""
    plan = scene.plan
    notes = captions.notes(scene)
    foot = COLUMNS_TOP + scene.height + 44
    notes_top = foot + LINE_HEIGHT * max(len(plan.spec.groups), len(_HINTS))
    height = notes_top - 8 + LINE_HEIGHT * len(notes)
    title = captions.title(plan)
    subtitle = captions.subtitle(scene)
    headings = [captions.heading(plan, side) for side in PictureSide]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kvf" role="img" '
        f'viewBox="0 0 {_n(WIDTH)} {_n(height)}" width="{_n(WIDTH)}" height="{_n(height)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape('. '.join([subtitle, *headings, *notes]))}</desc>",
        f"<style>{STYLE}</style>",
        f"<defs>{_HATCH}</defs>",
        _rect(Box(0, 0, WIDTH, height), "paper"),
        _text(MARGIN, 56, title, "title"),
        _text(MARGIN, 88, subtitle, "subtitle"),
        _text(MARGIN, 134, headings[0], "heading"),
        _text(WIDTH - MARGIN, 134, headings[1], "heading", "end"),
        *(_card(scene, card) for card in scene.cards),
        '<g class="bands">',
        *(_band(scene, band) for band in scene.bands),
        "</g>",
        *_legend(scene, foot),
    ]
    for line, hint in enumerate(_HINTS):
        parts.append(_text(WIDTH - MARGIN, foot + LINE_HEIGHT * line, hint, "muted", "end"))
    for line, note in enumerate(notes):
        parts.append(_text(MARGIN, notes_top + LINE_HEIGHT * line, note, "name"))
    return "\n".join([*parts, "</svg>"])


def _n(value: float) -> str:
    """Return a coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(box: Box, css: str, extra: str = "") -> str:
    at = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.w)}" height="{_n(box.h)}"'
    return f'<rect class="{css}" {at}{extra}/>'


def _text(x: float, y: float, text: str, css: str, anchor: str = "start", after: str = "") -> str:
    """Return a line of text. ``after`` follows it in a muted colour."""
    attributes = f'x="{_n(x)}" y="{_n(y)}" class="{css}" text-anchor="{anchor}"'
    span = f'<tspan class="muted" dx="10">{escape(after)}</tspan>' if after else ""
    return f"<text {attributes}>{escape(text)}{span}</text>"


def _colour(scene: Scene, group: str, units: Span, depth: float = 0.0) -> str:
    """Return the colour of units, ``depth`` (0 to 1) of the way down the group's layers.

    With several groups, each has a part of the ramp.
    """
    groups = scene.plan.spec.groups
    index, found = next((i, one) for i, one in enumerate(groups) if one.name == group)
    margin = _RAMP_MARGIN if len(groups) > 1 else 0.0
    place = (units.first + units.end) / 2 / found.units
    at = (index + margin + (1 - 2 * margin) * place) / len(groups) * (len(_STOPS) - 1)
    stop = min(int(at), len(_STOPS) - 2)
    pairs = zip(_STOPS[stop], _STOPS[stop + 1], strict=True)
    pure = (low + (high - low) * (at - stop) for low, high in pairs)
    return "#" + "".join(f"{round(c + (255 - c) * _PALEST * depth):02x}" for c in pure)


def _card(scene: Scene, card: Card) -> str:
    box = card.box
    coordinates = rank_coordinates(card.side.layout_of(scene.plan), card.rank)
    place = " · ".join(coordinates) if card.sections else "holds nothing"
    name = f"{card.side.engine} {card.rank}"
    small = box.h < 40
    left = card.side is PictureSide.SOURCE
    x, anchor = (box.x + 12, "start") if left else (box.x + box.w - 12, "end")
    if small:
        names = _text(x, box.y + box.h / 2 + 4, name, "small", anchor, place)
    else:
        names = _text(x, box.y + 24, name, "name", anchor)
        names += _text(x, box.y + 42, place, "muted", anchor)
    parts = [
        f'<g class="card" data-side="{card.side}" data-rank="{card.rank}">',
        f"<title>{escape(captions.card_tip(scene.plan, card))}</title>",
        _rect(box, "box", ' rx="7"'),
        names,
    ]
    for section in card.sections:
        parts += _section(scene, section)
        if not small:
            parts += _labels(card.side, section)
    return "".join([*parts, "</g>"])


def _section(scene: Scene, section: Section) -> Iterator[str]:
    """Return the map, hatched if interleaved, and the empty rail."""
    yield _rect(section.map, "void")
    yield _rect(section.rail, "held")
    for shard in section.shards:
        for units in split(shard.units, MAX_COLOURS):
            box = section.block(shard.layers, units)
            box = box._replace(w=max(MIN_BLOCK, box.w - 1), h=max(MIN_BLOCK, box.h))
            yield _rect(box, "cell", f' fill="{_colour(scene, section.group.name, units)}"')
        if shard.tokens.pattern != EVERY:
            yield _rect(section.block(shard.layers, shard.units), "", ' fill="url(#kvf-hatch)"')


def _labels(side: PictureSide, section: Section) -> Iterator[str]:
    """Return as many lines beside the map as its height has room for."""
    group, box = section.group, section.map
    left = side is PictureSide.SOURCE
    x, anchor = (box.x - 10, "end") if left else (box.x + box.w + 10, "start")
    lines = [(captions.shorten(group.name, 15), "label")]
    lines += [(text, "muted") for text in captions.shard_lines(group, section.shards)]
    for line, (text, css) in enumerate(lines[: int((box.h + 4) // 15)]):
        yield _text(x, box.y + 11 + 16 * line, text, css, anchor)


def _band(scene: Scene, band: Band) -> str:
    number, move, num_bytes = band.carried
    data = (
        f'data-move="{number}" data-group="{escape(move.group)}" '
        f'data-source="{move.source}" data-target="{move.target}" data-bytes="{num_bytes}"'
    )
    tip = captions.move_tip(captions.move_texts(scene, band.carried))
    return f'<g class="band" {data}><title>{escape(tip)}</title>{"".join(_strips(scene, band))}</g>'


def _strips(scene: Scene, band: Band) -> Iterator[str]:
    """Return a band's ribbons, one for each unit or a few, and its places on the two rails."""
    move = band.carried.move
    group = scene.plan.spec.group(move.group)
    places = group.places_in(move.layers)
    depth = (places.first + places.end) / 2 / len(group.layers)
    left, right = MARGIN + CARD_WIDTH, WIDTH - MARGIN - CARD_WIDTH
    x, mid, far = map(_n, (left, (left + right) / 2, right))
    limit = max(1, min(MAX_COLOURS, MAX_STRIPS // len(scene.bands)))
    for units in split(move.units, limit):
        colour = _colour(scene, group.name, units, depth)
        boxes = []
        for end in (band.source, band.target):
            unit = end.h / len(move.units)
            y, h = end.y + unit * (units.first - move.units.first), unit * len(units)
            box = end._replace(y=y, h=max(MIN_RIBBON, h))
            yield _rect(box, "rail", f' fill="{colour}"')
            boxes.append(box)
        a, b, c, d = (_n(edge) for box in boxes for edge in (box.y, box.y + box.h))
        path = f"M{x} {a}C{mid} {a} {mid} {c} {far} {c}V{d}C{mid} {d} {mid} {b} {x} {b}Z"
        yield f'<path fill="{colour}" stroke="{colour}" d="{path}"/>'


def _legend(scene: Scene, top: float) -> Iterator[str]:
    """Return a line for each group: its colours, name, shape and bytes."""
    x = MARGIN + LEGEND_WIDTH + 14
    for index, group in enumerate(scene.plan.spec.groups):
        y = top + LINE_HEIGHT * index
        parts = split(Span(0, group.units), MAX_COLOURS)
        width = LEGEND_WIDTH / len(parts)
        for place, part in enumerate(parts):
            # Slightly wider than its share, so that no seam shows between two.
            box = Box(MARGIN + width * place, y - 12, width + 0.3, 15)
            yield _rect(box, "cell", f' fill="{_colour(scene, group.name, part)}"')
        units = captions.plural(group.units, captions.unit_word(group))
        shape = f"{units} × {captions.plural(len(group.layers), 'layer')}, {kind_text(group)}"
        after = f"{shape}, {human_bytes(scene.sizes[group.name])}"
        yield _text(x, y, captions.shorten(group.name, 15), "heading", after=after)
