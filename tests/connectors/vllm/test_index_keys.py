"""Sparse attention's caches in vLLM's blocks: packed latents, and keys before scales."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kvferry import DiscoveryServer, InputError
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

LATENT, INDEX = "model.layers.0.self_attn.attn", "model.layers.0.self_attn.indexer.k_cache"
# DeepSeek V3.2 in FP8: 512 values, 4 scales and a rotary part of 64; a key of 128 and its scale.
LATENT_BYTES, KEY_BYTES, SCALE_BYTES = 656, 128, 4
UNTOUCHED = 7
# Tokens at which ranks take turns.
TURN = 16


class SparseEngine:
    """Ranks with the caches of a layer. Every rank has all of the latent and of the keys."""

    def __init__(self, blocks: tuple[int, ...], page: int, tp: int = 1, dcp: int = 1) -> None:
        self.blocks, self.page, self.tp, self.dcp = blocks, page, tp, dcp
        num_blocks = max(blocks) + 2
        self.caches = [
            {
                name: torch.full((num_blocks, 1, page, width), UNTOUCHED, dtype=torch.uint8)
                for name, width in ((LATENT, LATENT_BYTES), (INDEX, KEY_BYTES + SCALE_BYTES))
            }
            for _ in range(tp)
        ]
        self.workers: list[ConnectorWorker] = []

    def start(self, undo: ExitStack, url: str, name: str, *, sends: bool) -> None:
        settings = read_settings({"discovery": url, "instance": name, "transport": "shm"})
        for rank, held in enumerate(self.caches):
            engine = EngineShape(
                *(self.tp, (1,), rank, 1, self.page), on_cpu=False, dcp=self.dcp, interleave=TURN
            )  # fmt: skip
            worker = ConnectorWorker(settings, None, name, "m")
            worker.register(
                *(held, engine), sends=sends, receives=not sends, fails_early=False,
                zeroes_rest=True,
            )  # fmt: skip
            undo.callback(worker.close)
            self.workers.append(worker)

    def places(self, rank: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """Return token, block and place in the block of what a rank keeps."""
        mine = [t for t in range(num_tokens) if t // TURN % self.dcp == rank % self.dcp]
        return [(t, self.blocks[i // self.page], i % self.page) for i, t in enumerate(mine)]

    def wanted(self, rank: int, first: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the caches with these tokens as vLLM's kernels write them."""
        cache = self.caches[rank]
        latent = torch.full_like(cache[LATENT], UNTOUCHED)
        pages = torch.full((len(latent), self.page * (KEY_BYTES + SCALE_BYTES)), UNTOUCHED)
        for token, block, place in self.places(rank, num_tokens):
            if token >= first:
                latent[block, 0, place] = content(token, LATENT_BYTES)
                pages[block, place * KEY_BYTES :][:KEY_BYTES] = content(token, KEY_BYTES).int()
                at = self.page * KEY_BYTES + place * SCALE_BYTES
                pages[block, at : at + SCALE_BYTES] = content(token + 1, SCALE_BYTES).int()
        return {LATENT: latent, INDEX: pages.to(torch.uint8).view_as(cache[INDEX])}


def content(token: int, num_bytes: int) -> torch.Tensor:
    return ((torch.arange(num_bytes) * 3 + token * 17) % 200 + 20).to(torch.uint8)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


SIDES = {
    "page16-page64": (SparseEngine((9, 2, 5, 0, 7, 1, 4, 3), 16, 2), SparseEngine((3, 1), 64)),
    "page64-page16": (SparseEngine((3, 1), 64), SparseEngine((9, 2, 5, 0, 7, 1, 4, 3), 16, 2)),
    "tp1-dcp2": (
        SparseEngine((3, 1), 64),
        SparseEngine((2, 0), 32, 2, 2),
    ),
}


@pytest.mark.parametrize("prefix", [0, 64])
@pytest.mark.parametrize("pair", SIDES)
def test_keys_and_scales_arrive_where_kernels_read_them(
    undo: ExitStack, pair: str, prefix: int
) -> None:
    """The prompt ends inside a block on both sides."""
    num_tokens = 107
    discovery = DiscoveryServer().start()
    undo.callback(discovery.stop)
    there, here = (SparseEngine(side.blocks, side.page, side.tp, side.dcp) for side in SIDES[pair])
    there.start(undo, discovery.url, "prefill-0", sends=True)
    here.start(undo, discovery.url, "decode-0", sends=False)
    order = ReceiveRoom("d", "room", "prefill-0", num_tokens, prefix, (here.blocks,), b"d")
    for worker in here.workers:
        worker.start_receives(DecodeMetadata([order]))
    push = PushTokens("room", num_tokens, 0, (there.blocks,), b"d")
    metadata = PrefillMetadata(
        [OpenRoom("p", "room", num_tokens)], [push], held=[HeldRoom("p", "room")]
    )
    for rank, worker in enumerate(there.workers):
        worker.begin_step(metadata)
        for name, wanted in there.wanted(rank, 0, num_tokens).items():
            there.caches[rank][name].copy_(wanted)
        worker.end_step(metadata)
    waiting = set(range(len(here.workers)))
    while waiting:
        waiting -= {rank for rank in waiting if here.workers[rank].take_arrivals().received}
    for rank, held in enumerate(here.caches):
        filled = here.wanted(rank, prefix, num_tokens)
        # Tokens after the last one were zeroed, in both parts of a block.
        last = here.places(rank, num_tokens)[-1]
        zeroed = {LATENT: filled[LATENT][last[1], 0, last[2] + 1 :]}
        page = filled[INDEX].view(len(filled[INDEX]), -1)[last[1]]
        zeroed["keys"] = page[(last[2] + 1) * KEY_BYTES : here.page * KEY_BYTES]
        zeroed["scales"] = page[here.page * KEY_BYTES + (last[2] + 1) * SCALE_BYTES :]
        for rest in zeroed.values():
            rest.zero_()
        for name, cache in held.items():
            torch.testing.assert_close(cache, filled[name], rtol=0, atol=0)


def test_index_keys_of_another_form_are_refused() -> None:
    views = {
        name: CacheView((4, 1, 16, width), (16 * width, 16 * width, width, 1), "uint8")
        for name, width in ((LATENT, LATENT_BYTES), (INDEX, 68))
    }
    with pytest.raises(InputError, match="68 bytes, no multiple of 132"):
        plan_caches(views, EngineShape(1, (1,), 0, 1, 16, on_cpu=False))
