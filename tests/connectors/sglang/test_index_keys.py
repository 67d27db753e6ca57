"""Pools that share the pages of K and V: index keys, block scales, a draft model's cache."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from connectors.sglang.schedulers import (
    SchedulerRows,
    buffers_of,
    request,
    settings_of,
    until,
)
from numpy.typing import NDArray

from kvferry import DiscoveryServer, DType, InputError, Span, Status, make_transport, reshard
from kvferry.connectors.sglang.geometry import layout_of, memory_of
from kvferry.connectors.sglang.index_keys import check_same_pages, with_index_keys
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager, RoomFailed
from kvferry.connectors.sglang.pools import (
    AuxiliaryPool,
    Buffers,
    KvHeads,
    RankPosition,
    SglangCache,
)
from kvferry.connectors.sglang.receiver import RoomReceiver
from kvferry.connectors.sglang.sender import RoomSender
from kvferry.plan.prove import check

LATENT, KEY, SCALE, SLOTS = 24, 128, 4, 64
# The second layer has no index keys; the last is a draft's.
LAYERS, INDEXED = 3, (0, 2)
Bytes = NDArray[np.uint8]


class Rank:
    """One that has a latent of every layer and index keys of some, as DeepSeek's sparse models."""

    def __init__(self, kind: Any, tp: int, rank: int, page: int, url: str | None) -> None:
        transport, self.page = make_transport("shm"), page
        self.latents = [transport.allocate(SLOTS * LATENT).reshape(SLOTS, -1) for _ in range(3)]
        row = page * (KEY + SCALE)
        self.index = [transport.allocate(SLOTS // page * row).reshape(-1, row) for _ in INDEXED]
        self.rows = SchedulerRows()
        settings = settings_of(
            self.cache(tp, rank), self.rows, Replica("here", 0, 1), transport, discovery=url
        )
        self.manager = kind(SimpleNamespace(), settings)

    def cache(self, tp: int, rank: int) -> SglangCache:
        latents = buffers_of(self.latents, (0, 1, 2), self.page, DType.FLOAT8_E4M3)
        own, draft = (
            replace(
                latents,
                addresses=latents.addresses[some],
                lengths=latents.lengths[some],
                page_lengths=latents.page_lengths[some],
                layers=latents.layers[some],
            )
            for some in (slice(0, 2), slice(2, 3))
        )
        return SglangCache(
            num_layers=LAYERS,
            layers=(0, 1),
            stages=(LAYERS,),
            position=RankPosition(tp=tp, tp_rank=rank),
            heads=None,
            buffers=own,
            auxiliary=(AuxiliaryPool(name="draft", layers=(2,), heads=None, buffers=draft),),
            index=index_buffers(self.index, INDEXED, self.page),
        )

    def views(self, pages: list[int], num_tokens: int) -> list[Bytes]:
        """The expected bytes of each token: latents, keys and scales."""
        places = [(pages[t // self.page], t % self.page) for t in range(num_tokens)]
        slots = [page * self.page + place for page, place in places]
        found = [latent[slots] for latent in self.latents]
        for buffer in self.index:
            keys = buffer[:, : self.page * KEY].reshape(-1, self.page, KEY)
            scales = buffer[:, self.page * KEY :].reshape(-1, self.page, SCALE)
            found += [np.stack([part[place] for place in places]) for part in (keys, scales)]
        return found


def index_buffers(arrays: list[Bytes], layers: tuple[int, ...], page: int) -> Buffers:
    return Buffers(
        addresses=[array.ctypes.data for array in arrays],
        lengths=[array.nbytes for array in arrays],
        page_lengths=[array[:1].nbytes for array in arrays],
        layers=layers,
        page_tokens=page,
        dtype=DType.UINT8,
    )


class Ends:
    """Two prefill ranks and a decode rank, and one request between them."""

    def __init__(self, stack: ExitStack, num_tokens: int, *, pages: tuple[int, int]) -> None:
        server = stack.enter_context(DiscoveryServer())
        self.address = server.url.removeprefix("http://")
        self.sources = [Rank(PrefillManager, 2, rank, pages[0], server.url) for rank in range(2)]
        self.target = Rank(DecodeManager, 1, 0, pages[1], None)
        for rank in (*self.sources, self.target):
            stack.callback(rank.manager.endpoint.close)
        until(lambda: self.target.manager.try_ensure_parallel_info(self.address))
        self.num_tokens = num_tokens
        self.outgoing = list(range(1, 1 + -(-num_tokens // pages[0])))
        self.incoming = list(range(-(-num_tokens // pages[1]), 0, -1))

    def receive(self, *, named: list[int]) -> RoomReceiver:
        receiver = RoomReceiver(self.target.manager, self.address, 9)
        receiver.init(0)
        receiver.bind_request(request(self.num_tokens))
        receiver.send_metadata(self.incoming, 1, [np.array(named)], decode_prefix_len=0)
        return receiver

    def send(self, source: Rank, *, named: list[int]) -> RoomSender:
        """In two chunks; SGLang names the pages of index keys with the last."""
        sender = RoomSender(source.manager, "", 9)
        sender.bind_request(request(self.num_tokens))
        sender.init(len(self.outgoing), 1)
        source.rows.rooms[1, 0] = 9
        sender.send(self.outgoing[:1], None, num_kv_tokens=source.page)
        rest = self.num_tokens - source.page
        sender.send(self.outgoing[1:], [np.array(named)], num_kv_tokens=rest)
        return sender


@pytest.mark.parametrize("pages", [(16, 16), (16, 4), (4, 16)], ids=str)
def test_index_keys_and_draft_cache_arrive(pages: tuple[int, int]) -> None:
    """Every rank has all of them, so two sources share the work of one target."""
    with ExitStack() as stack:
        ends = Ends(stack, 37, pages=pages)
        rng = np.random.default_rng(7)
        filling = [rng.integers(1, 256, array.shape, np.uint8) for array in arrays(ends.sources[0])]
        for source in ends.sources:
            for array, values in zip(arrays(source), filling, strict=True):
                array[...] = values
        receiver = ends.receive(named=ends.incoming)
        for source in ends.sources:
            ends.send(source, named=ends.outgoing)
        until(lambda: receiver.poll() in (Status.DONE, Status.FAILED))
        assert receiver.poll() == Status.DONE
        wanted = ends.sources[0].views(ends.outgoing, 37)
        found = ends.target.views(ends.incoming, 37)
        same = [np.array_equal(one, other) for one, other in zip(wanted, found, strict=True)]
        assert all(same)
        # And nothing but the request's own tokens was written.
        written = sum(int(np.count_nonzero(array)) for array in arrays(ends.target))
        assert written == sum(part.size for part in found)


def arrays(rank: Rank) -> list[Bytes]:
    return [*rank.latents, *rank.index]


def test_index_keys_in_other_pages_fail_the_room() -> None:
    with ExitStack() as stack:
        ends = Ends(stack, 37, pages=(16, 16))
        sender = ends.send(ends.sources[0], named=[1, 3, 2])
        receiver = ends.receive(named=[5, 6, 7])
        for end in (sender, receiver):
            assert end.poll() == Status.FAILED
            with pytest.raises(RoomFailed, match="index keys or block scales"):
                end.failure_exception()


def test_index_key_pages_may_include_the_prefix() -> None:
    check_same_pages([3, 4], [3, 4])
    check_same_pages([3, 4], [1, 2, 3, 4])
    check_same_pages([], [1, 2])
    for named in ([], [4], [3, 4, 5], [4, 3]):
        with pytest.raises(InputError, match="do not end with the 2 of K and V"):
            check_same_pages([3, 4], named)


def some_index(*, page: int = 64, page_bytes: int = 64 * 132, empty: int | None = None) -> Buffers:
    lengths = [0 if layer == empty else 4 * page_bytes for layer in range(3)]
    return Buffers(
        addresses=[1 << 20, 2 << 20, 3 << 20],
        lengths=lengths,
        page_lengths=[page_bytes if length else 0 for length in lengths],
        layers=(0, 1, 2),
        page_tokens=page,
        dtype=DType.UINT8,
    )


def sparse(index: Buffers, *, pp: int = 1) -> SglangCache:
    num = len(index.layers)
    latent = replace(index, page_lengths=[64 * 576] * num, lengths=[4 * 64 * 576] * num)
    return SglangCache(
        num_layers=3 * pp,
        layers=tuple(range(3 * pp)),
        stages=(3,) * pp,
        position=RankPosition(tp=1, tp_rank=0, pp=pp),
        heads=None,
        buffers=latent,
        index=index,
    )


def test_layers_without_index_keys_are_left_out() -> None:
    kept = with_index_keys(some_index(empty=1), staged=False)
    assert (kept.layers, kept.addresses) == ((0, 2), [1 << 20, 3 << 20])
    with pytest.raises(InputError, match="use --pp-size 1"):
        with_index_keys(some_index(empty=1), staged=True)


def test_a_stage_places_its_own_index_keys() -> None:
    layout = layout_of(sparse(some_index(), pp=2))
    assert layout.spec.group("index").layers == tuple(range(6))
    held = [shard for shard in layout.rank_shards(1) if shard.group == "index"]
    assert [shard.layers for shard in held] == [Span(3, 6)]


def test_keys_precede_scales_within_a_page() -> None:
    pools = memory_of(sparse(some_index())).map
    key, scale = pools.of("index", "key"), pools.of("index", "scale")
    assert (key.page_stride, key.token_stride, key.bases[0].offset) == (64 * 132, 128, 0)
    assert (scale.page_stride, scale.token_stride, scale.bases[0].offset) == (64 * 132, 4, 64 * 128)


def test_index_keys_shared_by_tokens_are_rejected() -> None:
    with pytest.raises(InputError, match="index keys shared by several tokens"):
        memory_of(sparse(some_index(page_bytes=32 * 132)))


def with_scales(tp: int, page: int) -> SglangCache:
    """Three heads of 64 entries, of which 32 have a scale in common, on a CPU that pads."""
    heads = KvHeads(total=3, k_dim=64, v_dim=64, padded_for=tp)
    row = heads.with_padding // tp * 64
    buffers = Buffers(
        addresses=[1 << 20 << place for place in range(4)],
        lengths=[8 * page * row] * 4,
        page_lengths=[page * row] * 4,
        layers=(0, 1),
        page_tokens=page,
        dtype=DType.FLOAT8_E4M3,
    )
    scales = replace(
        buffers,
        addresses=[1 << 30 << place for place in range(4)],
        lengths=[8 * page * row // 32] * 4,
        page_lengths=[page * row // 32] * 4,
        dtype=DType.UINT8,
    )
    return SglangCache(
        num_layers=2,
        layers=(0, 1),
        stages=(2,),
        position=RankPosition(tp=tp, tp_rank=0),
        heads=heads,
        buffers=buffers,
        auxiliary=(
            AuxiliaryPool(
                name="scales",
                layers=(0, 1),
                heads=replace(heads, k_dim=2, v_dim=2),
                buffers=scales,
            ),
        ),
    )


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (3, 1)])
def test_block_scales_are_sharded_with_their_heads(source: int, target: int) -> None:
    ours, theirs = with_scales(source, 4), with_scales(target, 16)
    check(reshard(layout_of(ours), layout_of(theirs)))
    scale = memory_of(ours).map.of("scales", "k")
    assert (scale.unit_stride, len(scale.bases)) == (2, 2)
