"""The drawing of a scene as one ``<svg>`` element."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from kvferry.layout.intervals import Span
from kvferry.plan.pictures import captions
from kvferry.plan.pictures.colours import PALEST, unit_colour
from kvferry.plan.pictures.scene import (
    CARD_WIDTH,
    COLUMNS_TOP,
    MARGIN,
    MIN_SHARD_HEIGHT,
    RAIL_WIDTH,
    WIDTH,
    Band,
    Box,
    Card,
    PictureSide,
    Scene,
    Section,
    split,
)

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
.kvf .message {{ font-size: 20px; }}
.kvf .box {{ fill: #ffffff; stroke: #cfd6e0; }}
.kvf .void {{ fill: #eef1f5; }}
.kvf .held {{ fill: #dbe1ea; }}
.kvf .gone {{ fill: #f6f8fa; stroke: #9aa5b4; stroke-dasharray: 4 4; }}
.kvf .band path {{ stroke-width: 0.8; }}
.kvf .band .rail {{ fill-opacity: 1; }}
.kvf .band:hover path {{ fill-opacity: 0.92; }}
.kvf .hatch {{ stroke: #ffffff; stroke-width: 2.2; stroke-opacity: 0.75; }}
"""
_HATCH = (
    '<pattern id="kvf-hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V7"/></pattern>'
)
# The edges of the space between the two columns.
_LEFT, _RIGHT = MARGIN + CARD_WIDTH, WIDTH - MARGIN - CARD_WIDTH
LINE_HEIGHT, LEGEND_WIDTH = 24.0, 112.0
MAX_LEGEND_GROUPS, MAX_COLOURS = 8, 32
# With more bands than this, marks on the rails cost more bytes than they show.
MAX_MARKED_BANDS = 400
# Ribbons and columns that are thinner vanish on a projector.
MIN_RIBBON, MIN_COLUMN = 0.8, 2.0
# Characters that XML cannot carry, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Return any text as the content of an element or a quoted attribute."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def drawing(scene: Scene) -> str:
    """Return the picture as one element, for a file of its own or inside a page."""
    plan = scene.plan
    num_lines = _num_lines(scene) + len(scene.notes)
    height = COLUMNS_TOP + scene.height + 36 + LINE_HEIGHT * num_lines
    title = captions.title(plan)
    subtitle = captions.subtitle(plan, scene.request, scene.num_bytes(), len(scene.carried))
    headings = [
        captions.heading(side.engine, layout)
        for side, layout in zip(PictureSide, (plan.source, plan.target), strict=True)
    ]
    # Thin bands are drawn last, so that thick ones do not hide them from the pointer.
    bands = sorted(scene.bands, key=lambda band: -band.carried.num_bytes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kvf" role="img" '
        f'viewBox="0 0 {_n(WIDTH)} {_n(height)}" width="{_n(WIDTH)}" height="{_n(height)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape('. '.join([subtitle, *headings, *scene.notes]))}</desc>",
        f"<style>{STYLE}</style>",
        f"<defs>{_HATCH}{''.join(_shades(scene))}</defs>",
        _rect(Box(0, 0, WIDTH, height), "paper"),
        _text(MARGIN, 56, title, "title"),
        _text(MARGIN, 88, subtitle, "subtitle"),
        _text(MARGIN, 134, headings[0], "heading"),
        _text(WIDTH - MARGIN, 134, headings[1], "heading", "end"),
        *(_card(scene, card) for card in scene.cards),
        '<g class="bands">',
        *(_band(scene, band) for band in bands),
        "</g>",
        *_foot(scene),
        "</svg>",
    ]
    return "\n".join(parts)


def _n(value: float) -> str:
    """Return a coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(box: Box, css: str, extra: str = "") -> str:
    at = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.w)}" height="{_n(box.h)}"'
    return f'<rect class="{css}" {at}{extra}/>'


def _text(x: float, y: float, text: str, css: str, anchor: str = "start", after: str = "") -> str:
    """Return a line of text. ``after`` follows it in a muted colour."""
    attributes = f'x="{_n(x)}" y="{_n(y)}" class="{css}"'
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    span = f'<tspan class="muted" dx="10">{escape(after)}</tspan>' if after else ""
    return f"<text {attributes}>{escape(text)}{span}</text>"


# ---------------------------------------------------------------- cards


def _shade_id(depth: tuple[float, float]) -> str:
    return "kvf-depth-{}-{}".format(*(round(1e4 * at) for at in depth))


def _shades(scene: Scene) -> Iterator[str]:
    """Return a gradient for each stretch of layers that some rank holds: deeper is paler."""
    sections = [section for card in scene.cards for section in card.sections]
    depths = [section.depth(shard.layers) for section in sections for shard in section.shards]
    for depth in dict.fromkeys(depths):
        stops = "".join(
            f'<stop offset="{offset}" stop-color="#fff" stop-opacity="{_n(PALEST * at)}"/>'
            for offset, at in enumerate(depth)
        )
        name = _shade_id(depth)
        yield f'<linearGradient id="{name}" x1="0" y1="0" x2="0" y2="1">{stops}</linearGradient>'


def _card(scene: Scene, card: Card) -> str:
    box = card.box
    if card.hidden:
        data = f'data-side="{card.side}" data-ranks="{card.ranks.first}-{card.ranks.end}"'
        label = _text(box.x + box.w / 2, box.y + box.h / 2 + 5, card.name, "name", "middle")
        frame = _rect(box, "gone", ' rx="7"')
        return f'<g class="elided" {data}>{frame}{label}</g>'
    small = box.h < 40
    if card.side is PictureSide.SOURCE:
        x, anchor = box.x + 12, "start"
    else:
        x, anchor = box.x + box.w - 12, "end"
    if small:
        names = [_text(x, box.y + box.h / 2 + 4, card.name, "small", anchor, card.place)]
    else:
        names = [_text(x, box.y + 24, card.name, "name", anchor)]
        names.append(_text(x, box.y + 42, card.place, "muted", anchor))
    parts = [
        f'<g class="card" data-side="{card.side}" data-rank="{card.ranks.first}">',
        f"<title>{escape(card.tip)}</title>",
        _rect(box, "box", ' rx="7"'),
        *names,
    ]
    for section in card.sections:
        parts += _section(scene, section)
        if not small:
            parts += _labels(scene, card.side, section)
    return "".join([*parts, "</g>"])


def _section(scene: Scene, section: Section) -> Iterator[str]:
    """Return the map, shaded by depth and hatched if interleaved, and the empty rail."""
    groups, group = scene.plan.spec.groups, section.group
    yield _rect(section.map, "void")
    column = section.map.w / group.units
    gap = 1.0 if column >= 5 else 0.0
    for shard in section.shards:
        for units in split(shard.units, MAX_COLOURS):
            box = section.block(shard.layers, units, MIN_SHARD_HEIGHT)
            box = box._replace(w=max(MIN_COLUMN, box.w - gap))
            middle = (units.first + units.end) / 2 / group.units
            colour = unit_colour(groups.index(group), len(groups), middle, 0.0)
            yield _rect(box, "cell", f' fill="{colour}"')
    for shard in section.shards:
        block = section.block(shard.layers, shard.units, MIN_SHARD_HEIGHT)
        yield _rect(block, "shade", f' fill="url(#{_shade_id(section.depth(shard.layers))})"')
        if section.interleaved:
            yield _rect(block, "shade", ' fill="url(#kvf-hatch)"')
        yield _rect(section.rail_block(shard.layers), "held")


def _labels(scene: Scene, side: PictureSide, section: Section) -> Iterator[str]:
    """Return as many lines beside the map as its height has room for."""
    group, box = section.group, section.map
    left = side is PictureSide.SOURCE
    x, anchor = (box.x - 10, "end") if left else (box.x + box.w + 10, "start")
    lines = [(text, "muted") for text in captions.shard_lines(group, section.shards)]
    if len(scene.plan.spec.groups) > 1 or group.units == 1:
        lines.insert(0, (captions.shorten(group.name, 15), "label"))
    for line, (text, css) in enumerate(lines[: int((box.h + 4) // 15)]):
        yield _text(x, box.y + 11 + 16 * line, text, css, anchor)


# ---------------------------------------------------------------- bands


def _band(scene: Scene, band: Band) -> str:
    number, move, num_bytes = band.carried
    # A band whose end is hidden is fainter: that end is not exact.
    exact = None not in band.blocks
    opacity, edge = (band.opacity, 0.6) if exact else (band.opacity / 2, 0.2)
    data = (
        f'data-move="{number}" data-group="{escape(move.group)}" '
        f'data-source="{move.source}" data-target="{move.target}" '
        f'data-layers="{move.layers.first}-{move.layers.end}" '
        f'data-units="{move.units.first}-{move.units.end}" data-bytes="{num_bytes}" '
        f'fill-opacity="{_n(opacity)}" stroke-opacity="{edge}"'
    )
    for name, block in zip(("from", "to"), band.blocks, strict=True):
        if block is not None:
            data += f' data-{name}="{" ".join(map(_n, block))}"'
    texts = captions.move_texts(scene.plan, move, scene.request, num_bytes, scene.num_bytes())
    title = f"<title>{escape(captions.move_tip(texts))}</title>"
    marks = _marks(band) if len(scene.bands) <= MAX_MARKED_BANDS else ()
    paths = "".join([*_ribbons(band), *marks])
    return f'<g class="band" {data}>{title}{paths}</g>'


def _ribbons(band: Band) -> Iterator[str]:
    """Return the band's strands, horizontal where they leave and where they arrive."""
    middle, left, right = _n((_LEFT + _RIGHT) / 2), _n(_LEFT), _n(_RIGHT)
    for (a, b), (c, d), colour in band.strands:
        bottoms = max(b, a + MIN_RIBBON), max(d, c + MIN_RIBBON)
        from_top, to_top, from_bottom, to_bottom = map(_n, (a, c, *bottoms))
        path = (
            f"M{left} {from_top}C{middle} {from_top} {middle} {to_top} {right} {to_top}"
            f"V{to_bottom}C{middle} {to_bottom} {middle} {from_bottom} {left} {from_bottom}Z"
        )
        yield f'<path fill="{colour}" stroke="{colour}" d="{path}"/>'


def _marks(band: Band) -> Iterator[str]:
    """Return the band's places on the two rails, as far as these are shown."""
    for *ends, colour in band.strands:
        places = zip((_LEFT - RAIL_WIDTH, _RIGHT), ends, band.blocks, strict=True)
        for x, (top, bottom), block in places:
            if block is not None:
                box = Box(x, top, RAIL_WIDTH, max(MIN_RIBBON, bottom - top))
                yield _rect(box, "rail", f' fill="{colour}"')


# ---------------------------------------------------------------- foot


def _num_lines(scene: Scene) -> int:
    """Return the lines of the legend and of the hints beside it."""
    num_groups = len(scene.plan.spec.groups)
    return max(min(num_groups, MAX_LEGEND_GROUPS + 1), len(scene.hints))


def _foot(scene: Scene) -> Iterator[str]:
    """Return the legend, the hints and the notes below the columns."""
    groups = scene.plan.spec.groups
    floor = COLUMNS_TOP + scene.height
    if not scene.carried:
        message = captions.no_moves_text(scene.plan, scene.request)
        yield _text(WIDTH / 2, (floor + COLUMNS_TOP) / 2, message, "message", "middle")
    top = floor + 44
    x = MARGIN + LEGEND_WIDTH + 14
    for index, group in enumerate(groups[:MAX_LEGEND_GROUPS]):
        y = top + LINE_HEIGHT * index
        parts = split(Span(0, group.units), MAX_COLOURS)
        width = LEGEND_WIDTH / len(parts)
        for place, units in enumerate(parts):
            middle = (units.first + units.end) / 2 / group.units
            colour = unit_colour(index, len(groups), middle, 0.0)
            # Slightly wider than its share, so that no seam shows between two.
            box = Box(MARGIN + width * place, y - 12, width + 0.3, 15)
            yield _rect(box, "cell", f' fill="{colour}"')
        text = captions.legend_text(group, scene.num_bytes(group.name))
        yield _text(x, y, captions.shorten(group.name, 15), "heading", after=text)
    if len(groups) > MAX_LEGEND_GROUPS:
        text = captions.plural(len(groups) - MAX_LEGEND_GROUPS, "more group")
        yield _text(x, top + LINE_HEIGHT * MAX_LEGEND_GROUPS, "…", "heading", after=text)
    for line, hint in enumerate(scene.hints):
        yield _text(WIDTH - MARGIN, top + LINE_HEIGHT * line, hint, "muted", "end")
    for line, note in enumerate(scene.notes, _num_lines(scene)):
        yield _text(MARGIN, top + LINE_HEIGHT * line, note, "name")
