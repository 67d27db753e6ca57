"""Transfers between the ranks of two engines over real endpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import (
    DiscoveryServer,
    EndpointConfig,
    Incoming,
    LayerPushTuner,
    Layers,
    Outgoing,
    ProofMode,
    SourceEndpoint,
    TargetEndpoint,
    make_transport,
)
from kvferry.connectors.vllm.caches import CachePlan, CacheView, EngineShape, plan_caches
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    HeldRoom,
    OpenRoom,
    PrefillMetadata,
    PushTokens,
    ReceiveRoom,
)
from kvferry.connectors.vllm.sources import PrefillRankRooms
from kvferry.connectors.vllm.stats import RoomCounts, shown_counts
from kvferry.connectors.vllm.targets import Arrivals, DecodeRankRooms
from kvferry.testing.faulty_transport import ContentFault, FaultyTransport
from kvferry.transports.base import Transport

HEADS, TOKENS, CONTENT, BLOCKS, LAYERS = 4, 16, 8, 12, 2
WAIT_S = 20.0
Array = NDArray[np.uint16]


class Rank(NamedTuple):
    """A rank's cache, [layers, blocks, heads, tokens, content], and its rooms."""

    cache: Array
    rooms: PrefillRankRooms | DecodeRankRooms
    counts: RoomCounts


class Engines:
    """TP2 prefill and TP1 decode, on a CPU."""

    def __init__(self, undo: ExitStack, layers: Layers = "all", fault: str = "") -> None:
        self._undo, self._layers, self._fault = undo, layers, fault
        server = DiscoveryServer().start()
        undo.callback(server.stop)
        proof = ProofMode.FULL if fault else ProofMode.SAMPLED
        config = EndpointConfig(deadline_s=WAIT_S, proof=proof)
        self._shared: Any = {"model": "m", "discovery": server.url, "config": config}
        self.prefill = [self._source(rank) for rank in range(2)]

    def _source(self, rank: int) -> Rank:
        transport: Transport = make_transport("shm")
        cache = np.zeros((LAYERS, BLOCKS, HEADS // 2, TOKENS, CONTENT), np.uint16)
        plan = planned(cache, tp=2, rank=rank)
        if self._fault:
            fault = ContentFault(self._fault)
            transport = FaultyTransport(transport, fault, plan.layout.spec)
        endpoint = SourceEndpoint(
            *(plan.layout, pools(plan, cache)),
            name="prefill-0",
            rank=rank,
            transport=transport,
            **self._shared,
        )
        self._undo.callback(endpoint.close)
        counts = RoomCounts()
        tuner = LayerPushTuner(self._layers, plan.layout, rank)
        return Rank(cache, PrefillRankRooms(endpoint, plan.tables, counts, tuner), counts)

    def decode(self, *, fails_early: bool = False) -> Rank:
        transport = make_transport("shm")
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        cache = transport.allocate(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
        plan = planned(cache, tp=1, rank=0)
        endpoint = TargetEndpoint(
            *(plan.layout, pools(plan, cache)),
            name="decode-0",
            transport=transport,
            **self._shared,
        )
        self._undo.callback(endpoint.close)
        counts = RoomCounts()
        rooms = DecodeRankRooms(endpoint, plan.tables, counts, fails_early=fails_early)
        return Rank(cache, rooms, counts)


def planned(cache: Array, tp: int, rank: int) -> CachePlan:
    strides = tuple(stride // cache.itemsize for stride in cache.strides[1:])
    one = CacheView(cache.shape[1:], strides, "bfloat16")
    engine = EngineShape(tp, (LAYERS,), rank, HEADS, TOKENS, on_cpu=True)
    return plan_caches({f"layers.{i}.attn": one for i in range(LAYERS)}, engine)


def pools(plan: CachePlan, cache: Array) -> dict[str, dict[str, Array]]:
    layers, blocks, heads = cache.shape[:3]
    return {"kv": {f"blocks_of_{TOKENS}_tokens": cache.reshape(layers, blocks, heads, 1, -1)}}


@pytest.fixture
def engines() -> Iterator[Engines]:
    with ExitStack() as undo:
        yield Engines(undo)


# ---------------------------------------------------------------- stand-ins for vLLM


def compute(
    engines: Engines,
    first: int,
    end: int,
    blocks: tuple[int, ...],
    layers: tuple[int, ...] = tuple(range(LAYERS)),
) -> None:
    """Write every token's position, layer and head where a model would write its K and V."""
    for rank, (cache, _, _) in enumerate(engines.prefill):
        for token in range(first, end):
            block, offset = blocks[token // TOKENS], token % TOKENS
            for layer in layers:
                for head in range(HEADS // 2):
                    whole = rank * HEADS // 2 + head
                    cache[layer, block, head, offset] = token * 100 + layer * 10 + whole


def step(engines: Engines, metadata: PrefillMetadata, *computed: tuple[int, int]) -> None:
    for rank in engines.prefill:
        assert isinstance(rank.rooms, PrefillRankRooms)
        rank.rooms.begin_step(metadata)
    for first, end in computed:
        compute(engines, first, end, (7, 3, 9))
    for rank in engines.prefill:
        assert isinstance(rank.rooms, PrefillRankRooms)
        rank.rooms.end_step(metadata, None)


def step_by_layers(
    engines: Engines, metadata: PrefillMetadata, computed: tuple[int, int], told: tuple[int, ...]
) -> None:
    """Run a step layer by layer; only the layers in ``told`` are reported as computed."""
    sources = [rank.rooms for rank in engines.prefill if isinstance(rank.rooms, PrefillRankRooms)]
    for rooms in sources:
        rooms.begin_step(metadata)
    for layer in range(LAYERS):
        compute(engines, *computed, (7, 3, 9), (layer,))
        for rooms in sources:
            if layer in told:
                rooms.layer_computed(layer, lambda: None)
    for rooms in sources:
        rooms.end_step(metadata, None)


def outgoing(engines: Engines) -> list[Outgoing]:
    return [
        handle
        for rank in engines.prefill
        if isinstance(rank.rooms, PrefillRankRooms)
        for handle in rank.rooms.handles()
    ]


def released(handles: list[Outgoing] | list[Incoming]) -> None:
    for handle in handles:
        handle.wait_released(WAIT_S)


def take(decode: Rank, *metadata: ReceiveRoom, aborted: list[str] | None = None) -> list[Incoming]:
    assert isinstance(decode.rooms, DecodeRankRooms)
    decode.rooms.begin_step(DecodeMetadata(list(metadata), aborted=aborted or []))
    return list(decode.rooms.handles())


def arrivals(decode: Rank) -> Arrivals:
    assert isinstance(decode.rooms, DecodeRankRooms)
    return decode.rooms.take_arrivals()


def sent(engines: Engines) -> list[set[str]]:
    return [
        rank.rooms.take_sent()
        for rank in engines.prefill
        if isinstance(rank.rooms, PrefillRankRooms)
    ]


def receive(tokens: int = 40, prefix: int = 0, digest: bytes = b"d") -> ReceiveRoom:
    blocks = () if prefix == tokens else ((2, 5, 4),)
    return ReceiveRoom("d-1", "room", "prefill-0", tokens, prefix, blocks, digest)


FIRST = PrefillMetadata([OpenRoom("p-1", "room", 40)], [PushTokens("room", 20, 0, ((7, 3),))])
LAST = PrefillMetadata([], [PushTokens("room", 40, 1, ((3, 9),), b"d")])
HELD = PrefillMetadata(held=[HeldRoom("p-1", "room")])


def send_room(engines: Engines) -> None:
    step(engines, FIRST, (0, 20))
    step(engines, LAST, (20, 40))


def filled(cache: Array, first: int) -> bool:
    """Whether the tokens from ``first`` on have arrived in decode's blocks."""
    blocks = (2, 5, 4)
    for token in range(first, 40):
        there = cache[:, blocks[token // TOKENS], :, token % TOKENS, :]
        wanted = token * 100 + 10 * np.arange(LAYERS)[:, None] + np.arange(HEADS)
        if not (there == wanted[:, :, None]).all():
            return False
    return True


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("told", [(0, 1), (0,), (1,), ()])
@pytest.mark.parametrize("layers", [1, 2, "all", "auto"])
def test_layers_are_pushed_when_computed_and_the_rest_after_the_step(
    layers: Layers, told: tuple[int, ...]
) -> None:
    with ExitStack() as undo:
        engines = Engines(undo, layers)
        decode = engines.decode()
        (into,) = take(decode, receive())
        step_by_layers(engines, FIRST, (0, 20), told)
        step_by_layers(engines, LAST, (20, 40), told)
        into.wait(WAIT_S)
        assert filled(decode.cache, 0)
        released(outgoing(engines))


def test_two_chunks_from_two_ranks_to_one(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive())
    send_room(engines)
    into.wait(WAIT_S)
    assert arrivals(decode) == ({"d-1"}, set(), set(), {})
    assert arrivals(decode).received == set()
    assert filled(decode.cache, 0)
    released(outgoing(engines))
    assert sent(engines) == [set(), set()]  # the request has not ended
    step(engines, HELD)
    assert sent(engines) == [{"p-1"}, {"p-1"}]
    assert sent(engines) == [set(), set()]
    assert [len(rank.rooms) for rank in (*engines.prefill, decode)] == [0, 0, 0]
    counted = engines.prefill[0].counts.take()
    assert counted is not None
    assert counted["bytes_sent"] == LAYERS * 3 * (HEADS // 2) * TOKENS * CONTENT * 2
    assert shown_counts(counted)["rooms done"] == 1
    assert engines.prefill[0].counts.take() is None


def test_decode_starts_after_prefill_has_finished(engines: Engines) -> None:
    send_room(engines)
    step(engines, HELD)
    assert sent(engines) == [set(), set()]  # the blocks wait for a decode
    decode = engines.decode()
    (into,) = take(decode, receive())
    into.wait(WAIT_S)
    assert filled(decode.cache, 0)
    released(outgoing(engines))
    assert sent(engines) == [{"p-1"}, {"p-1"}]


def test_cached_prefix_is_not_written(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive(prefix=16))
    send_room(engines)
    into.wait(WAIT_S)
    assert filled(decode.cache, 16)
    assert not decode.cache[:, 2].any()


def test_fully_cached_prompt_frees_prefill(engines: Engines) -> None:
    send_room(engines)
    step(engines, HELD)
    decode = engines.decode()
    assert take(decode, receive(prefix=40)) == []
    released(outgoing(engines))
    assert sent(engines) == [{"p-1"}, {"p-1"}]
    assert len(decode.rooms) == 0


def test_cache_of_another_prompt_is_not_used(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive(digest=b"another"))
    send_room(engines)
    into.wait_released(WAIT_S)
    found = arrivals(decode)
    assert (found.received, found.failed, found.bad_blocks) == ({"d-1"}, {"d-1"}, set())
    assert found.reasons["d-1"].startswith("content-differs")


@pytest.mark.parametrize("fails_early", [False, True])
@pytest.mark.parametrize("fault", ["flip-byte", "swap-layers", "stale-page", "short-write"])
def test_damaged_content_is_never_decoded_from(fault: str, fails_early: bool) -> None:
    with ExitStack() as undo:
        engines = Engines(undo, fault=fault)
        decode = engines.decode(fails_early=fails_early)
        (into,) = take(decode, receive())
        send_room(engines)
        into.wait_released(WAIT_S)
        assert not filled(decode.cache, 0)
        found = arrivals(decode)
        assert (found.received, found.failed) == ({"d-1"}, {"d-1"})
        assert found.reasons["d-1"].startswith("content-corrupt")
        assert found.bad_blocks == ({2, 5, 4} if fails_early else set())


def test_bad_blocks_are_reported_before_they_are_free(engines: Engines) -> None:
    decode = engines.decode(fails_early=True)
    (into,) = take(decode, receive(prefix=16, digest=b"another"))
    send_room(engines)
    into.wait(WAIT_S)
    assert arrivals(decode).bad_blocks == {5, 4}
    into.wait_released(WAIT_S)
    arrivals(decode)
    assert len(decode.rooms) == 0


def test_abort_at_decode_frees_both_sides(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive())
    step(engines, FIRST, (0, 20))
    take(decode, aborted=["d-1"])
    into.wait_released(WAIT_S)
    assert arrivals(decode).received == {"d-1"}
    step(engines, LAST, (20, 40))  # the abort may or may not have reached prefill
    step(engines, HELD)
    began = time.monotonic()
    released(outgoing(engines))
    assert time.monotonic() - began < WAIT_S / 2  # long before its deadline
    assert sent(engines) == [{"p-1"}, {"p-1"}]


def test_declined_room_frees_prefill(engines: Engines) -> None:
    send_room(engines)
    step(engines, HELD)
    assert sent(engines) == [set(), set()]
    decode = engines.decode()
    assert isinstance(decode.rooms, DecodeRankRooms)
    decode.rooms.begin_step(DecodeMetadata(declined=[("room", "prefill-0")]))
    released(outgoing(engines))
    assert sent(engines) == [{"p-1"}, {"p-1"}]


def test_abandoned_room_ends_before_its_blocks_are_overwritten(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive())
    step(engines, FIRST, (0, 20))
    handles = outgoing(engines)
    for rank in engines.prefill:
        assert isinstance(rank.rooms, PrefillRankRooms)
        rank.rooms.begin_step(PrefillMetadata(abandoned=["room"]))
    assert all(handle.failure is not None for handle in handles)
    into.wait_released(WAIT_S)
    assert arrivals(decode).failed == {"d-1"}
    released(handles)
    assert sent(engines) == [set(), set()]
    assert [len(rank.rooms) for rank in engines.prefill] == [0, 0]


def test_refused_receive_fails_only_its_request(engines: Engines) -> None:
    decode = engines.decode()
    order = ReceiveRoom("d-1", "room", "prefill-0", 40, 0, ((2, 5, 99),), b"d")
    assert take(decode, order) == []
    found = arrivals(decode)
    assert (found.received, found.failed) == ({"d-1"}, {"d-1"})
    assert found.reasons["d-1"].startswith("refused")


# ---------------------------------------------------------------- late rooms

LATE_FIRST = PrefillMetadata(
    [OpenRoom("p-1", "room", 40, is_late=True)], [PushTokens("room", 20, 0, ((7, 3),))]
)


def begin(engines: Engines, metadata: PrefillMetadata) -> None:
    """Begin a step that computes nothing, in which vLLM 0.30 calls no hook at the end."""
    for rank in engines.prefill:
        assert isinstance(rank.rooms, PrefillRankRooms)
        rank.rooms.begin_step(metadata)


def test_late_room_is_opened_and_pushed_when_the_request_has_ended(engines: Engines) -> None:
    step(engines, LATE_FIRST, (0, 20))
    step(engines, LAST, (20, 40))
    assert outgoing(engines) == []
    decode = engines.decode()
    (into,) = take(decode, receive())
    begin(engines, HELD)
    into.wait(WAIT_S)
    assert filled(decode.cache, 0)
    released(outgoing(engines))
    assert sent(engines) == [{"p-1"}, {"p-1"}]
    assert [len(rank.rooms) for rank in engines.prefill] == [0, 0]


def test_late_room_waits_for_the_step_that_computed_its_prompt(engines: Engines) -> None:
    class Computed:
        happened = False

        def query(self) -> bool:
            return self.happened

    computed = Computed()
    metadata = PrefillMetadata(
        [OpenRoom("p-1", "room", 40, is_late=True)],
        [PushTokens("room", 40, 0, ((7, 3, 9),), b"d")],
    )
    decode = engines.decode()
    (into,) = take(decode, receive())
    begin(engines, metadata)
    for rank in engines.prefill:
        assert isinstance(rank.rooms, PrefillRankRooms)
        rank.rooms.end_step(metadata, computed)
    begin(engines, HELD)
    with pytest.raises(TimeoutError):
        into.wait(0.2)
    compute(engines, 0, 40, (7, 3, 9))
    computed.happened = True
    into.wait(WAIT_S)
    assert filled(decode.cache, 0)


@pytest.mark.parametrize("is_complete", [False, True])
def test_forgotten_room_leaves_nothing(engines: Engines, is_complete: bool) -> None:
    step(engines, LATE_FIRST, (0, 20))
    if is_complete:
        step(engines, LAST, (20, 40))
    begin(engines, PrefillMetadata(forgotten=["room"]))
    assert sent(engines) == [set(), set()]
    assert [len(rank.rooms) for rank in engines.prefill] == [0, 0]


def test_abandoned_late_room_fails_at_the_decode_that_waits_for_it(engines: Engines) -> None:
    decode = engines.decode()
    (into,) = take(decode, receive())
    step(engines, LATE_FIRST, (0, 20))
    begin(engines, PrefillMetadata(abandoned=["room"]))
    into.wait_released(WAIT_S)
    assert arrivals(decode).failed == {"d-1"}
    released(outgoing(engines))
    assert sent(engines) == [set(), set()]
    assert [len(rank.rooms) for rank in engines.prefill] == [0, 0]


# ---------------------------------------------------------------- waiting in empty steps


def waited(decode: Rank, timeout_s: float) -> float:
    assert isinstance(decode.rooms, DecodeRankRooms)
    began = time.monotonic()
    decode.rooms.wait_for_end(timeout_s)
    return time.monotonic() - began


def test_empty_step_waits_for_a_room_to_end(engines: Engines) -> None:
    decode = engines.decode()
    assert waited(decode, WAIT_S) < WAIT_S / 2  # there are no rooms
    take(decode, receive())
    assert arrivals(decode).received == set()
    assert waited(decode, 0.2) >= 0.2
    send_room(engines)
    while not arrivals(decode).received:
        assert waited(decode, WAIT_S) < WAIT_S / 2


def test_empty_step_does_not_wait_for_a_refused_room(engines: Engines) -> None:
    decode = engines.decode()
    take(decode, ReceiveRoom("d-1", "room", "prefill-0", 40, 0, ((2, 5, 99),), b"d"))
    assert waited(decode, WAIT_S) < WAIT_S / 2
    assert arrivals(decode).failed == {"d-1"}


def test_failed_room_ends_the_wait_again_when_its_blocks_are_free(engines: Engines) -> None:
    decode = engines.decode(fails_early=True)
    (into,) = take(decode, receive(digest=b"another"))
    send_room(engines)
    into.wait_released(WAIT_S)
    assert waited(decode, WAIT_S) < WAIT_S / 2
    assert arrivals(decode).failed == {"d-1"}
