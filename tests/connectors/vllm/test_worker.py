"""The connector's worker side over torch tensors of vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch

from kvferry import DiscoveryServer, InputError
from kvferry.connectors.vllm.caches import BlockGroup, EngineShape
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    HeldRoom,
    OpenRoom,
    PrefillMetadata,
    PushTokens,
    ReceiveRoom,
)
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.worker import ConnectorWorker

HEADS, CONTENT, LAYERS, TOKENS = 4, 8, 3, 40
Caches = dict[str, torch.Tensor]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def caches(blocks: int, tokens: int, *, nhd: bool) -> Caches:
    """Return all layers' caches in one allocation, as vLLM makes them."""
    shape = (blocks, tokens, HEADS, CONTENT) if nhd else (blocks, HEADS, tokens, CONTENT)
    whole = torch.zeros((LAYERS, *shape), dtype=torch.float16)
    each = (layer.transpose(1, 2) if nhd else layer for layer in whole)
    return {f"model.layers.{i}.self_attn.attn": layer for i, layer in enumerate(each)}


def make_worker(
    undo: ExitStack,
    url: str,
    name: str,
    held: Caches,
    kept: Sequence[BlockGroup] = (),
    *,
    sends: bool,
    receives: bool,
    zeroes_rest: bool = False,
) -> ConnectorWorker:
    worker = ConnectorWorker(
        read_settings({"discovery": url, "instance": name, "transport": "shm"}), None, name, "m"
    )
    block_tokens = next(iter(held.values())).shape[2]
    # Use the GPU's paging, which allows different block sizes and orders, on host memory.
    engine = EngineShape(1, (LAYERS,), 0, HEADS, block_tokens, on_cpu=False)
    roles = {"sends": sends, "receives": receives}
    worker.register(held, engine, kept, **roles, fails_early=False, zeroes_rest=zeroes_rest)
    undo.callback(worker.close)
    return worker


@pytest.mark.parametrize(("nhd", "both"), [(False, False), (True, False), (False, True)])
def test_different_block_sizes_and_orders(undo: ExitStack, nhd: bool, both: bool) -> None:
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    there, here = caches(6, 16, nhd=nhd), caches(4, 32, nhd=not nhd)
    prefill = make_worker(undo, discovery.url, "prefill-0", there, sends=True, receives=both)
    decode = make_worker(undo, discovery.url, "decode-0", here, sends=both, receives=True)
    order = ReceiveRoom("d", "room", "prefill-0", TOKENS, 0, ((3, 1),), b"d")
    decode.start_receives(DecodeMetadata([order]))
    metadata = PrefillMetadata(
        [OpenRoom("p", "room", TOKENS)],
        [PushTokens("room", TOKENS, 0, ((5, 0, 2),), b"d")],
        held=[HeldRoom("p", "room")],
    )
    prefill.begin_step(metadata)
    for layer in there.values():
        layer.copy_(torch.rand(layer.shape))
    prefill.end_step(metadata)
    received: set[str] = set()
    sent: set[str] = set()
    while not (received and sent):
        received |= decode.take_arrivals().received
        sent |= prefill.take_sent()
    assert (received, sent) == ({"d"}, {"p"})
    for name, source in there.items():
        computed = torch.cat([source[block] for block in (5, 0, 2)], dim=1)[:, :TOKENS]
        arrived = torch.cat([here[name][block] for block in (3, 1)], dim=1)[:, :TOKENS]
        assert torch.equal(computed, arrived)
    counts = prefill.counts.take()
    assert counts is not None
    assert counts["bytes_sent"] == LAYERS * TOKENS * HEADS * CONTENT * 2


@pytest.mark.parametrize("zeroes_rest", [False, True])
def test_tokens_after_the_last_one_are_zeroed_if_vllm_relies_on_it(
    undo: ExitStack, zeroes_rest: bool
) -> None:
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    here = caches(4, 32, nhd=True)
    decode = make_worker(
        *(undo, discovery.url, "decode-0", here),
        sends=False,
        receives=True,
        zeroes_rest=zeroes_rest,
    )
    for layer in here.values():
        layer.fill_(7)
    order = ReceiveRoom("d", "room", "prefill-0", TOKENS, 32, ((3, 1),), b"d")
    decode.start_receives(DecodeMetadata([order]))
    for layer in here.values():
        assert layer[1, :, TOKENS - 32 :].eq(0 if zeroes_rest else 7).all()
        assert layer[1, :, : TOKENS - 32].eq(7).all()
        assert layer[[0, 2, 3]].eq(7).all()


def test_layers_that_share_a_cache_are_registered_once(undo: ExitStack) -> None:
    held = caches(4, 16, nhd=False)
    held["model.layers.2.self_attn.attn"] = held["model.layers.1.self_attn.attn"]
    worker = make_worker(undo, "http://127.0.0.1:1", "p", held, sends=True, receives=False)
    assert worker.take_sent() == set()
    assert worker.take_arrivals().received == set()


def test_hybrid_groups_share_memory_with_different_blocks(undo: ExitStack) -> None:
    """As with vLLM's hybrid allocator, a full layer and a window layer share an allocation.

    The window is 16 tokens. Blocks before it are reused and must be neither read nor written.
    """
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    kept = [
        BlockGroup(frozenset(names[:2])),
        BlockGroup(frozenset(names[2:]), window=16),
    ]
    there, here = ({**caches(8, 16, nhd=False)} for _ in range(2))
    for side in (there, here):
        side[names[2]] = side[names[0]]
    prefill = make_worker(undo, discovery.url, "prefill-0", there, kept, sends=True, receives=False)
    decode = make_worker(undo, discovery.url, "decode-0", here, kept, sends=False, receives=True)
    null = 0
    order = ReceiveRoom("d", "room", "prefill-0", TOKENS, 0, ((3, 1, 6), (null, 5, 2)), b"d")
    decode.start_receives(DecodeMetadata([order]))
    first = PrefillMetadata(
        [OpenRoom("p", "room", TOKENS)], [PushTokens("room", 20, 0, ((5, 1), (7, 4)))]
    )
    # The window layer's first block was reused as its third.
    last = PrefillMetadata(
        [], [PushTokens("room", TOKENS, 1, ((1, 2), (4, 7)), b"d")], held=[HeldRoom("p", "room")]
    )
    for layer in there.values():
        layer.copy_(torch.rand(layer.shape))
    for metadata in (first, last):
        prefill.begin_step(metadata)
        prefill.end_step(metadata)
    received: set[str] = set()
    while not received:
        received |= decode.take_arrivals().received
    for name in names[:2]:
        computed = torch.cat([there[name][block] for block in (5, 1, 2)], dim=1)[:, :TOKENS]
        arrived = torch.cat([here[name][block] for block in (3, 1, 6)], dim=1)[:, :TOKENS]
        assert torch.equal(computed, arrived)
    computed = torch.cat([there[names[2]][block] for block in (4, 7)], dim=1)
    arrived = torch.cat([here[names[2]][block] for block in (5, 2)], dim=1)
    behind = slice(TOKENS - 16 - 16, TOKENS - 16)  # the window, counted from token 16
    assert torch.equal(computed[:, behind], arrived[:, behind])
    assert not here[names[2]][null].any()


def test_a_cache_of_several_tensors_is_refused(undo: ExitStack) -> None:
    worker = ConnectorWorker(
        read_settings({"discovery": "http://127.0.0.1:1", "instance": "p"}), None, "p", "m"
    )
    engine = EngineShape(1, (1,), 0, HEADS, 16, on_cpu=True)
    several = {"model.layers.0.mixer": [torch.zeros(4, 4)]}
    with pytest.raises(InputError, match="no single tensor"):
        worker.register(
            several,  # type: ignore[arg-type]
            engine,
            sends=True,
            receives=False,
            fails_early=False,
        )
