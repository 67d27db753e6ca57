"""The SVG of a scene: one ``<svg>`` element. Decides nothing but markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from kvferry.plan.pictures.cards import CARD_WIDTH, LABEL_WIDTH, MARGIN, RAIL_WIDTH, WIDTH
from kvferry.plan.pictures.colours import PALEST
from kvferry.plan.pictures.parts import (
    Band,
    Box,
    Card,
    Elided,
    LegendKey,
    PictureSide,
    Scene,
    Section,
    Strand,
)

FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
STYLE = f"""
.kvf {{ font-family: {FONT}; font-size: 13px; }}
.kvf .paper {{ fill: #ffffff; }}
.kvf text {{ fill: #1c2430; }}
.kvf .title {{ font-size: 34px; font-weight: 700; letter-spacing: -0.5px; }}
.kvf .subtitle {{ font-size: 16px; fill: #4b5565; }}
.kvf .heading {{ font-size: 15px; font-weight: 600; }}
.kvf .name {{ font-size: 15px; font-weight: 600; }}
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
# Beyond this, caps on the rails cost more bytes than they show.
MAX_CAPPED = 400
# What XML cannot carry even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """``text`` for an element or a quoted attribute, whatever it contains."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def drawing(scene: Scene) -> str:
    """The picture as one element that stands alone or inside a page."""
    capped = len(scene.bands) <= MAX_CAPPED
    depths = _depths(scene)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kvf" role="img" '
        f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" '
        f'width="{_n(scene.width)}" height="{_n(scene.height)}">',
        f"<title>{escape(scene.title)}</title>",
        f"<desc>{escape(_description(scene))}</desc>",
        f"<style>{STYLE}</style>",
        _defs(depths),
        _rect(Box(0, 0, scene.width, scene.height), "paper"),
        *_head(scene),
        *(_card(card, depths) for card in scene.cards),
        *(_elided(one) for one in scene.elided),
        '<g class="bands">',
        # The thin ones last, or the thick ones would hide them from the pointer.
        *(_band(band, capped) for band in sorted(scene.bands, key=lambda band: -band.num_bytes)),
        "</g>",
        *_foot(scene),
        "</svg>",
    ]
    return "\n".join(parts)


_HATCH = (
    '<pattern id="kvf-hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V7"/></pattern>'
)

Depths = dict[tuple[float, float], str]


def _depths(scene: Scene) -> Depths:
    """A name for the shade of each part of the layers that some rank holds."""
    sections = [section for card in scene.cards for section in card.sections]
    found = dict.fromkeys(held.depth for section in sections for held in section.held)
    return {depth: f"kvf-depth-{index}" for index, depth in enumerate(found)}


def _defs(depths: Depths) -> str:
    shades = "".join(_shade(name, first, end) for (first, end), name in depths.items())
    return f"<defs>{_HATCH}{shades}</defs>"


def _shade(name: str, first: float, end: float) -> str:
    stops = "".join(
        f'<stop offset="{offset}" stop-color="#fff" stop-opacity="{_n(PALEST * depth)}"/>'
        for offset, depth in enumerate((first, end))
    )
    return f'<linearGradient id="{name}" x1="0" y1="0" x2="0" y2="1">{stops}</linearGradient>'


def _description(scene: Scene) -> str:
    return ". ".join([scene.subtitle, *scene.headings, *scene.notes])


def _n(value: float) -> str:
    """A coordinate: two decimals at most, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(box: Box, css: str, extra: str = "") -> str:
    at = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.w)}" height="{_n(box.h)}"'
    return f'<rect class="{css}" {at}{extra}/>'


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    turn = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{css}"{turn}>{escape(text)}</text>'


def _head(scene: Scene) -> Iterator[str]:
    right = scene.width - MARGIN
    yield _text(MARGIN, 56, scene.title, "title")
    yield _text(MARGIN, 88, scene.subtitle, "subtitle")
    yield _text(MARGIN, 134, scene.headings[0], "heading")
    yield _text(right, 134, scene.headings[1], "heading", "end")


# ---------------------------------------------------------------- cards


def _card(card: Card, depths: Depths) -> str:
    """A card's group: the frame, the rank's name, and a section for each group."""
    data = f'data-side="{card.side}" data-rank="{card.rank}"'
    parts = [
        f'<g class="card" {data}><title>{escape(card.tip)}</title>',
        _rect(card.box, "box", ' rx="7"'),
        *_name(card),
        *(line for section in card.sections for line in _section(card, section, depths)),
        "</g>",
    ]
    return "".join(parts)


def _edge(card: Card) -> tuple[float, str]:
    """Where a card's labels begin: its outer edge."""
    if card.side is PictureSide.SOURCE:
        return card.box.x + 12, "start"
    return card.box.x + card.box.w - 12, "end"


def _name(card: Card) -> Iterator[str]:
    x, anchor = _edge(card)
    middle = card.box.y + card.box.h / 2
    if card.box.h < 40:
        text = f"{escape(card.name)} <tspan class='muted'>{escape(card.place)}</tspan>"
        turn = f' text-anchor="{anchor}"' if anchor != "start" else ""
        yield f'<text x="{_n(x)}" y="{_n(middle + 4)}" class="small"{turn}>{text}</text>'
        return
    yield _text(x, card.box.y + 24, card.name, "name", anchor)
    yield _text(x, card.box.y + 42, card.place, "muted", anchor)


def _section(card: Card, section: Section, depths: Depths) -> Iterator[str]:
    """The map, shaded by depth and hatched where tokens are interleaved; the empty rail."""
    yield _rect(section.map, "void")
    for cell in section.cells:
        yield _rect(cell.box, "cell", f' fill="{cell.colour}"')
    for held in section.held:
        yield _rect(held.block, "shade", f' fill="url(#{depths[held.depth]})"')
        if section.interleaved:
            yield _rect(held.block, "shade", ' fill="url(#kvf-hatch)"')
        yield _rect(held.rail, "held")
    if card.box.h >= 40:
        yield from _labels(card, section)


def _labels(card: Card, section: Section) -> Iterator[str]:
    """As many lines beside the map as it is high."""
    if card.side is PictureSide.SOURCE:
        x, anchor = section.map.x - 10, "end"
    else:
        x, anchor = section.map.x + section.map.w + 10, "start"
    lines = [(section.name, "label")] if section.name else []
    lines += [(text, "muted") for text in section.lines]
    fitting = int((section.map.h + 4) // 15)
    for line, (text, css) in enumerate(lines[:fitting]):
        yield _text(x, section.map.y + 11 + 16 * line, text, css, anchor)


def _elided(one: Elided) -> str:
    middle = one.box.y + one.box.h / 2 + 5
    data = f'data-side="{one.side}" data-ranks="{one.ranks.first}-{one.ranks.end}"'
    frame = _rect(one.box, "gone", ' rx="7"')
    label = _text(one.box.x + one.box.w / 2, middle, one.text, "name", "middle")
    return f'<g class="elided" {data}>{frame}{label}</g>'


# ---------------------------------------------------------------- bands


def _band(band: Band, capped: bool) -> str:
    move = band.move
    data = (
        f'data-move="{band.index}" data-group="{escape(move.group)}" '
        f'data-source="{move.source}" data-target="{move.target}" '
        f'data-layers="{move.layers.first}-{move.layers.end}" '
        f'data-units="{move.units.first}-{move.units.end}" data-bytes="{band.num_bytes}"'
    )
    # A band into the card of the ranks left out is fainter: that end of it is not exact.
    ink, edge = (band.ink, 0.6) if None not in band.blocks else (band.ink / 2, 0.2)
    data += f' fill-opacity="{_n(ink)}" stroke-opacity="{edge}"'
    blocks = "".join(
        f' data-{name}="{" ".join(_n(value) for value in box)}"'
        for name, box in zip(("from", "to"), band.blocks, strict=True)
        if box is not None
    )
    strands = "".join(_strand(strand) for strand in band.strands)
    caps = "".join(_caps(band)) if capped else ""
    return f'<g class="band" {data}{blocks}><title>{escape(band.tip)}</title>{strands}{caps}</g>'


_LEFT = MARGIN + CARD_WIDTH
_RIGHT = WIDTH - MARGIN - CARD_WIDTH


def _strand(strand: Strand) -> str:
    """A ribbon: level where it leaves and where it arrives."""
    (a, b), (c, d) = strand.source, strand.target
    # A ribbon thinner than this vanishes on a projector.
    b, d = max(b, a + 0.8), max(d, c + 0.8)
    middle = _n((_LEFT + _RIGHT) / 2)
    left, right = _n(_LEFT), _n(_RIGHT)
    path = (
        f"M{left} {_n(a)}C{middle} {_n(a)} {middle} {_n(c)} {right} {_n(c)}"
        f"V{_n(d)}C{middle} {_n(d)} {middle} {_n(b)} {left} {_n(b)}Z"
    )
    return f'<path fill="{strand.colour}" stroke="{strand.colour}" d="{path}"/>'


def _caps(band: Band) -> Iterable[str]:
    """The band's places on the two rails."""
    for strand in band.strands:
        ends = ((_LEFT - RAIL_WIDTH, strand.source), (_RIGHT, strand.target))
        for (x, end), block in zip(ends, band.blocks, strict=True):
            if block is not None:
                box = Box(x, end.top, RAIL_WIDTH, max(0.8, end.bottom - end.top))
                yield _rect(box, "rail", f' fill="{strand.colour}"')


# ---------------------------------------------------------------- foot


def _foot(scene: Scene) -> Iterator[str]:
    if scene.message:
        y = (scene.floor + 148) / 2
        yield _text(scene.width / 2, y, scene.message, "message", "middle")
    top = scene.floor + 44
    for line, key in enumerate(scene.keys):
        yield from _key(key, top + 24 * line)
    for line, hint in enumerate(scene.hints):
        yield _text(scene.width - MARGIN, top + 24 * line, hint, "muted", "end")
    below = top + 24 * max(len(scene.keys), len(scene.hints))
    for line, note in enumerate(scene.notes):
        yield _text(MARGIN, below + 24 * line, note, "name")


def _key(key: LegendKey, y: float) -> Iterator[str]:
    width = LABEL_WIDTH / max(1, len(key.colours))
    for index, colour in enumerate(key.colours):
        # A hair wider than its share, so that no seam shows between two.
        box = Box(MARGIN + width * index, y - 12, width + 0.3, 15)
        yield _rect(box, "cell", f' fill="{colour}"')
    x = MARGIN + LABEL_WIDTH + 14
    yield (
        f'<text x="{_n(x)}" y="{_n(y)}" class="heading">{escape(key.name)}'
        f'<tspan class="muted" dx="10">{escape(key.text)}</tspan></text>'
    )
