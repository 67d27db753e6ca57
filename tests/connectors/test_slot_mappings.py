"""Pages that engines' own functions filled, carried between processes and compared byte by byte.

Each rank is a process. Its pools are those of the connector's layout. The slot of each token comes
from the engine (``slot_mappings.py``), at prefill and at decode. A recurrent state group, which
context parallelism does not divide, is beside the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from connectors.slot_mappings import NUM_BLOCKS, NUM_TOKENS, SlotCase

from kvferry import DType, Layout, Parallel, Request
from kvferry.connectors.sglang.geometry import layout_of
from kvferry.connectors.sglang.pools import Buffers, RankPosition, SglangCache
from kvferry.connectors.sglang.states import StateBuffer
from kvferry.connectors.vllm.caches import BlockGroup, CacheView, EngineShape, plan_caches
from kvferry.connectors.vllm.states import StateSpec
from kvferry.testing.fleet import Fleet, FleetSide
from kvferry.testing.fleet.pools import PlacedTokens, RoomPages

ATTENTION, MIXER = "model.layers.0.attn", "model.layers.1.mixer"
CONTENT, STATE_HEADS = 24, 8
WAIT_S = 60.0
ROW = 3


class Side(NamedTuple):
    """An engine: the ranks that share its tokens, as recorded, and its other ranks."""

    slots: SlotCase
    tp: int = 1
    pcp: int = 1

    def layout(self) -> Layout:
        """Return the layout that the connector describes."""
        return vllm_layout(self) if self.slots.engine == "vllm" else sglang_layout(self)

    def placed(self, rank: int) -> PlacedTokens:
        """Return where the engine keeps the request on a rank."""
        tp_rank, pcp_rank = rank % self.tp, rank // self.tp
        share = pcp_rank if self.pcp > 1 and self.slots.dcp > 1 else tp_rank % self.slots.dcp
        slots = self.slots.recorded()[share]
        tokens = np.flatnonzero(slots >= 0)
        return PlacedTokens(tuple(tokens.tolist()), tuple(slots[tokens].tolist()), ROW)


def vllm_layout(side: Side) -> Layout:
    page, slots = side.slots.page, side.slots
    view = CacheView((NUM_BLOCKS, 1, page, CONTENT), (page * CONTENT,) * 2 + (CONTENT, 1), "int8")
    rows = CacheView((NUM_BLOCKS, 1, 1, STATE_HEADS // side.tp * 32), (32, 32, 32, 1), "int8")
    state = StateSpec("LINEAR", ((STATE_HEADS // side.tp, 4, 2),), ("float32",), 1024)
    kept = [BlockGroup(frozenset({ATTENTION})), BlockGroup(frozenset({MIXER}), state=state)]
    engine = EngineShape(
        *(side.tp, (2,), 0, 1, page), on_cpu=False, pcp=side.pcp, dcp=slots.dcp,
        interleave=slots.interleave,
    )  # fmt: skip
    return plan_caches({ATTENTION: view, MIXER: rows}, engine, kept).layout


def sglang_layout(side: Side) -> Layout:
    page = side.slots.page
    return layout_of(
        SglangCache(
            num_layers=2,
            layers=(0,),
            stages=(2,),
            position=RankPosition(tp=side.tp, tp_rank=0, dcp=side.slots.dcp),
            heads=None,
            buffers=Buffers(
                addresses=[0],
                lengths=[NUM_BLOCKS * page * CONTENT],
                page_lengths=[page * CONTENT],
                layers=(0,),
                page_tokens=page,
                dtype=DType.INT8,
            ),
            states=(
                StateBuffer(
                    address=1,
                    length=1 << 20,
                    layer=1,
                    row_bytes=STATE_HEADS // side.tp * 32,
                    dim=STATE_HEADS // side.tp,
                ),
            ),
        )
    )


def vllm(dcp: int, interleave: int, page: int, **ranks: int) -> Side:
    return Side(SlotCase("vllm", dcp, interleave, page), **ranks)


def sglang(dcp: int, page: int, **ranks: int) -> Side:
    return Side(SlotCase("sglang", dcp, 1, page), **ranks)


PAIRS: dict[str, Callable[[], tuple[Side, Side]]] = {
    "vllm-dcp8-tp2": lambda: (vllm(8, 64, 64, tp=8), vllm(1, 1, 16, tp=2)),
    "vllm-dcp8-dcp4": lambda: (vllm(8, 64, 64, tp=8), vllm(4, 1, 16, tp=4)),
    "vllm-tp4-dcp4": lambda: (vllm(1, 1, 16, tp=4), vllm(4, 16, 64, tp=4)),
    "vllm-pcp2-dcp4": lambda: (vllm(1, 1, 16, tp=1, pcp=2), vllm(4, 16, 64, tp=4)),
    "vllm-pcp2-dcp2-dcp8": lambda: (vllm(2, 16, 16, tp=1, pcp=2), vllm(8, 1, 16, tp=8)),
    "sglang-dcp8-tp2": lambda: (sglang(8, 64, tp=8), sglang(1, 64, tp=2)),
    "sglang-dcp8-dcp4": lambda: (sglang(8, 64, tp=8), sglang(4, 16, tp=4)),
    "sglang-tp4-dcp4": lambda: (sglang(1, 64, tp=4), sglang(4, 16, tp=4)),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", PAIRS)
def test_pages_of_one_engine_become_pages_of_another(pair: str) -> None:
    sides = dict(zip(("prefill", "decode"), PAIRS[pair](), strict=True))
    layouts = {name: side.layout() for name, side in sides.items()}
    request, room, seed = Request(NUM_TOKENS), "room", 7
    with Fleet(
        *(FleetSide(name, layout, NUM_BLOCKS) for name, layout in layouts.items()), transport="shm"
    ) as fleet:
        where = {name: RoomPages(tuple(side.slots.blocks.tolist()), ROW)
                 for name, side in sides.items()}  # fmt: skip
        placed = {
            name: [side.placed(rank) for rank in range(layouts[name].num_ranks)]
            for name, side in sides.items()
        }
        targets = fleet.targets["decode"]
        assert (len(fleet.sources), len(targets)) == tuple(map(len, placed.values()))
        for rank, its in zip(fleet.sources, placed["prefill"], strict=True):
            rank.ask("fill_placed", room, seed, where["prefill"], its)
        fleet.all(targets, "receive", room, "prefill", request, where["decode"], WAIT_S)
        fleet.all(fleet.sources, "open", room, WAIT_S)
        # Chunks end inside pages and inside turns.
        fleet.all(fleet.sources, "push_all", room, NUM_TOKENS, 333, b"first token", None, 0.0)
        fleet.demand_done(room, [*targets, *fleet.sources], WAIT_S)
        problems = [
            rank.ask("placed_problem", seed, its)
            for rank, its in zip(targets, placed["decode"], strict=True)
        ]
        assert problems == [None] * len(targets)


def test_every_token_is_on_one_rank_of_the_layout() -> None:
    """The layout's tokens of a rank are those that the engine's function gives it."""
    for pair in PAIRS.values():
        for side in pair():
            layout = side.layout()
            assert isinstance(layout.sharding, Parallel)
            for rank in range(layout.num_ranks):
                tokens = layout.sharding.tokens(rank)
                mine = tuple(token for token in range(NUM_TOKENS) if token in tokens)
                assert mine == side.placed(rank).tokens
