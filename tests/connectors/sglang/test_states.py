"""State rows of linear-attention layers, from any tensor parallelism to any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import DType, InputError, Layout, Request, StateRow
from kvferry.connectors.sglang.geometry import layout_of, memory_of
from kvferry.connectors.sglang.pools import Buffers, KvHeads, RankPosition, SglangCache
from kvferry.connectors.sglang.states import StateBuffer, row_of, split_kinds, state_groups
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan.bind import PagedView, RankPair, bind
from kvferry.plan.places import PageTable
from kvferry.plan.prove import check
from kvferry.plan.reshard import reshard

Row = NDArray[np.float32]
# A convolution's query, key and value channels; how many inputs it keeps; recurrent heads.
BLOCKS, WIDTH, HEADS, HEAD = (4, 4, 8), 3, 4, 6
ROWS, ATTENTION, LINEAR = 3, (0,), (1, 2)
UNTOUCHED = -1.0


class StateRank:
    """One rank's buffers: K and V of the attention layer, two kinds of state of the others."""

    def __init__(
        self, tp: int, rank: int, *, transposed: bool, layers: tuple[int, ...] = LINEAR
    ) -> None:
        self.tp, self.rank, self.transposed = tp, rank, transposed
        self.layers = layers
        self.kv = [np.full((8, 4 // tp, 2), UNTOUCHED, np.float32) for _ in range(2)]
        channels = sum(BLOCKS) // tp
        shape = (WIDTH, channels) if transposed else (channels, WIDTH)
        self.conv = [np.full((ROWS, *shape), UNTOUCHED, np.float32) for _ in layers]
        heads = (ROWS, HEADS // tp, HEAD)
        self.recurrent = [np.full(heads, UNTOUCHED, np.float32) for _ in layers]

    @property
    def arrays(self) -> list[Row]:
        return [*self.kv, *self.conv, *self.recurrent]

    def cache(self) -> SglangCache:
        conv = [
            self._state(array, layer, sum(BLOCKS) // self.tp, BLOCKS)
            for array, layer in zip(self.conv, self.layers, strict=True)
        ]
        recurrent = [
            self._state(array, layer, HEADS // self.tp, ())
            for array, layer in zip(self.recurrent, self.layers, strict=True)
        ]
        return SglangCache(
            num_layers=3,
            layers=ATTENTION,
            stages=(3,),
            position=RankPosition(tp=self.tp, tp_rank=self.rank),
            heads=KvHeads(total=4, k_dim=2, v_dim=2),
            buffers=Buffers(
                addresses=[array.ctypes.data for array in self.kv],
                lengths=[array.nbytes for array in self.kv],
                page_lengths=[array[:2].nbytes for array in self.kv],
                layers=ATTENTION,
                page_tokens=2,
                dtype=DType.FLOAT32,
            ),
            states=(*conv, *recurrent),
        )

    def _state(self, array: Row, layer: int, dim: int, blocks: tuple[int, ...]) -> StateBuffer:
        return StateBuffer(
            address=array.ctypes.data,
            length=array.nbytes,
            row_bytes=array[0].nbytes,
            layer=layer,
            dim=dim,
            outer=WIDTH if self.transposed and blocks else 1,
            blocks=blocks,
        )

    def share(self, whole: Row) -> Row:
        """This rank's part of an axis."""
        part = len(whole) // self.tp
        return whole[self.rank * part : (self.rank + 1) * part]

    def rows(self, blocks: list[Row], heads: Row) -> tuple[Row, Row]:
        """A request's rows as this rank has them: each joined axis is dealt out by itself."""
        conv = np.concatenate([self.share(block) for block in blocks])
        return (conv.T if self.transposed else conv), self.share(heads)


def carried(source: StateRank, target: StateRank, layouts: tuple[Layout, Layout]) -> None:
    """The rows that the source owes the target for one request, row 1 to row 2."""
    plan = reshard(*layouts)
    check(plan)
    sides = [memory_of(rank.cache()) for rank in (source, target)]
    groups = [group.name for group in layouts[0].spec.groups]
    tables = [
        {name: PageTable([row] if name.startswith("state") else [row, row + 1]) for name in groups}
        for row in (1, 2)
    ]
    pair = RankPair(source.rank, target.rank)
    first, second = (
        PagedView(memory.map, table) for memory, table in zip(sides, tables, strict=True)
    )
    binding = bind(plan, pair, Request(4), first, second)
    views = [
        [array.reshape(-1).view(np.uint8) for array in rank.arrays] for rank in (source, target)
    ]
    copy_pieces(binding.descriptors(), *views)


@pytest.mark.parametrize("transposed", [False, True], ids=["channels first", "inputs first"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 2)])
def test_state_rows_arrive_complete(prefill: int, decode: int, transposed: bool) -> None:
    rng = np.random.default_rng(prefill * 8 + decode)
    blocks = [rng.random((size, WIDTH)).astype(np.float32) for size in BLOCKS]
    heads = rng.random((HEADS, HEAD)).astype(np.float32)
    sources = [StateRank(prefill, rank, transposed=transposed) for rank in range(prefill)]
    targets = [StateRank(decode, rank, transposed=transposed) for rank in range(decode)]
    for source in sources:
        for layer in range(len(LINEAR)):
            source.conv[layer][1], source.recurrent[layer][1] = source.rows(blocks, heads)
    layouts = layout_of(sources[0].cache()), layout_of(targets[0].cache())
    for source in sources:
        for target in targets:
            carried(source, target, layouts)
    for target in targets:
        conv, recurrent = target.rows(blocks, heads)
        for layer in range(len(LINEAR)):
            assert np.array_equal(target.conv[layer][2], conv)
            assert np.array_equal(target.recurrent[layer][2], recurrent)
            assert (target.conv[layer][:2] == UNTOUCHED).all()
            assert (target.recurrent[layer][:2] == UNTOUCHED).all()


def buffer(layer: int, **said: int) -> StateBuffer:
    usual: dict[str, Any] = {"address": 4096 * layer, "length": 240, "row_bytes": 48, "dim": 4}
    return StateBuffer(layer=layer, **{**usual, **said})


def test_buffers_are_split_by_kind() -> None:
    kinds = split_kinds([buffer(1), buffer(2), buffer(1), buffer(2), buffer(2)])
    assert [[each.layer for each in kind] for kind in kinds] == [[1, 2], [1, 2], [2]]


def test_replicated_state_is_one_unit() -> None:
    (group,) = state_groups([buffer(1, dim=0)], tp=4)
    assert (group.units, group.kind, group.unit_bytes) == (1, StateRow(), 48)


@pytest.mark.parametrize(
    ("buffers", "says"),
    [
        ([buffer(1), buffer(2, dim=2)], "differ in shape"),
        ([buffer(1, dim=5)], "5 equal entries"),
        ([StateBuffer(**{**vars(buffer(1)), "blocks": (4, 8)})], "do not make up axes of 4, 8"),
    ],
)
def test_state_of_different_shapes_is_rejected(buffers: list[StateBuffer], says: str) -> None:
    with pytest.raises(InputError, match=says):
        state_groups(buffers, tp=2)


def test_state_row_index_is_read() -> None:
    assert row_of([[np.array(5)]]) == row_of([[np.array([5])]]) == 5
    assert row_of([]) is row_of(None) is None


def stage(number: int) -> SglangCache:
    """Return one of two pipeline stages: attention in layers 0 and 2, state in 1 and 3."""
    cache = StateRank(1, 0, transposed=False, layers=(2 * number + 1,)).cache()
    return replace(
        cache,
        num_layers=4,
        layers=(0, 2),
        stages=(2, 2),
        position=RankPosition(tp=1, tp_rank=0, pp=2, pp_rank=number),
        buffers=replace(cache.buffers, layers=(2 * number,)),
        state_layers=(1, 3),
    )


def test_pipeline_stages_describe_the_same_layout() -> None:
    layouts = [layout_of(stage(number)) for number in range(2)]
    assert layouts[0] == layouts[1]
    assert {group.name: group.layers for group in layouts[0].spec.groups} == {
        "kv": (0, 2),
        **dict.fromkeys(("state0.0", "state0.1", "state0.2", "state1"), (1, 3)),
    }
    for number, layout in enumerate(layouts):
        placed = {base.layer for p in memory_of(stage(number)).map.placements for base in p.bases}
        held = {n for s in layout.rank_shards(number) for n in range(s.layers.first, s.layers.end)}
        assert placed == held == {2 * number, 2 * number + 1}
