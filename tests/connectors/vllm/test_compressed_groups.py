"""DeepSeek V4's cache groups, whose blocks differ in size, between engines in real processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
from configs import CONFIGS
from connectors.vllm.compressed import (
    ENGINES,
    NUM_TOKENS,
    RATIOS,
    CompressedCase,
    CompressedEngine,
    decode,
)

from kvferry import DiscoveryServer
from kvferry.connectors.vllm.caches import CacheView, EngineShape, plan_caches
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.params import DecodeParams
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.layout.hf import spec_from_config
from kvferry.layout.spec import parse_cache_type

CHUNKS = (100, 259, NUM_TOKENS - 1, NUM_TOKENS)
WAIT_S = 60.0


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pairs() -> Iterator[tuple[CompressedCase, CompressedCase]]:
    for kept_as in ("fp8_ds_mla", "auto"):
        large, small = (case for case in ENGINES if case.kept_as == kept_as)
        yield from ((large, small), (small, large))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("prefix", [0, 330])
@pytest.mark.parametrize("pair", list(pairs()), ids=lambda pair: " to ".join(map(str, pair)))
def test_every_group_arrives_byte_by_byte(
    undo: ExitStack, pair: tuple[CompressedCase, CompressedCase], prefix: int
) -> None:
    """Two prefill ranks, which hold the same, send to one decode rank in another process."""
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    there = [CompressedEngine(pair[0], seed=1) for _ in range(2)]
    workers = [
        engine.start(undo, discovery.url, "prefill-0", rank, tp=2, sends=True)
        for rank, engine in enumerate(there)
    ]
    here = CompressedEngine(pair[1], seed=2)
    decoding = DecodeScheduler(here.selector)
    decoding.add_request("d", DecodeParams("room", "prefill-0", NUM_TOKENS), NUM_TOKENS, b"d")
    decoding.blocks_allocated("d", NUM_TOKENS - prefix, here.blocks)
    pipe = started(undo, pair[1], discovery.url, decoding)
    assert pipe.poll(WAIT_S)
    assert pipe.recv() == "started"

    prefilling = PrefillScheduler("prefill-0", there[0].selector)
    prefilling.add_request("p", "room", NUM_TOKENS, b"d")
    computed = 0
    for end in CHUNKS:
        prefilling.scheduled("p", end, there[0].blocks)
        step = prefilling.take_metadata()
        for worker in workers:
            worker.begin_step(step)
        for engine in there:
            engine.write(engine.memory.numpy(), computed, end, kept=False)
        for worker in workers:
            worker.end_step(step)
        computed = end
    assert pipe.poll(WAIT_S)
    assert pipe.recv() == ([], 0, [])


def started(
    undo: ExitStack, case: CompressedCase, url: str, decoding: DecodeScheduler
) -> Connection:
    """Return a pipe to a process that receives what the scheduler ordered."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    args = (its, case, url, 0, 1, decoding.take_metadata())
    process = context.Process(target=decode, args=args, daemon=True)
    process.start()
    undo.callback(process.join, 10.0)
    undo.callback(process.kill)
    return mine


@pytest.mark.parametrize("case", ENGINES, ids=str)
def test_layout_has_the_entries_of_the_model_in_vllms_blocks(case: CompressedCase) -> None:
    engine = CompressedEngine(case, seed=1)
    views = {
        name: CacheView(tuple(view.shape), view.stride(), str(view.dtype).removeprefix("torch."))
        for name, view in engine.views().items()
    }
    shape = EngineShape(1, (len(RATIOS),), 0, 1, 4, on_cpu=False)
    layout = plan_caches(views, shape, engine.groups).layout
    kept_as = parse_cache_type("fp8_ds_mla") if case.kept_as == "fp8_ds_mla" else None
    model = spec_from_config(CONFIGS["deepseek-v4-flash"], kept_as)
    entries = {(group.unit_bytes, group.tokens_per_entry) for group in model.groups}
    pages = {
        (group.unit_bytes, group.tokens_per_entry): layout.tokens_per_page(group)
        for group in layout.spec.groups
    }
    assert set(pages) == entries
    latent = 584 if case.kept_as == "fp8_ds_mla" else 1024
    assert pages == {
        (latent, 1): 64,
        (latent, 4): case.block,
        (latent, 128): case.block,
        (132, 4): case.block,
        (8192, 1): 4,
        (2048, 1): 4,
        (4096, 1): 8,
    }
