"""Recurrent state beside attention, between any tensor-parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry import DiscoveryServer, InputError
from kvferry.connectors.vllm.caches import BlockGroup, EngineShape, plan_caches
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    HeldRoom,
    OpenRoom,
    PrefillMetadata,
    PushTokens,
    ReceiveRoom,
)
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.states import StateSharding, StateSpec, place_states
from kvferry.connectors.vllm.worker import ConnectorWorker

HEADS, CONTENT, BLOCK, TOKENS = 4, 8, 16, 40
ATTENTION, LINEAR = "model.layers.1.self_attn.attn", (0, 2)
WIDTH, BLOCKS, PADDING = 3, 6, 24
# A request's state in a block of prefill and in one of decode.
THERE, HERE = 4, 2
Array = NDArray[np.float32]


class Mixer(NamedTuple):
    """A recurrent layer: its type, the axes of its convolution, and its heads."""

    layer_type: str
    joined: tuple[int, ...]
    heads: tuple[int, ...]
    whole: tuple[int, ...] = ()
    bc_groups: int | None = None


MIXERS = {
    "delta net": Mixer("GDN_ATTN", (16, 16, 32), (4, 8, 4)),
    "KDA": Mixer("GDN_ATTN", (32, 32, 32), (4, 8, 8)),
    "mamba-2": Mixer("MAMBA2", (32, 8, 8), (4, 8, 2), bc_groups=4),
    "mamba-2, one group": Mixer("MAMBA2", (32, 2, 2), (4, 8, 2), (1, 2), bc_groups=1),
    "mamba-1": Mixer("MAMBA1", (16,), (16, 2)),
    "short convolution": Mixer("SHORT_CONV", (16,), ()),
    "linear attention": Mixer("LINEAR", (), (4, 4, 4)),
}


class StateSide:
    """Caches of one side's ranks, with attention and state in shared memory, and their workers."""

    def __init__(self, mixer: Mixer, tp: int, *, channels_first: bool) -> None:
        self.mixer, self.tp, self.channels_first = mixer, tp, channels_first
        shapes = [row.shape for row in self.rows(*drawn(mixer, 0), 0)]
        state = StateSpec(mixer.layer_type, tuple(shapes), ("float32",) * len(shapes), 1024)
        self.state_bytes = sum(4 * int(np.prod(shape)) for shape in shapes)
        self.names = [f"model.layers.{layer}.mixer" for layer in LINEAR]
        self.kept = [BlockGroup(frozenset({ATTENTION}))]
        self.kept += [BlockGroup(frozenset({name}), state=state) for name in self.names]
        self.caches = [self._caches() for _ in range(tp)]

    def _caches(self) -> dict[str, torch.Tensor]:
        page = max(self.state_bytes + PADDING, HEADS // self.tp * BLOCK * CONTENT * 4)
        memory = torch.zeros((BLOCKS, page), dtype=torch.int8)
        attention = memory[:, : HEADS // self.tp * BLOCK * CONTENT * 4].view(torch.float32)
        held = {ATTENTION: attention.view(BLOCKS, HEADS // self.tp, BLOCK, CONTENT)}
        for name in self.names:
            held[name] = memory[:, : self.state_bytes].view(BLOCKS, 1, 1, -1)
        return held

    def rows(self, joined: list[Array], heads: Array, rank: int) -> list[Array]:
        """Return a rank's state of a request. Each axis of the convolution is sharded by itself."""
        found = []
        if joined:
            mine = [
                part if p in self.mixer.whole else self._share(part, rank)
                for p, part in enumerate(joined)
            ]
            conv = np.concatenate(mine)
            found.append(conv if self.channels_first else np.ascontiguousarray(conv.T))
        if heads.size:
            found.append(self._share(heads, rank))
        return found

    def _share(self, whole: Array, rank: int) -> Array:
        part = len(whole) // self.tp
        return whole[rank * part : (rank + 1) * part]

    def shape(self, rank: int) -> EngineShape:
        return EngineShape(
            *(self.tp, (3,), rank, HEADS, BLOCK),
            on_cpu=False,
            channels_first=self.channels_first,
            bc_groups=self.mixer.bc_groups,
        )

    def workers(
        self, undo: ExitStack, url: str, name: str, *, sends: bool
    ) -> list[ConnectorWorker]:
        settings = read_settings({"discovery": url, "instance": name, "transport": "shm"})
        found = []
        for rank, held in enumerate(self.caches):
            worker = ConnectorWorker(settings, None, name, "m")
            worker.register(
                *(held, self.shape(rank), self.kept),
                sends=sends,
                receives=not sends,
                fails_early=False,
            )
            undo.callback(worker.close)
            found.append(worker)
        return found

    def block(self, rank: int, layer: int, number: int) -> list[int]:
        """Return the bytes of a block's state."""
        return [int(each) for each in self.caches[rank][self.names[layer]][number].flatten()]


def drawn(mixer: Mixer, seed: int) -> tuple[list[Array], Array]:
    rng = np.random.default_rng(seed)
    joined = [rng.random((length, WIDTH), np.float32) for length in mixer.joined]
    return joined, rng.random(mixer.heads or (0,), np.float32)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("mixer", "prefill", "decode", "channels_first"),
    [
        *((name, 2, 1, False) for name in MIXERS),
        *((name, 1, 2, True) for name in MIXERS),
        ("mamba-2, one group", 4, 2, False),
        ("delta net", 2, 4, True),
    ],
)
def test_state_arrives_with_the_tokens(
    undo: ExitStack, mixer: str, prefill: int, decode: int, channels_first: bool
) -> None:
    kind = MIXERS[mixer]
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    there = StateSide(kind, prefill, channels_first=channels_first)
    here = StateSide(kind, decode, channels_first=channels_first)
    sources = there.workers(undo, discovery.url, "prefill-0", sends=True)
    targets = here.workers(undo, discovery.url, "decode-0", sends=False)
    states = [drawn(kind, 1 + layer) for layer in range(len(LINEAR))]
    # Both layers' blocks lie in the same memory, so each has its own.
    there_rows, here_rows = (THERE, THERE + 1), (HERE, HERE + 1)
    for rank, held in enumerate(there.caches):
        held[ATTENTION][[0, 1, 3]] = float(rank + 1)
        for name, row, state in zip(there.names, there_rows, states, strict=True):
            raw = b"".join(part.tobytes() for part in there.rows(*state, rank))
            held[name][row, 0, 0] = torch.frombuffer(bytearray(raw), dtype=torch.int8)
    receive = ReceiveRoom(
        *("d", "room", "prefill-0", TOKENS, 0),
        ((5, 4, 1), *((row,) for row in here_rows)),
        b"d",
    )
    push = PushTokens("room", TOKENS, 0, ((0, 1, 3), *((row,) for row in there_rows)), b"d")
    metadata = PrefillMetadata(
        [OpenRoom("p", "room", TOKENS)], [push], held=[HeldRoom("p", "room")]
    )
    for worker in targets:
        worker.start_receives(DecodeMetadata([receive]))
    for worker in sources:
        worker.begin_step(metadata)
        worker.end_step(metadata)
    waiting = set(range(decode))
    while waiting:
        waiting -= {rank for rank in waiting if targets[rank].take_arrivals().received}
    for rank, held in enumerate(here.caches):
        for layer, (row, state) in enumerate(zip(here_rows, states, strict=True)):
            raw = b"".join(part.tobytes() for part in here.rows(*state, rank))
            arrived = bytes(byte % 256 for byte in here.block(rank, layer, row))
            assert arrived == raw, f"rank {rank}, layer {LINEAR[layer]}"
        heads = held[ATTENTION][[5, 4, 1]].transpose(0, 1).flatten(1, 2)[:, :TOKENS, 0]
        said = [float(heads[head].min()) for head in range(HEADS // decode)]
        each = HEADS // prefill
        wanted = [1 + (rank * HEADS // decode + head) // each for head in range(HEADS // decode)]
        assert said == wanted
        assert not any(here.block(rank, 0, 0))


def test_fully_cached_request_frees_prefill(undo: ExitStack) -> None:
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    sides = [StateSide(MIXERS["mamba-2"], 1, channels_first=False) for _ in range(2)]
    (source,) = sides[0].workers(undo, discovery.url, "prefill-0", sends=True)
    (target,) = sides[1].workers(undo, discovery.url, "decode-0", sends=False)
    target.start_receives(
        DecodeMetadata([ReceiveRoom("d", "room", "prefill-0", TOKENS, TOKENS, (), b"d")])
    )
    push = PushTokens("room", TOKENS, 0, ((0, 1, 3), (4,), (5,)), b"d")
    metadata = PrefillMetadata(
        [OpenRoom("p", "room", TOKENS)], [push], held=[HeldRoom("p", "room")]
    )
    source.begin_step(metadata)
    source.end_step(metadata)
    sent: set[str] = set()
    while not sent:
        sent |= source.take_sent()
    assert sent == {"p"}


SPEC = StateSpec("MAMBA2", ((3, 24), (2, 8, 2)), ("bfloat16", "float32"), 32)


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_state_is_in_the_block_of_the_last_token(num_tokens: int, block: int) -> None:
    selector = BlockSelector(16, {1: SPEC})
    lists = [[10, 11, 12, 13, 14], [20, 21, 22]]
    paged, state = selector.select(lists, 0, num_tokens)
    assert state == (20 + block,)
    assert paged == tuple(lists[0][: -(-num_tokens // 16)])


@pytest.mark.parametrize(
    ("spec", "sharding", "says"),
    [
        (SPEC._replace(layer_type="RWKV"), StateSharding(1), "of the type 'RWKV'"),
        (SPEC._replace(shapes=(*SPEC.shapes, (2, 2))), StateSharding(1), "--use-replayssm"),
        (SPEC._replace(shapes=((3, 17), (2, 8, 2))), StateSharding(1), "does not join x, B, C"),
        (SPEC._replace(shapes=((3, 20), (2, 8, 2))), StateSharding(2), "n_groups"),
    ],
)
def test_unsupported_state_is_refused(spec: StateSpec, sharding: StateSharding, says: str) -> None:
    with pytest.raises(InputError, match=says):
        place_states("mixer", [0], spec, sharding)


def test_dtype_is_part_of_the_group_name() -> None:
    """Otherwise the handshake would accept two sides whose bytes differ in meaning."""
    one, two = (
        place_states("m", [0], SPEC._replace(dtypes=dtypes), StateSharding(1))
        for dtypes in (("bfloat16", "float32"), ("float16", "float32"))
    )
    assert [[group.name for group in each.groups] for each in one] == [
        ["m convolution bfloat16.0", "m convolution bfloat16.1", "m convolution bfloat16.2"],
        ["m recurrent float32"],
    ]
    assert one[0].groups[0].tensors == two[0].groups[0].tensors
    assert one[0].groups != two[0].groups
    assert one[1] == two[1]


def test_number_of_bc_groups_on_one_rank() -> None:
    spec = SPEC._replace(shapes=((3, 20), (2, 8, 2)))
    said = [each.groups for each in place_states("m", [0], spec, StateSharding(1, bc_groups=1))]
    found = [each.groups for each in place_states("m", [0], spec, StateSharding(1))]
    assert said == found
    assert [group.units for group in found[0]] == [16, 1, 1]


def test_a_model_without_attention_is_refused() -> None:
    side = StateSide(MIXERS["mamba-1"], 1, channels_first=False)
    with pytest.raises(InputError, match="no KV cache of attention"):
        plan_caches({}, side.shape(0), side.kept[1:])
