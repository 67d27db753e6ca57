"""Tests that a picture shows every rank and every move of a plan, with the right numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
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
from kvferry.plan.pictures.scene import Scene, Section
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
    assert title_of(card) == f"prefill 3 (pp1 tp1)\nsends {human_bytes(sent)} in 2 moves"
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
    blocks = as_svg(
        plan_of(heads(64, 1), Parallel(tp=8, dcp=8, interleave=64), Parallel()), REQUEST
    )
    texts = list(parse(blocks).itertext())
    assert texts.count("tokens 64 of 512") == blocks.count("url(#kvf-hatch)") == 8
    assert "dcp3 · tp3" in texts
    assert sum("64 of 512" in text for text in texts if "tokens 1,024" in text) == 8
    assert "url(#kvf-hatch)" not in as_svg(PLANS["tp4-tp1"], REQUEST)


def test_groups_have_different_colours_and_texts() -> None:
    root = parse(as_svg(PLANS["hybrid"], REQUEST))
    text = text_of(root)
    assert "4 heads × 12 layers, window of 2,048 tokens" in text
    assert "16 units × 24 layers, one row per request" in text
    colours: dict[str, set[str]] = {"kv": set(), "swa": set(), "delta": set()}
    for band in of_class(root, "band"):
        colours[band.attrib["data-group"]] |= {
            one.attrib["fill"] for one in band.iter(f"{SVG}path")
        }
    assert len(set.union(*colours.values())) == sum(map(len, colours.values()))


def test_moves_with_nothing_to_carry_are_counted_not_drawn() -> None:
    root = parse(as_svg(plan_of(heads(4, 2), Parallel(cp=4), Parallel()), Request(2)))
    assert {band.attrib["data-source"] for band in of_class(root, "band")} == {"0", "1"}
    assert "Drawn: 2 of 4 moves." in text_of(root)


@each_plan
def test_fully_cached_request_has_no_bands(plan: Plan) -> None:
    html = as_html(plan, Request(4096, 4096))
    assert not of_class(parse(as_svg(plan, Request(4096, 4096))), "band")
    assert "Nothing to move: decode has 4,096 of 4,096 tokens cached." in html
    assert "<table>" not in html


def test_rank_without_shards_is_labelled() -> None:
    everything = Shard("kv", Span(0, 4), Span(0, 2))
    plan = plan_of(heads(4, 2), ExplicitSharding(((everything,), ())), Parallel(tp=2))
    assert text_of(parse(as_svg(plan, REQUEST))).count("holds nothing") == 1


# ---------------------------------------------------------------- where it is drawn


def sections_of(drawn: Scene, side: str) -> Iterator[Section]:
    for card in drawn.cards:
        if card.side == side:
            yield from card.sections


@each_plan
def test_bands_into_targets_fill_them_and_never_overlap(plan: Plan) -> None:
    for section in sections_of(Scene(plan, REQUEST), "target"):
        ends = sorted((end.y, end.y + end.h) for end in section.ends.values())
        for (_, above), (below, _) in itertools.pairwise(ends):
            assert above == pytest.approx(below)
        assert sum(bottom - top for top, bottom in ends) == pytest.approx(section.rail.h)


@each_plan
def test_bands_out_of_sources_stay_on_their_rail(plan: Plan) -> None:
    for section in sections_of(Scene(plan, REQUEST), "source"):
        top, bottom = section.rail.y, section.rail.y + section.rail.h
        for number, end in section.ends.items():
            assert plan.moves[number].group == section.group.name
            assert top - 1e-6 <= end.y < end.y + end.h <= bottom + 1e-6


@each_plan
def test_every_band_joins_the_ends_of_its_move(plan: Plan) -> None:
    drawn = Scene(plan, REQUEST)
    ends = {(card.side.value, card.rank): dict(card.ends()) for card in drawn.cards}
    for (number, move, _), source, target in drawn.bands:
        assert ends["source", move.source][number] == source
        assert ends["target", move.target][number] == target


def test_thickness_is_the_share_of_the_bytes_held() -> None:
    """Replicas share the work, so each sends a part of what it holds."""
    plan = PLANS["replicated-tp2"]
    drawn = Scene(plan, REQUEST)
    rails = {card.side.value: card.sections[0].rail.h for card in drawn.cards}
    held = plan.payload_bytes(REQUEST) / 4
    for (_, _, num_bytes), source, target in drawn.bands:
        assert source.h / rails["source"] == pytest.approx(num_bytes / held)
        assert target.h / rails["target"] == pytest.approx(num_bytes / held / 2)


def test_source_that_sends_to_several_targets_divides_its_rail() -> None:
    (source,) = sections_of(Scene(PLANS["mla-spread"], REQUEST), "source")
    assert [end.h / source.rail.h for end in source.ends.values()] == pytest.approx([0.25] * 4)


def test_pipeline_stages_are_placed_by_layer() -> None:
    drawn = Scene(PLANS["tp2pp2-tp4"], REQUEST)
    first, _, third, _ = sections_of(drawn, "source")
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


# ---------------------------------------------------------------- big plans


def test_big_plan_notes_what_it_leaves_out() -> None:
    root = parse(as_svg(BIG, REQUEST))
    shown = Counter(card.attrib["data-side"] for card in of_class(root, "card"))
    assert shown == {"source": 48, "target": 48}
    inside = {number for number, move in enumerate(BIG.moves) if max(move.source, move.target) < 48}
    assert {int(band.attrib["data-move"]) for band in of_class(root, "band")} == inside
    text = text_of(root)
    assert "Shown: the first 48 of 512 prefill ranks." in text
    assert "Shown: the first 48 of 192 decode ranks." in text
    assert f"Drawn: {len(inside)} of 768 moves." in text


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
    root = parse(as_svg(plan_of(heads(4, 2), Parallel(cp=33), Parallel(cp=31)), REQUEST))
    assert len(of_class(root, "band")) == 1000
    assert "Drawn: 1,000 of 1,023 moves." in text_of(root)


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
    assert "The first 200 of 768 moves" in page.text


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
    plan = plan_of(heads(4, 8), Parallel(), Parallel())
    (card, _) = of_class(parse(as_svg(plan, REQUEST)), "card")
    colours = [cell.attrib["fill"] for cell in of_class(card, "cell")]
    shades = [_luminance(colour) for colour in colours]
    assert shades == sorted(shades)
    assert len(set(colours)) == 8


def _luminance(colour: str) -> float:
    red, green, blue = (math.pow(int(colour[at : at + 2], 16) / 255, 2.2) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
