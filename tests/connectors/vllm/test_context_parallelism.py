"""Context parallelism through vLLM's schedulers and workers, with vLLM's own slots of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from connectors.slot_mappings import NUM_BLOCKS, NUM_TOKENS, SlotCase

from kvferry import DiscoveryServer
from kvferry.connectors.vllm.caches import EngineShape
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.params import DecodeParams
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.worker import ConnectorWorker

ATTENTION, CONTENT = "model.layers.0.attn", 6
# vLLM's placeholder block, and a mark of tokens that nobody may change.
UNTOUCHED = 7.0
CHUNKS = (100, 433, NUM_TOKENS - 1, NUM_TOKENS)


class Engine:
    """An engine's ranks, each with a cache of one MLA layer and a connector worker."""

    def __init__(self, slots: SlotCase, *, tp: int = 1, pcp: int = 1) -> None:
        self.slots, self.tp, self.pcp = slots, tp, pcp
        self.selector = BlockSelector(slots.page * slots.dcp)
        self.workers: list[ConnectorWorker] = []
        shape = (NUM_BLOCKS, 1, slots.page, CONTENT)
        self.caches = [torch.full(shape, UNTOUCHED) for _ in range(tp * pcp)]

    def start(self, undo: ExitStack, url: str, name: str, *, sends: bool) -> None:
        settings = read_settings({"discovery": url, "instance": name, "transport": "shm"})
        for rank, cache in enumerate(self.caches):
            worker = ConnectorWorker(settings, None, name, "m")
            engine = EngineShape(
                *(self.tp, (1,), rank, 1, self.slots.page),
                on_cpu=False,
                pcp=self.pcp,
                dcp=self.slots.dcp,
                interleave=self.slots.interleave,
            )
            worker.register(
                *({ATTENTION: cache}, engine),
                sends=sends,
                receives=not sends,
                fails_early=False,
                zeroes_rest=True,
            )
            undo.callback(worker.close)
            self.workers.append(worker)

    def slots_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's tokens, and vLLM's slots for them."""
        share = rank // self.tp if self.pcp > 1 else rank
        slots = self.slots.recorded()[share % self.slots.dcp]
        tokens = np.flatnonzero(slots >= 0)
        return torch.from_numpy(tokens), torch.from_numpy(slots[tokens])

    def compute(self, first: int, end: int) -> None:
        """Write the entries of some tokens where vLLM's slot mapping says."""
        for rank, cache in enumerate(self.caches):
            tokens, slots = self.slots_of(rank)
            mine = (tokens >= first) & (tokens < end)
            cache.view(-1, CONTENT)[slots[mine]] = entries(tokens[mine])


def entries(tokens: torch.Tensor) -> torch.Tensor:
    return 1000.0 + 10 * tokens[:, None] + torch.arange(CONTENT)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def vllm(dcp: int, interleave: int, page: int, *, tp: int = 1, pcp: int = 1) -> Engine:
    return Engine(SlotCase("vllm", dcp, interleave, page), tp=tp, pcp=pcp)


PAIRS: dict[str, Callable[[], tuple[Engine, Engine]]] = {
    "dcp8-tp2": lambda: (vllm(8, 64, 64, tp=8), vllm(1, 1, 16, tp=2)),
    "dcp8-dcp4": lambda: (vllm(8, 64, 64, tp=8), vllm(4, 1, 16, tp=4)),
    "tp4-dcp4": lambda: (vllm(1, 1, 16, tp=4), vllm(4, 16, 64, tp=4)),
    "pcp2-dcp4": lambda: (vllm(1, 1, 16, pcp=2), vllm(4, 16, 64, tp=4)),
    "pcp2-dcp2-tp2": lambda: (vllm(2, 16, 16, pcp=2), vllm(1, 1, 16, tp=2)),
}


@pytest.mark.parametrize("prefix", [0, 512])
@pytest.mark.parametrize("pair", PAIRS)
def test_prompt_arrives_chunk_by_chunk(undo: ExitStack, pair: str, prefix: int) -> None:
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    prefill, decode = PAIRS[pair]()
    prefill.start(undo, discovery.url, "prefill-0", sends=True)
    decode.start(undo, discovery.url, "decode-0", sends=False)
    there, here = ([side.slots.blocks.tolist()] for side in (prefill, decode))

    decoding = DecodeScheduler(decode.selector)
    decoding.add_request("d", DecodeParams("room", "prefill-0", NUM_TOKENS), NUM_TOKENS, b"d")
    decoding.blocks_allocated("d", NUM_TOKENS - prefix, here)
    offered = decoding.take_metadata()
    for worker in decode.workers:
        worker.start_receives(offered)

    prefilling = PrefillScheduler("prefill-0", prefill.selector)
    prefilling.add_request("p", "room", NUM_TOKENS, b"d")
    computed = 0
    for end in CHUNKS:
        prefilling.scheduled("p", end, there)
        step = prefilling.take_metadata()
        for worker in prefill.workers:
            worker.begin_step(step)
        prefill.compute(computed, end)
        for worker in prefill.workers:
            worker.end_step(step)
        computed = end
    waiting = set(range(len(decode.workers)))
    while waiting:
        arrived = {rank: decode.workers[rank].take_arrivals() for rank in waiting}
        assert not any(one.failed for one in arrived.values())
        waiting -= {rank for rank, one in arrived.items() if one.received}
    for rank, cache in enumerate(decode.caches):
        assert_only_these(decode, rank, cache, prefix)


def assert_only_these(decode: Engine, rank: int, cache: torch.Tensor, prefix: int) -> None:
    """Check a rank's tokens after the prefix, zeros after the last one, and the rest untouched."""
    tokens, slots = decode.slots_of(rank)
    wanted = torch.full((NUM_BLOCKS * decode.slots.page, CONTENT), UNTOUCHED)
    last = int(decode.slots.blocks[-1]) * decode.slots.page
    used = int(((slots >= last) & (slots < last + decode.slots.page)).sum())
    wanted[last + used : last + decode.slots.page] = 0
    owed = tokens >= prefix
    wanted[slots[owed]] = entries(tokens[owed])
    torch.testing.assert_close(cache.view(-1, CONTENT), wanted, rtol=0, atol=0)
