"""Stand-in for vLLM's block pool: blocks by hash, references, and a queue of unused blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry import PrefixChain, prefix_chain

BLOCK = 32


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class Pool:
    """Follows ``BlockPool``: unused blocks keep their content until they are taken."""

    enable_caching = True

    def __init__(self, num_gpu_blocks: int = 16) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.unused = [Block(i) for i in range(num_gpu_blocks)]
        self.cached: dict[bytes, Block] = {}

    def __len__(self) -> int:
        """Return how many blocks are in use."""
        return self.num_gpu_blocks - len(self.unused)

    def get_num_free_blocks(self) -> int:
        return len(self.unused)

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Block] | None:
        assert groups == [0]
        block = self.cached.get(block_hash)
        return [block] if block else None

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.unused.remove(block)
            block.ref_cnt += 1

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        found, self.unused = self.unused[:num_blocks], self.unused[num_blocks:]
        assert len(found) == num_blocks
        for block in found:
            self.cached.pop(block.block_hash or b"", None)
            block.ref_cnt, block.block_hash = 1, None
        return found

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                place = len(self.unused) if block.block_hash else 0
                self.unused.insert(place, block)

    def cache_full_blocks(
        self, request: Any, blocks: list[Block], first: int, end: int, size: int, group: int
    ) -> None:
        assert (size, group) == (BLOCK, 0)
        for block, block_hash in zip(
            blocks[first:end], request.block_hashes[first:end], strict=True
        ):
            block.block_hash = block_hash
            self.cached[block_hash] = block


def chain_of(tokens: Sequence[int]) -> PrefixChain:
    return prefix_chain(tokens, model="m", dtype="float32")


def request_of(tokens: Sequence[int], name: str = "a") -> Any:
    """Return a request with hashes that stand for vLLM's."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    hashes = [b"vllm" + np.asarray(tokens[:end]).tobytes() for end in ends]
    return SimpleNamespace(request_id=name, block_hashes=hashes, num_tokens=len(tokens))


def compute(pool: Pool, tokens: Sequence[int]) -> None:
    """Let a request compute these tokens, and finish."""
    request = request_of(tokens)
    blocks = pool.get_new_blocks(-(-len(tokens) // BLOCK))
    pool.cache_full_blocks(request, blocks, 0, len(request.block_hashes), BLOCK, 0)
    pool.free_blocks(reversed(blocks))
