"""vLLM's prefix cache, looked up by digest chains. For the scheduler's thread only.

vLLM finds cached blocks by hashes of its own, which depend on the block size and the engine. Other
instances name a sequence by its chain. ``remember`` connects both when a request has finished: it
maps the chain's digest at each block's end to vLLM's hash of that block. Nothing here says that a
block is still cached. That is looked up in vLLM's block pool each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvferry import SPAN_TOKENS, PrefixChain, span_digests

# vLLM's only cache group.
GROUPS = [0]
# Methods of vLLM's block pool that are used here.
POOL_METHODS = (
    "cache_full_blocks",
    "free_blocks",
    "get_cached_block",
    "get_new_blocks",
    "get_num_free_blocks",
    "touch",
)
# Blocks that other instances may have pinned at a time, as a share of all.
PINNED_SHARE = 0.5


class KnownBlock(NamedTuple):
    """vLLM's hash of a block, and the chain's digest at its end."""

    block_hash: Any
    digest: bytes


class HeldPrefix(NamedTuple):
    """The blocks of a cached prefix, and its digest."""

    blocks: list[Any]
    digest: bytes


def can_find(pool: Any, block_tokens: int) -> bool:
    """Return whether vLLM caches prefixes, in blocks at whose ends a chain has digests."""
    is_known = all(hasattr(pool, name) for name in POOL_METHODS)
    return is_known and bool(pool.enable_caching) and not block_tokens % SPAN_TOKENS


class PrefixCache:
    """Blocks of vLLM's pool. ``pool`` is a ``BlockPool`` with one cache group of full attention."""

    def __init__(self, pool: Any, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._pool = pool
        self._known: OrderedDict[bytes, KnownBlock] = OrderedDict()
        self._num_pinned = 0

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, chain: PrefixChain, block_hashes: Sequence[Any]) -> None:
        """Record a finished request's blocks. Those used longest ago are forgotten."""
        ends = self._block_ends(chain.short)
        for number, (key, block_hash) in enumerate(zip(ends, block_hashes, strict=False), 1):
            digest = chain.digest(number * self.block_tokens)
            self._known[key] = KnownBlock(block_hash, digest)
            self._known.move_to_end(key)
        while len(self._known) > self._pool.num_gpu_blocks:
            self._known.popitem(last=False)

    def pin(self, asked: bytes) -> HeldPrefix:
        """Return the longest cached prefix of a short chain. Its blocks stay until ``unpin``."""
        blocks: list[Any] = []
        digest = b""
        most = int(self._pool.num_gpu_blocks * PINNED_SHARE) - self._num_pinned
        for key in self._block_ends(asked)[: max(0, most)]:
            known = self._known.get(key)
            found = known and self._pool.get_cached_block(known.block_hash, GROUPS)
            if known is None or not found:
                break
            blocks += found
            digest = known.digest
        self._pool.touch(blocks)
        self._num_pinned += len(blocks)
        return HeldPrefix(blocks, digest)

    def unpin(self, blocks: Sequence[Any]) -> None:
        """Let vLLM evict these blocks again, a prefix's last block first."""
        self._num_pinned -= len(blocks)
        self.free(blocks)

    def extend(self, request: Any, num_cached: int, num_blocks: int) -> list[Any] | None:
        """Return a request's cached blocks and new ones behind them, all held until ``free``.

        None if no more are needed, or too few are free.
        """
        hashes = request.block_hashes[:num_cached]
        found = [self._pool.get_cached_block(each, GROUPS) for each in hashes]
        if num_blocks <= num_cached or not all(found):
            return None
        cached = [blocks[0] for blocks in found]
        num_idle = sum(block.ref_cnt == 0 for block in cached)
        if self._pool.get_num_free_blocks() - num_idle < num_blocks - num_cached:
            return None
        # Before new blocks are taken, which may evict what nobody uses.
        self._pool.touch(cached)
        return cached + list(self._pool.get_new_blocks(num_blocks - num_cached))

    def add(self, request: Any, blocks: list[Any], num_cached: int, num_tokens: int) -> None:
        """Cache the blocks that the request's first ``num_tokens`` tokens fill."""
        num_full = num_tokens // self.block_tokens
        if num_full > num_cached:
            sizes = (num_cached, num_full, self.block_tokens, GROUPS[0])
            self._pool.cache_full_blocks(request, blocks, *sizes)

    def free(self, blocks: Sequence[Any]) -> None:
        """Give up the hold on these blocks."""
        self._pool.free_blocks(reversed(blocks))

    def _block_ends(self, short: bytes) -> list[bytes]:
        """Return the digests of a short chain at the ends of blocks."""
        spans = self.block_tokens // SPAN_TOKENS
        return span_digests(short)[spans - 1 :: spans]
