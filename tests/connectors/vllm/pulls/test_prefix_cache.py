"""vLLM's prefix cache, looked up by chains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from connectors.vllm.pulls.block_pools import BLOCK, Pool, chain_of, compute, request_of

from kvferry.connectors.vllm.pulls.prefix_cache import POOL_METHODS, PrefixCache, can_find

TOKENS = list(range(3 * BLOCK + 20))


def make_cache(num_blocks: int = 16) -> tuple[Pool, PrefixCache]:
    """Return a pool with ``TOKENS``, and a cache that knows them."""
    pool = Pool(num_blocks)
    cache = PrefixCache(pool, BLOCK)
    compute(pool, TOKENS)
    cache.remember(chain_of(TOKENS), request_of(TOKENS).block_hashes)
    return pool, cache


@pytest.mark.parametrize(
    ("asked", "num_blocks"),
    [
        (TOKENS, 3),
        (TOKENS[: 2 * BLOCK + 16], 2),
        ([*TOKENS[:70], 7, 7, 7, *TOKENS[70:]], 2),
        ([*TOKENS, *TOKENS], 3),
        (TOKENS[1:], 0),
        (TOKENS[:31], 0),
    ],
)
def test_the_longest_common_prefix_is_pinned(asked: list[int], num_blocks: int) -> None:
    pool, cache = make_cache()
    held = cache.pin(chain_of(asked).short)
    assert len(held.blocks) == len(pool) == num_blocks
    if num_blocks:
        assert held.digest == chain_of(TOKENS).digest(num_blocks * BLOCK)
    cache.unpin(held.blocks)
    assert len(pool) == 0


def test_an_evicted_block_ends_the_prefix() -> None:
    pool, cache = make_cache()
    pool.cached.pop(request_of(TOKENS).block_hashes[1])
    assert len(cache.pin(chain_of(TOKENS).short).blocks) == 1


def test_another_models_chain_finds_nothing() -> None:
    _, cache = make_cache()
    other = chain_of([*TOKENS[:5], 0, *TOKENS[5:]])
    assert cache.pin(other.short).blocks == []


def test_half_of_the_blocks_are_pinned_at_most() -> None:
    pool, cache = make_cache(8)
    pins = [cache.pin(chain_of(TOKENS).short) for _ in range(3)]
    assert [len(pin.blocks) for pin in pins] == [3, 1, 0]
    for pin in pins:
        cache.unpin(pin.blocks)
    assert len(cache.pin(chain_of(TOKENS).short).blocks) == 3
    assert len(pool) == 3


def test_as_many_blocks_are_known_as_there_are() -> None:
    _, cache = make_cache(8)
    for first in range(1000, 1200, 10):
        tokens = [first, *TOKENS[1:]]
        cache.remember(chain_of(tokens), request_of(tokens).block_hashes)
    assert len(cache) == 8
    assert cache.pin(chain_of(TOKENS).short).blocks == []


def test_cached_blocks_are_not_evicted_for_new_ones() -> None:
    pool, cache = make_cache(6)
    longer = request_of([*TOKENS[: 3 * BLOCK], *range(900, 900 + 3 * BLOCK)])
    blocks = cache.extend(longer, 3, 6)
    assert blocks is not None
    assert [block.block_hash for block in blocks[:3]] == longer.block_hashes[:3]
    assert len({block.block_id for block in blocks}) == len(pool) == 6
    cache.add(longer, blocks, 3, 5 * BLOCK + 16)
    cache.free(blocks)
    assert [each in pool.cached for each in longer.block_hashes] == [True] * 5 + [False]
    assert len(pool) == 0


def test_blocks_are_taken_only_if_all_are_free() -> None:
    pool, cache = make_cache(6)
    longer = request_of(list(range(7 * BLOCK)))
    assert cache.extend(longer, 3, 7) is None
    pool.cached.clear()
    assert cache.extend(longer, 3, 4) is None, "the cached blocks are gone"
    assert len(pool) == 0


@pytest.mark.parametrize(
    ("tokens", "caching", "can"), [(32, True, True), (24, True, False), (16, False, False)]
)
def test_blocks_must_end_where_a_chain_has_digests(tokens: int, caching: bool, can: bool) -> None:
    pool = Pool()
    pool.enable_caching = caching
    assert can_find(pool, tokens) is can


@pytest.mark.parametrize("method", POOL_METHODS)
def test_a_pool_of_another_kind_is_not_used(method: str) -> None:
    others = set(POOL_METHODS) - {method}
    assert can_find(SimpleNamespace(enable_caching=True, **dict.fromkeys(POOL_METHODS)), 32)
    assert not can_find(SimpleNamespace(enable_caching=True, **dict.fromkeys(others)), 32)
