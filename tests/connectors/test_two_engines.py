"""vLLM on one side and SGLang on the other: every entry of K and V arrives in the other's form.

vLLM's CPU kernels keep the K of a block by columns, and its GPU kernels keep a token's K and V in
one row. The caches are written here from these definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from connectors.sglang.schedulers import buffers_of, new_pool
from numpy.typing import NDArray

from kvferry import (
    DiscoveryServer,
    EndpointConfig,
    Layout,
    Memory,
    SourceEndpoint,
    TargetEndpoint,
    TransferMode,
    make_transport,
    reshard,
)
from kvferry.connectors.sglang.geometry import layout_of, memory_of
from kvferry.connectors.sglang.metadata import RowShape, decoded
from kvferry.connectors.sglang.pools import KvHeads, RankPosition, SglangCache
from kvferry.connectors.vllm.caches import CacheView, EngineShape, plan_caches
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

HEADS, DIM, LAYERS, TP = 4, 8, 2, 2
# No multiple of any page.
TOKENS, BLOCK, PAGE = 75, 32, 4
VLLM_BLOCKS = (4, 0, 3)
SGLANG_PAGES = [
    int(page) for page in np.random.default_rng(3).permutation(24)[: -(-TOKENS // PAGE)]
]
FIRST_TOKEN = 1234
FORMS = ["columns", "hnd", "nhd"]
Entries = NDArray[np.float32]


class Sglang(NamedTuple):
    """A rank's description, and its pools: K of every layer, then V, [slots, heads, dim]."""

    layout: Layout
    memory: Memory
    pools: list[Entries]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(undo: ExitStack) -> str:
    server = DiscoveryServer().start()
    undo.callback(server.stop)
    return server.url


def entries() -> Entries:
    """Return different numbers as [layer, K or V, token, head, element]."""
    shape = (LAYERS, 2, TOKENS, HEADS, DIM)
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


# ---------------------------------------------------------------- vLLM


def engine(form: str) -> EngineShape:
    on_cpu = form == "columns"
    shape = EngineShape(1, (LAYERS,), 0, HEADS, BLOCK, on_cpu)
    return shape._replace(k_dim=DIM, has_columns=on_cpu)


def vllm_caches(form: str) -> dict[str, torch.Tensor]:
    shape = (5, BLOCK, HEADS, 2 * DIM) if form == "nhd" else (5, HEADS, BLOCK, 2 * DIM)
    each = [torch.zeros(shape) for _ in range(LAYERS)]
    views = [layer.transpose(1, 2) if form == "nhd" else layer for layer in each]
    return {f"model.layers.{i}.self_attn.attn": view for i, view in enumerate(views)}


def write_vllm(form: str, caches: dict[str, torch.Tensor]) -> None:
    """Write every entry where vLLM's kernels keep it."""
    for (k, v), cache in zip(entries(), caches.values(), strict=True):
        for token in range(TOKENS):
            block, at = VLLM_BLOCKS[token // BLOCK], token % BLOCK
            for head in range(HEADS):
                rows = torch.from_numpy(k[token, head]), torch.from_numpy(v[token, head])
                if form != "columns":
                    cache[block, head, at] = torch.cat(rows)
                    continue
                area = cache[block, head].view(-1)
                area[at : BLOCK * DIM : BLOCK] = rows[0]
                area[(BLOCK + at) * DIM :][:DIM] = rows[1]


def vllm_worker(undo: ExitStack, url: str, form: str, transport: str, *, sends: bool) -> Any:
    caches = vllm_caches(form)
    settings = read_settings({"discovery": url, "instance": "vllm", "transport": transport})
    worker = ConnectorWorker(settings, None, "vllm", "m")
    worker.register(caches, engine(form), sends=sends, receives=not sends, fails_early=False)
    undo.callback(worker.close)
    return worker, caches


# ---------------------------------------------------------------- SGLang


def sglang_rank(transport: Any, rank: int) -> Sglang:
    shape = 24 * PAGE, HEADS // TP, DIM
    pools = [new_pool(transport, *shape) for _ in range(2 * LAYERS)]
    cache = SglangCache(
        num_layers=LAYERS,
        layers=tuple(range(LAYERS)),
        stages=(LAYERS,),
        position=RankPosition(tp=TP, tp_rank=rank),
        heads=KvHeads(total=HEADS, k_dim=DIM, v_dim=DIM),
        buffers=buffers_of(pools, tuple(range(LAYERS)), PAGE),
    )
    return Sglang(layout_of(cache), memory_of(cache), pools)


def written_pools(rank: int) -> list[Entries]:
    """Return a rank's pools with every entry where SGLang keeps it, and zeros elsewhere."""
    pools = [np.zeros((24 * PAGE, HEADS // TP, DIM), np.float32) for _ in range(2 * LAYERS)]
    heads = slice(rank * HEADS // TP, (rank + 1) * HEADS // TP)
    for token in range(TOKENS):
        slot = SGLANG_PAGES[token // PAGE] * PAGE + token % PAGE
        for layer in range(LAYERS):
            for kind in (0, 1):
                pools[kind * LAYERS + layer][slot] = entries()[layer, kind, token, heads]
    return pools


def options(url: str, rank: int, transport: Any) -> dict[str, Any]:
    config = EndpointConfig(deadline_s=30.0)
    shared = {"name": "sglang", "rank": rank, "model": "m", "discovery": url, "config": config}
    return shared | {"transport": transport}


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_vllm_to_sglang(undo: ExitStack, url: str, form: str, name: str) -> None:
    worker, caches = vllm_worker(undo, url, form, name, sends=True)
    ranks, handles = [], []
    for rank in range(TP):
        transport = make_transport(name)
        sglang = sglang_rank(transport, rank)
        target = TargetEndpoint(sglang.layout, sglang.memory, **options(url, rank, transport))
        undo.callback(target.close)
        ranks.append(sglang)
        handles.append(
            target.receive("room", prefill="vllm", tokens=TOKENS, pages=SGLANG_PAGES, digest=b"d")
        )
    opened = [OpenRoom("p", "room", TOKENS, awaits_token=True)]
    pushed = [PushTokens("room", TOKENS, 0, (VLLM_BLOCKS,), b"d")]
    metadata = PrefillMetadata(opened, pushed)
    worker.begin_step(metadata)
    write_vllm(form, caches)
    worker.end_step(metadata)
    worker.begin_step(PrefillMetadata(held=[HeldRoom("p", "room", FIRST_TOKEN)]))
    for rank, (sglang, handle) in enumerate(zip(ranks, handles, strict=True)):
        handle.wait(30)
        for got, wanted in zip(sglang.pools, written_pools(rank), strict=True):
            np.testing.assert_array_equal(got, wanted)
        token, room = decoded(handle.metadata, RowShape((64, 64), 1), 7)
        assert int.from_bytes(token[:4], "little") == FIRST_TOKEN
        assert room[0] == 7


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_sglang_to_vllm(undo: ExitStack, url: str, form: str, name: str) -> None:
    worker, caches = vllm_worker(undo, url, form, name, sends=False)
    ranks, handles = [], []
    for rank in range(TP):
        transport = make_transport(name)
        sglang = sglang_rank(transport, rank)
        for pool, content in zip(sglang.pools, written_pools(rank), strict=True):
            pool[:] = content
        source = SourceEndpoint(sglang.layout, sglang.memory, **options(url, rank, transport))
        undo.callback(source.close)
        ranks.append(sglang)  # Its memory.
        handles.append(source.open("room"))
    for handle in handles:
        handle.push((0, TOKENS), SGLANG_PAGES)
        handle.close(tokens=TOKENS, digest=b"d")
    order = ReceiveRoom("d", "room", "sglang", TOKENS, 0, (VLLM_BLOCKS,), b"d")
    worker.start_receives(DecodeMetadata([order]))
    received: set[str] = set()
    while not received:
        arrivals = worker.take_arrivals(wait_s=0.001)
        assert not arrivals.failed, arrivals.reasons
        received |= arrivals.received
    wanted = vllm_caches(form)
    write_vllm(form, wanted)
    for layer, cache in caches.items():
        assert torch.equal(cache, wanted[layer]), layer
    if form == "columns" and name == "nixl":
        for handle in handles:
            handle.wait_released(30)
            assert set(handle.carried) == {TransferMode.STAGED}


@pytest.mark.parametrize("form", FORMS)
def test_plan_says_what_is_translated(form: str) -> None:
    views = {
        name: CacheView(tuple(cache.shape), cache.stride(), "float32")
        for name, cache in vllm_caches(form).items()
    }
    ours = plan_caches(views, engine(form)).layout
    theirs = sglang_rank(make_transport("shm"), 0).layout
    translated = ("kv.k",) if form == "columns" else ()
    assert reshard(ours, theirs).forms.translated == translated
    assert reshard(theirs, ours).forms.translated == translated
    assert reshard(ours, ours).forms.translated == ()
