"""Pushes of single layers: when they arrive, how they are bound, and their modes."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from endpoint.fleets import HEADS, eventually, layout
from endpoint.test_pair_in_process import (
    AT_ONCE,
    LAYOUT,
    MOVED,
    NUM_PAGES,
    WAIT_S,
    Means,
    Pair,
    pair_by,
)

from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.ids import Generation, Op, Peer, Session
from kvferry.layout.intervals import Span
from kvferry.plan.bind import PagedView, bind
from kvferry.plan.bind import RankPair as Ranks
from kvferry.plan.choose import TransferMode, choose, shape_of
from kvferry.plan.cost import LinkCost, LinkCostTable
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Block, Request
from kvferry.plan.reshard import reshard
from kvferry.protocol.events import TransferRequest, Write
from kvferry.protocol.messages import Arrived, Envelope, PageTableMessage
from kvferry.protocol.outcome import Done
from kvferry.telemetry.observer import Observer

NUM_TOKENS = NUM_PAGES * 4
PAGES = list(range(NUM_PAGES))
NUM_LAYERS = HEADS.num_layers


class Gate:
    """A GPU event that happens when a test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.open.is_set()


def compute(pair: Pair, layer: int) -> None:
    """Fill K and V of one layer, as a model does."""
    for tensor in range(2):
        region = pair.pools[0][_region(layer, tensor)]
        region[:] = np.random.default_rng(layer * 2 + tensor).integers(1, 255, region.shape)


def _region(layer: int, tensor: int) -> int:
    placement = contiguous_pools(LAYOUT, 0, NUM_PAGES).map.of("kv", "kv"[tensor])
    (base,) = placement.bases_of((layer,))
    return base.region


def arrived(pair: Pair, layer: int) -> bool:
    """Whether both tensors of a layer have arrived."""
    which = [_region(layer, tensor) for tensor in range(2)]
    return all(np.array_equal(pair.pools[0][n], pair.pools[1][n]) for n in which)


@pytest.mark.parametrize("means", [AT_ONCE, MOVED], ids=str)
def test_a_layer_arrives_before_the_next_is_computed(means: Means) -> None:
    with pair_by(means) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=NUM_TOKENS, pages=PAGES)
        out = pair.source.open("r")
        out.prepare((0, NUM_TOKENS), PAGES)
        for layer in reversed(range(NUM_LAYERS)):
            compute(pair, layer)
            out.push((0, NUM_TOKENS), PAGES, layers=(layer, layer + 1))
            eventually(partial(arrived, pair, layer))
            assert into.outcome is None
        out.close(b"token")
        assert into.wait(WAIT_S) == Done(b"token")
        out.wait_released(WAIT_S)
        assert out.num_writes == NUM_LAYERS
        assert sum(out.carried.values()) == sum(pool.nbytes for pool in pair.pools[0])


def test_each_layer_waits_for_its_own_event() -> None:
    with pair_by(MOVED) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=NUM_TOKENS, pages=PAGES)
        out = pair.source.open("r")
        gates = [Gate() for _ in range(NUM_LAYERS)]
        for layer, gate in enumerate(gates):
            out.push((0, NUM_TOKENS), PAGES, gate, layers=(layer, layer + 1))
        out.close()
        for layer, gate in enumerate(gates):
            assert gate.asked.wait(WAIT_S)
            # The layer is computed only now, so an earlier read would have sent zeros.
            compute(pair, layer)
            gate.open.set()
            eventually(partial(arrived, pair, layer))
        assert into.wait(WAIT_S) == Done()


# ---------------------------------------------------------------- bindings and the chooser

REQUEST = Request(64)
SCATTERED = (0, 2, 4, 6, 1, 3, 5, 7)
SOURCE, TARGET = layout(HEADS, 4), layout(HEADS, 8)
PLAN = reshard(SOURCE, TARGET)
SIDES = (
    PagedView(contiguous_pools(SOURCE, 0, 16).map, {"kv": PageTable(range(16))}),
    PagedView(contiguous_pools(TARGET, 0, 8).map, {"kv": PageTable(SCATTERED)}),
)
SLOW_PIECES = LinkCost(descriptor_s=1e-6, bytes_per_s=1e10, copy_bytes_per_s=1e10)


def written(*blocks: Block) -> Write:
    session, peer = Session(1, 1), Peer("d", 0)
    note = Envelope(peer, 1, session, 0, Arrived("r", Generation(1), blocks))
    tables = (PageTableMessage("kv", SCATTERED),)
    transfer = TransferRequest("r", session, Generation(1), 0, peer, PLAN, REQUEST, tables)
    return Write(Op(1), transfer, blocks, note)


def block(first: int, end: int) -> Block:
    return Block("kv", Span(first, end), Span(0, 64))


class Tables:
    """A room's page tables, which count how often blocks were bound to them."""

    def __init__(self) -> None:
        self.num_asked = 0

    def tables(self) -> dict[str, PageTable]:
        self.num_asked += 1
        return SIDES[0].tables


def test_a_chunk_is_bound_once_and_cut_by_layers() -> None:
    tables = Tables()
    rooms: RoomTable[Any] = RoomTable(Peer("p", 0), Observer())
    rooms.add(SimpleNamespace(room="r", tables=tables))
    links: Any = {Session(1, 1): SimpleNamespace(hello=SimpleNamespace(pools=SIDES[1].pools))}
    chooser = Chooser(SIDES[0].pools, rooms, links, LinkCostTable({"nixl": SLOW_PIECES}))
    for some in (block(2, 3), block(0, 2)):
        bound = chooser.binding(written(some))
        fresh = bind(PLAN, Ranks(0, 0), REQUEST, *SIDES, [some])
        assert np.array_equal(bound.descriptors(), fresh.descriptors())
        assert bound.num_bytes == fresh.num_bytes
    assert tables.num_asked == 1
    rooms.bindings.forget("r")
    chooser.binding(written(block(0, 3)))
    chooser.binding(written(block(0, 3)))
    assert tables.num_asked == 3, "a chunk written whole is not cached"


def test_few_layers_may_take_another_mode_than_all() -> None:
    # A slot costs as much as 40 pieces, which pays off for all layers but not for one.
    whole = bind(PLAN, Ranks(0, 0), REQUEST, *SIDES, [block(0, 3)])
    costs = LinkCost(
        descriptor_s=1e-6, bytes_per_s=1e12, copy_bytes_per_s=1e12, slot_s=40e-6, slot_bytes=1 << 20
    )
    assert choose(shape_of(whole), costs).mode is TransferMode.STAGED
    assert choose(shape_of(whole.of_layers(Span(0, 1))), costs).mode is not TransferMode.STAGED
    parts = [whole.of_layers(Span(n, n + 1)) for n in range(3)]
    assert sum(part.num_bytes for part in parts) == whole.num_bytes
    assert whole.of_layers(Span(3, 4)).parts == ()
