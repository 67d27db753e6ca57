"""Every byte of real rooms between real processes, one per rank, over every transport."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from endpoint.fleets import (
    AHEAD,
    COMPRESSED,
    FEW_HEADS,
    HEADS,
    HYBRID,
    LATENT,
    NUM_SLOTS,
    ON_GPU,
    ONE_AHEAD,
    PLAIN,
    STAGING,
    UNSTAGED,
    Way,
    layout,
    with_pages,
)

from kvferry.ids import MAX_ID, Room
from kvferry.layout.layout import Layout, Order
from kvferry.plan.choose import TransferMode
from kvferry.plan.plan import Request
from kvferry.testing.fleet import Cut, Fleet, FleetSide

NUM_TOKENS = 75


class Case(NamedTuple):
    """Source and target layout of one cache."""

    name: str
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("tp4-tp1", layout(HEADS, 4, tp=4), layout(HEADS, 8, tp=1)),
    Case("tp1-tp4-page16-page64", layout(HEADS, 16, tp=1), layout(HEADS, 64, tp=4)),
    Case("tp2-tp4-nhd-hnd", layout(HEADS, 16, Order.NHD, tp=2), layout(HEADS, 8, Order.HND, tp=4)),
    Case("tp3-tp2", layout(HEADS, 3, tp=3), layout(HEADS, 5, tp=2)),
    Case("tp6-tp4-hnd-nhd", layout(HEADS, 8, Order.HND, tp=6), layout(HEADS, 8, Order.NHD, tp=4)),
    Case("gqa-replicated-source", layout(FEW_HEADS, tp=4), layout(FEW_HEADS, 8, tp=1)),
    Case("gqa-replicated-target", layout(FEW_HEADS, 8, tp=1), layout(FEW_HEADS, tp=4)),
    Case("mla", layout(LATENT, 16, tp=2), layout(LATENT, 64, tp=4)),
    Case("pp2tp2-tp4", layout(HEADS, 4, pp=2, tp=2), layout(HEADS, 8, tp=4)),
    Case("state-and-window", layout(HYBRID, 8, pp=2, tp=1), layout(HYBRID, 4, tp=4)),
]
MORE_CASES = [
    Case("gqa-replicated-both", layout(FEW_HEADS, 2, tp=4), layout(FEW_HEADS, 16, tp=4)),
    Case("cp2-tp2", layout(HEADS, 4, cp=2), layout(HEADS, 8, Order.HND, tp=2)),
    Case("tp2-cp2-state", layout(HYBRID, 8, tp=2), layout(HYBRID, 4, cp=2)),
    Case("compressed-tp4-tp2", layout(COMPRESSED, 16, tp=4), layout(COMPRESSED, 64, tp=2)),
    Case("compressed-tp2-pp2", layout(COMPRESSED, 64, tp=2), layout(COMPRESSED, 16, pp=2)),
    Case(
        "compressed-dcp2",
        layout(COMPRESSED, 16, pp=2),
        layout(COMPRESSED, 32, tp=2, dcp=2, interleave=16),
    ),
    Case("dcp4-tp2", layout(LATENT, 4, tp=4, dcp=4, interleave=16), layout(LATENT, 8, tp=2)),
    Case(
        "dcp4-cp3-copies",
        layout(LATENT, 4, tp=4, dcp=4, interleave=3),
        layout(LATENT, 8, cp=3, interleave=8, copies=2),
    ),
    # Pages of as many tokens as those of DeepSeek V4 in vLLM, in each group, to others.
    Case(
        "group-pages-tp2-pp2",
        with_pages(layout(COMPRESSED, 256, tp=2), swa=64, sparse=32, inputs=4),
        with_pages(layout(COMPRESSED, 16, Order.HND, pp=2), sparse=256, inputs=8),
    ),
    Case(
        "group-pages-dcp2",
        with_pages(layout(COMPRESSED, 64, tp=2, dcp=2, interleave=16), sparse=8, inputs=4),
        with_pages(layout(COMPRESSED, 16, tp=2), swa=5, sparse=64, inputs=3),
    ),
    Case(
        "group-pages-state",
        with_pages(layout(HYBRID, 8, tp=2), near=3),
        with_pages(layout(HYBRID, 4, Order.HND, tp=4), full=16),
    ),
]
# Every case over every transport with its chosen mode; some of them forced through staging.
COMBINATIONS = [
    *((case, way) for case in CASES for way in PLAIN),
    *((case, PLAIN[0]) for case in MORE_CASES),
    *((case, STAGING[number % 2]) for number, case in enumerate([*CASES[2::2], *MORE_CASES])),
    *((CASES[3], way) for way in UNSTAGED),
    *((case, Way("nixl", AHEAD)) for case in (CASES[3], MORE_CASES[0])),
    *(
        pytest.param(case, way, marks=pytest.mark.gpu)
        for case in (CASES[3], CASES[7], CASES[9])
        for way in ON_GPU
    ),
]
# A whole prompt, a cached prefix that ends inside a page, one that ends with a page, a prompt that
# is all cached (only its metadata is sent), and the shortest prompt.
WHOLE, INSIDE, AT_END, CACHED, SHORTEST = (
    Request(NUM_TOKENS),
    Request(NUM_TOKENS, 21),
    Request(NUM_TOKENS, 64),
    Request(NUM_TOKENS, NUM_TOKENS),
    Request(1),
)


def fleet_of(way: Way, source: Layout, *targets: Layout, num_rooms: int = 1) -> Fleet:
    def side(name: str, its: Layout) -> FleetSide:
        pages = (num_rooms + 1) * -(-NUM_TOKENS // its.smallest_page)
        return FleetSide(name, its, pages, way.config)

    decodes = [side(f"decode-{number}", target) for number, target in enumerate(targets)]
    return Fleet(side("prefill", source), *decodes, transport=way.transport, device=way.device)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("case", "way"), COMBINATIONS, ids=str)
def test_every_byte_arrives_and_no_other_is_touched(case: Case, way: Way) -> None:
    with fleet_of(way, case.source, case.target) as fleet:
        fleet.carry("whole", WHOLE, seed=1)
        fleet.carry("in-chunks", INSIDE, seed=2, chunk=16)
        fleet.carry("prefill-first", AT_END, seed=3, chunk=30, prefill_first=True)
        fleet.carry("by-layers", INSIDE, seed=6, chunk=Cut(30, layers=1))
        fleet.carry(
            "by-layers-late", WHOLE, seed=7, chunk=Cut(NUM_TOKENS, layers=2), prefill_first=True
        )
        fleet.carry("cached", CACHED, seed=4)
        fleet.carry("shortest", SHORTEST, seed=5)
        assert fleet.leftovers() == {}
        if way.config.mode is TransferMode.STAGED:
            stats = fleet.all(fleet.sources, "stats")
            assert sum(each.modes[TransferMode.STAGED].writes for each in stats) > 4 * NUM_SLOTS


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "way",
    [
        *(*PLAIN, *STAGING, Way("nixl", AHEAD), Way("nixl", ONE_AHEAD)),
        *(pytest.param(way, marks=pytest.mark.gpu) for way in ON_GPU),
    ],
    ids=str,
)
def test_many_rooms_at_once_to_instances_of_different_sizes(way: Way) -> None:
    names: list[Room] = [0, 1 << 62, MAX_ID, "0", "room/ü", "x" * 256]
    rooms = [(name, n, Request(NUM_TOKENS, 15 * n - n % 2)) for n, name in enumerate(names)]
    sizes = [layout(HEADS, 8, tp=1), layout(HEADS, 16, Order.HND, tp=3)]
    with fleet_of(way, layout(HEADS, 4, tp=2), *sizes, num_rooms=len(rooms)) as fleet:
        to = {room: f"decode-{number % 2}" for number, (room, _, _) in enumerate(rooms)}
        for number, (room, seed, request) in enumerate(rooms):
            fleet.fill(room, seed, request.num_tokens)
            if number % 3:
                fleet.receive(room, to[room], request)
        for room, _, request in rooms:
            fleet.send(room, request.num_tokens, chunk=20)
        for number, (room, _, request) in enumerate(rooms):
            if not number % 3:
                fleet.receive(room, to[room], request)
        for room, _, _ in rooms:
            fleet.demand_done(room, [*fleet.targets[to[room]], *fleet.sources], 30.0)
        for decode in fleet.decodes:
            fleet.demand_right(decode, [room for room in rooms if to[room[0]] == decode])
        for room, _, _ in rooms:
            fleet.finish(room, to[room])
        assert fleet.leftovers() == {}
