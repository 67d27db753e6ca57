"""Tests that a picture shows every rank and every move of a plan, with the right numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from kvferry.layout import (
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Paged,
    Parallel,
    Shard,
    Span,
    StateRow,
    Tensor,
    Window,
    attention,
)
from kvferry.layout.spec import attention_group
from kvferry.plan.pictures import as_html, as_svg
from kvferry.plan.pictures.colours import unit_colour
from kvferry.plan.pictures.scene import Band, Card, Scene, Section, Strand, scene
from kvferry.plan.pictures.svg import escape
from kvferry.plan.plan import Plan, Request
from kvferry.plan.reshard import reshard
from kvferry.plan.units import human_bytes

SVG = "{http://www.w3.org/2000/svg}"
REQUEST = Request(8192, 0)
LATENT = CacheSpec(
    61, (Group("latent", Paged(), tuple(range(61)), 1, (Tensor("c", DType.BFLOAT16, 576),)),)
)
HYBRID = CacheSpec(
    48,
    (
        attention_group("kv", Paged(), tuple(range(3, 48, 4)), 4, 128, None, DType.BFLOAT16),
        attention_group("swa", Window(2048), tuple(range(1, 48, 4)), 4, 128, None, DType.BFLOAT16),
        Group(
            "delta",
            StateRow(),
            tuple(range(0, 48, 2)),
            16,
            (Tensor("state", DType.FLOAT32, 128 * 128),),
        ),
    ),
)


def heads(layers: int, kv_heads: int) -> CacheSpec:
    return attention(layers=layers, kv_heads=kv_heads, head_dim=128)


def plan_of(
    spec: CacheSpec, source: Parallel | ExplicitSharding, target: Parallel | ExplicitSharding
) -> Plan:
    return reshard(Layout(spec, source), Layout(spec, target))


PLANS = {
    "tp4-tp1": plan_of(heads(64, 8), Parallel(tp=4), Parallel(tp=1)),
    "tp2-tp4": plan_of(heads(64, 8), Parallel(tp=2), Parallel(tp=4)),
    "replicated-tp2": plan_of(heads(64, 4), Parallel(tp=8), Parallel(tp=2)),
    "tp2pp2-tp4": plan_of(heads(64, 8), Parallel(tp=2, pp=2), Parallel(tp=4)),
    "tp3-tp2": plan_of(heads(48, 6), Parallel(tp=3), Parallel(tp=2)),
    "cp2-tp2": plan_of(heads(64, 8), Parallel(cp=2), Parallel(tp=2)),
    "cp3-cp2": plan_of(heads(8, 2), Parallel(cp=3), Parallel(cp=2)),
    "mla-shared": plan_of(LATENT, Parallel(tp=4), Parallel(tp=2)),
    "mla-uneven": plan_of(LATENT, Parallel(tp=3), Parallel(tp=2)),
    "mla-spread": plan_of(LATENT, Parallel(tp=1), Parallel(tp=4)),
    "hybrid": plan_of(HYBRID, Parallel(tp=4), Parallel(tp=2)),
    "hybrid-cp": plan_of(HYBRID, Parallel(tp=2, cp=2), Parallel(tp=4, pp=2)),
}
BIG = plan_of(heads(128, 192), Parallel(tp=64, pp=8), Parallel(tp=48, pp=4))

each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.encode())


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in root.iter() if name in one.get("class", "").split()]


def text_of(root: ElementTree.Element) -> str:
    return "\n".join(root.itertext())


def title_of(element: ElementTree.Element) -> str:
    return element.findtext(f"{SVG}title") or ""


class Page(HTMLParser):
    """The elements of an HTML page, as (tag, attributes), and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, **wanted: str) -> int:
        return sum(
            one == tag and all(attributes.get(k) == v for k, v in wanted.items())
            for one, attributes in self.elements
        )


# ---------------------------------------------------------------- what is drawn


@each_plan
def test_every_move_has_one_band_and_every_rank_one_card(plan: Plan) -> None:
    root = parse(as_svg(plan, REQUEST))
    bands = of_class(root, "band")
    assert sorted(int(band.attrib["data-move"]) for band in bands) == list(range(len(plan.moves)))
    cards = [(one.get("data-side"), one.get("data-rank")) for one in of_class(root, "card")]
    assert sorted(cards) == sorted(
        (side, str(rank))
        for side, layout in (("source", plan.source), ("target", plan.target))
        for rank in range(layout.num_ranks)
    )
    assert not of_class(root, "elided")


@each_plan
def test_band_has_the_numbers_of_its_move(plan: Plan) -> None:
    request = Request(9000, 1000)
    total = plan.payload_bytes(request)
    for band in of_class(parse(as_svg(plan, request)), "band"):
        move = plan.moves[int(band.attrib["data-move"])]
        num_bytes = plan.bytes_of(move, request)
        assert band.attrib["data-bytes"] == str(num_bytes)
        assert band.attrib["data-source"] == str(move.source)
        assert band.attrib["data-target"] == str(move.target)
        lines = title_of(band).splitlines()
        assert lines[0] == f"prefill {move.source} → decode {move.target}"
        assert lines[1] == f"group {move.group}"
        assert re.match(
            rf"layers {plan.spec.group(move.group).layers_in(move.layers)[0]}\b", lines[2]
        )
        assert re.match(rf"(head|unit)s? {move.units.first}\b", lines[3])
        assert lines[4].startswith(f"tokens {plan.tokens_of(move, request).num_tokens:,} (")
        assert lines[5] == f"{human_bytes(num_bytes)}, {100 * num_bytes / total:.1f} % of the total"


def test_card_shows_coordinates_and_what_it_sends() -> None:
    plan = PLANS["tp2pp2-tp4"]
    root = parse(as_svg(plan, REQUEST))
    (card,) = [
        one
        for one in of_class(root, "card")
        if (one.get("data-side"), one.get("data-rank")) == ("source", "3")
    ]
    sent = sum(plan.bytes_of(move, REQUEST) for move in plan.moves if move.source == 3)
    assert title_of(card) == f"prefill 3 (pp1 · tp1)\nsends {human_bytes(sent)} in 2 moves"
    assert {"prefill 3", "pp1 · tp1", "heads 4-7", "layers 32-63"} <= set(card.itertext())


def test_heading_names_layouts_request_and_plan() -> None:
    spec = heads(64, 8)
    plan = reshard(Layout(spec, Parallel(tp=4)), Layout(spec, Parallel(tp=1), dp=4))
    text = text_of(parse(as_svg(plan, Request(8192, 2048))))
    assert "TP4 → TP1 × 4 replicas" in text
    for fact in ("64 layers", "8 heads", "8,192 tokens", "2,048 of them cached", "1.50 GiB"):
        assert fact in text
    assert plan.digest[:12] in text
    assert "Decode: 1 of 4 replicas, 1 rank, page 16, NHD" in text


def test_interleaved_tokens_are_named_and_hatched() -> None:
    svg = as_svg(PLANS["cp2-tp2"], REQUEST)
    texts = list(parse(svg).itertext())
    assert texts.count("tokens 0::2") == texts.count("tokens 1::2") == 1
    assert svg.count("url(#kvf-hatch)") == 2
    assert "url(#kvf-hatch)" not in as_svg(PLANS["tp4-tp1"], REQUEST)


def test_groups_have_different_colours_and_texts() -> None:
    text = text_of(parse(as_svg(PLANS["hybrid"], REQUEST)))
    assert "4 heads × 12 layers, window of 2,048 tokens" in text
    assert "16 units × 24 layers, one row per request" in text
    ramps = [{unit_colour(group, 3, unit / 16, 0.0) for unit in range(17)} for group in range(3)]
    assert not ramps[0] & ramps[1]
    assert not ramps[1] & ramps[2]


def test_moves_with_nothing_to_carry_are_counted_not_drawn() -> None:
    plan = plan_of(heads(4, 2), Parallel(cp=4), Parallel())
    drawn = scene(plan, Request(2))
    assert [band.carried.move.tokens.first for band in drawn.bands] == [0, 1]
    assert "Not drawn: 2 moves with nothing to carry for this request." in drawn.notes


@each_plan
def test_fully_cached_request_has_no_bands(plan: Plan) -> None:
    html = as_html(plan, Request(4096, 4096))
    assert not of_class(parse(as_svg(plan, Request(4096, 4096))), "band")
    assert "Nothing to move: decode has all 4,096 tokens cached." in html
    assert "<table>" not in html


def test_rank_without_shards_is_labelled() -> None:
    everything = Shard("kv", Span(0, 4), Span(0, 2))
    plan = plan_of(heads(4, 2), ExplicitSharding(((everything,), ())), Parallel(tp=2))
    assert text_of(parse(as_svg(plan, REQUEST))).count("holds nothing") == 1


# ---------------------------------------------------------------- where it is drawn


def cards_of(drawn: Scene, side: str) -> dict[int, Card]:
    return {card.ranks.first: card for card in drawn.cards if card.side == side}


def section_of(card: Card, group: str) -> Section:
    section = card.section(group)
    assert section is not None
    return section


def rails(drawn: Scene, side: str) -> Iterator[tuple[Band, Strand, float, float]]:
    for band in drawn.bands:
        for strand in band.strands:
            end = strand.source if side == "source" else strand.target
            yield band, strand, end.top, end.bottom


@each_plan
def test_bands_into_targets_fill_them_and_never_overlap(plan: Plan) -> None:
    drawn = scene(plan, REQUEST)
    for rank, card in cards_of(drawn, "target").items():
        ends = sorted(
            (top, bottom)
            for band, _, top, bottom in rails(drawn, "target")
            if band.carried.move.target == rank
        )
        for (_, above), (below, _) in itertools.pairwise(ends):
            assert above <= below + 1e-6
        held = sum(
            section.rail_block(shard.layers).h
            for section in card.sections
            for shard in section.shards
        )
        assert sum(bottom - top for top, bottom in ends) == pytest.approx(held)


@each_plan
def test_bands_begin_inside_their_sources_shards(plan: Plan) -> None:
    drawn = scene(plan, REQUEST)
    cards = cards_of(drawn, "source")
    for band, _, top, bottom in rails(drawn, "source"):
        move = band.carried.move
        section = section_of(cards[move.source], move.group)
        held = [section.rail_block(shard.layers) for shard in section.shards]
        assert any(rail.y - 1e-6 <= top < bottom <= rail.y + rail.h + 1e-6 for rail in held), move


def test_replicas_share_the_work_by_layers() -> None:
    drawn = scene(PLANS["replicated-tp2"], REQUEST)
    first, second = drawn.bands[:2]
    (upper,), (lower,) = first.strands, second.strands
    cards = cards_of(drawn, "source")
    assert upper.source.top == cards[0].sections[0].rail.y
    assert lower.source.top > cards[1].sections[0].rail.y + 1
    assert any("not sent by that rank" in hint for hint in drawn.hints)
    assert not any("not sent" in hint for hint in scene(PLANS["tp4-tp1"], REQUEST).hints)


def test_pipeline_stages_are_placed_by_layer() -> None:
    drawn = scene(PLANS["tp2pp2-tp4"], REQUEST)
    first, _, third, _ = (card.sections[0] for card in drawn.cards if card.side == "source")
    upper, lower = (one.block(one.shards[0].layers, one.shards[0].units) for one in (first, third))
    assert upper.y == first.map.y
    assert upper.h == pytest.approx(first.map.h / 2)
    assert lower.y == pytest.approx(third.map.y + third.map.h / 2)
    # The same units have the same colour wherever they are held.
    cards = of_class(parse(as_svg(PLANS["tp2pp2-tp4"], REQUEST)), "card")
    colours = [[cell.get("fill") for cell in of_class(card, "cell")] for card in cards[:4]]
    assert len(colours[0]) == 4
    assert colours[0] == colours[2]
    assert colours[1] == colours[3]


def test_move_cut_by_other_moves_is_one_band_of_several_strands() -> None:
    """Unit 0 travels whole; unit 1 comes from two ranks, half of the layers each."""
    every, upper, lower = Span(0, 8), Span(0, 4), Span(4, 8)
    sources = (
        (Shard("kv", every, Span(0, 1)),),
        (Shard("kv", upper, Span(1, 2)),),
        (Shard("kv", lower, Span(1, 2)),),
    )
    drawn = scene(plan_of(heads(8, 2), ExplicitSharding(sources), Parallel()), REQUEST)
    assert [len(band.strands) for band in drawn.bands] == [2, 1, 1]
    above, below = drawn.bands[0].strands
    assert above.source.bottom == pytest.approx(below.source.top)
    assert above.target.bottom < below.target.top


@each_plan
def test_band_marks_its_block_on_both_maps(plan: Plan) -> None:
    drawn = scene(plan, REQUEST)
    for band in drawn.bands:
        move = band.carried.move
        ends = (("source", move.source), ("target", move.target))
        for (side, rank), block in zip(ends, band.blocks, strict=True):
            section = section_of(cards_of(drawn, side)[rank], move.group)
            assert block is not None
            column = section.map.w / section.group.units
            assert (block.x - section.map.x) / column == pytest.approx(move.units.first)
            assert block.w / column == pytest.approx(len(move.units))
            assert any(
                held.y - 1e-6 <= block.y and block.h <= held.h + 1e-6
                for held in (section.block(one.layers, one.units) for one in section.shards)
            )
            assert section.map.y - 1e-6 <= block.y < section.map.y + section.map.h


# ---------------------------------------------------------------- big plans


def test_big_plan_notes_what_it_leaves_out() -> None:
    root = parse(as_svg(BIG, REQUEST))
    shown: dict[str, set[int]] = {"source": set(), "target": set()}
    for card in of_class(root, "card"):
        shown[card.attrib["data-side"]].add(int(card.attrib["data-rank"]))
    ranks = {"source": 512, "target": 192}
    for one in of_class(root, "elided"):
        side = one.attrib["data-side"]
        hidden = set(range(*map(int, one.attrib["data-ranks"].split("-"))))
        assert hidden | shown[side] == set(range(ranks[side]))
        assert not hidden & shown[side]
        assert f"… {len(hidden)} more ranks" in text_of(one)
    touching = {
        index
        for index, move in enumerate(BIG.moves)
        if move.source in shown["source"] or move.target in shown["target"]
    }
    assert {int(band.attrib["data-move"]) for band in of_class(root, "band")} == touching
    assert f"Not drawn: {len(BIG.moves) - len(touching)} moves of 768" in text_of(root)


@pytest.mark.parametrize(
    "plan",
    [
        BIG,
        plan_of(heads(4, 4096), Parallel(tp=4096), Parallel(tp=1)),
        plan_of(heads(4, 8), Parallel(cp=256), Parallel(tp=8)),
        plan_of(LATENT, Parallel(tp=64), Parallel(tp=64)),
    ],
    ids=["tp64pp8", "4096 ranks", "cp256", "replicated"],
)
def test_big_plans_stay_small_files(plan: Plan) -> None:
    html = as_html(plan, REQUEST)
    assert len(html) < 2_000_000
    # Strands, not only bands, are bounded: a comb for every pair would be quadratic.
    assert html.count("<path") < 10_000


def test_number_of_bands_is_capped_and_noted() -> None:
    plan = plan_of(heads(4, 4096), Parallel(tp=4096), Parallel(tp=1))
    drawn = scene(plan, REQUEST)
    assert len(drawn.bands) == 2000
    assert "Not drawn: 2,096 moves of 4,096, too many." in drawn.notes
    # Those with both ends shown are the last to go.
    assert {band.carried.move.source for band in drawn.bands} >= {*range(16), *range(4080, 4096)}


# ---------------------------------------------------------------- documents


@each_plan
def test_the_page_contains_the_drawing_and_a_row_for_each_move(plan: Plan) -> None:
    svg, html = as_svg(plan, REQUEST), as_html(plan, REQUEST)
    assert svg.partition("\n")[2].strip() in html
    page = Page(html)
    for index in range(len(plan.moves)):
        assert page.count("tr", **{"data-move": str(index)}) == 1


def test_long_table_counts_omitted_moves() -> None:
    page = Page(as_html(BIG, REQUEST))
    assert sum(tag == "tr" for tag, _ in page.elements) == 1 + 200
    assert "… and 568 more moves." in page.text


def test_documents_load_no_external_resources() -> None:
    html = as_html(PLANS["hybrid"], REQUEST)
    assert not re.search(r"(?:src|href)\s*=|@import|url\((?!#)", html)
    assert re.findall(r"https?://[^\"' ]+", html) == ["http://www.w3.org/2000/svg"]


@each_plan
def test_svg_is_titled_and_scalable(plan: Plan) -> None:
    root = parse(as_svg(plan, REQUEST))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.tag == f"{SVG}svg"
    assert root.attrib["viewBox"].split() == ["0", "0", root.attrib["width"], root.attrib["height"]]
    assert title_of(root)
    assert root.findtext(f"{SVG}desc")
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["y"]) < height


def test_hostile_names_are_escaped() -> None:
    name = "</title><script>alert('1')</script>&\"\x00"
    group = Group(name, Paged(), (0, 1), 2, (Tensor("x", DType.INT8, 4),))
    plan = plan_of(CacheSpec(2, (group,)), Parallel(), Parallel())
    (band,) = of_class(parse(as_svg(plan, REQUEST)), "band")
    assert band.attrib["data-group"] == name.replace("\x00", "\ufffd")
    assert Page(as_html(plan, REQUEST)).count("script") == 1


@pytest.mark.parametrize("bad", ["\x00", "\x1b", "\ud800", "\ufffe"])
def test_characters_outside_xml_are_replaced(bad: str) -> None:
    assert escape(f"a{bad}<b>") == "a\ufffd&lt;b&gt;"


@each_plan
def test_same_plan_gives_same_documents(plan: Plan) -> None:
    again = reshard(plan.source, plan.target)
    assert as_svg(again, REQUEST) == as_svg(plan, REQUEST)
    assert as_html(again, REQUEST) == as_html(plan, REQUEST)


def test_colour_ramp_gets_lighter() -> None:
    """Lightness keeps units apart for colour-blind readers."""
    colours = [unit_colour(0, 1, (unit + 0.5) / 8, 0.0) for unit in range(8)]
    shades = [_luminance(colour) for colour in colours]
    assert shades == sorted(shades)
    assert len(set(colours)) == 8


def _luminance(colour: str) -> float:
    red, green, blue = (math.pow(int(colour[at : at + 2], 16) / 255, 2.2) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
