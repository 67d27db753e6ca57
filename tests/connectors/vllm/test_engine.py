"""Reading a VllmConfig, with stand-ins for vLLM's cache groups."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import InputError
from kvferry.connectors.vllm.caches import BlockGroup, EntryForm
from kvferry.connectors.vllm.engine import (
    block_groups,
    block_selector,
    num_left_to_decode,
    replica_index,
    shared_block_tokens,
)
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.states import StateSpec


def spec(kind: str, **more: Any) -> Any:
    """Return an object whose class has the given name."""
    return type(kind, (SimpleNamespace,), {})(**{"block_size": 16} | more)


FULL = spec("FullAttentionSpec", sliding_window=64)
SLIDING = spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=2)
STATE = spec(
    "MambaSpec",
    block_size=1024,
    shapes=[[3, 48], [4, 8, 2]],
    dtypes=["torch.bfloat16", "torch.float32"],
    mamba_type=SimpleNamespace(name="MAMBA2"),
    tp_replicated=False,
)


def groups(
    *specs: Any, hybrid: bool = True, draft: object = None, dcp: int = 1
) -> list[BlockGroup]:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    vllm_config = SimpleNamespace(
        scheduler_config=scheduler,
        speculative_config=draft,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
    )
    kept = [
        SimpleNamespace(layer_names=[str(i)], kv_cache_spec=each) for i, each in enumerate(specs)
    ]
    return block_groups(vllm_config, SimpleNamespace(kv_cache_groups=kept))


def test_window_of_a_group() -> None:
    full, sliding = groups(FULL, SLIDING)
    assert full == BlockGroup(frozenset({"0"}))
    assert sliding == BlockGroup(frozenset({"1"}), window=65)


def test_state_groups_may_have_other_block_sizes() -> None:
    full, state = groups(FULL, STATE)
    assert full.state is None
    assert state.window is None
    assert state.state == StateSpec("MAMBA2", ((3, 48), (4, 8, 2)), ("bfloat16", "float32"), 1024)


@pytest.mark.parametrize(
    ("kept", "num_modules", "num_left"),
    [
        ((FULL,), 0, 0),
        ((FULL, SLIDING), 0, 1),
        ((FULL, STATE), 0, 1),
        ((FULL,), 1, 0),
        ((FULL,), 4, 3),
    ],
)
def test_tokens_left_to_decode(kept: Any, num_modules: int, num_left: int) -> None:
    """Several MTP modules read ahead, each one token further than the one before it."""
    draft = SimpleNamespace(
        use_multi_module_mtp=lambda: num_modules > 1, num_speculative_tokens=num_modules
    )
    vllm_config = SimpleNamespace(speculative_config=draft if num_modules else None)
    assert num_left_to_decode(vllm_config, groups(*kept)) == num_left


def test_without_the_hybrid_allocator_all_tokens_are_kept() -> None:
    assert [group.window for group in groups(SLIDING, hybrid=False)] == [None]


def test_layers_of_one_kind_may_differ_in_size() -> None:
    several = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": FULL})
    assert groups(several)[0].window is None


def several(*specs: Any) -> Any:
    return spec(
        "UniformTypeKVCacheSpecs", kv_cache_specs={str(n): one for n, one in enumerate(specs)}
    )


WIDER: dict[str, Any] = {"sliding_window": 128, "extra_retained_tokens": 0}
V4: dict[str, Any] = {
    "tokens_per_state": 4,
    "state_content_bytes": 584,
    "model_version": "deepseek_v4",
}


def test_blocks_and_entries_of_each_group() -> None:
    """As those of DeepSeek V4: entries for several tokens, in parts, beside short windows."""
    short = spec("SlidingWindowMLASpec", block_size=8, **WIDER, tokens_per_state=1)
    latents, keys = spec("MLAAttentionSpec", **V4), spec("MLAAttentionSpec", tokens_per_state=4)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=8),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    found = groups(several(latents, keys), short)
    packed = EntryForm(4, (("latents", 576), ("scales", 8)))
    assert found == [
        BlockGroup(frozenset({"0"}), block_tokens=16, forms={"0": packed, "1": EntryForm(4)}),
        BlockGroup(frozenset({"1"}), window=127, block_tokens=8),
    ]
    assert block_selector(config, found) == BlockSelector(16, {}, {0: 16, 1: 8})
    chosen = block_selector(config, found).select(((4, 5, 6), range(6)), 1, 39)
    assert chosen == ((5, 6), (2, 3, 4))
    assert block_selector(config, groups(FULL, FULL)) == BlockSelector(8)
    both = groups(several(latents, keys), short, hybrid=False)
    assert [(one.window, one.block_tokens) for one in both] == [(None, 16), (None, 8)]


@pytest.mark.parametrize(
    ("kept", "draft", "said"),
    [
        (STATE, object(), "recurrent state .* speculative decoding"),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": STATE}), None, "several forms"),
        (spec("ChunkedLocalAttentionSpec"), None, "--disable-hybrid-kv-cache-manager"),
        (several(SLIDING, FULL), None, "SlidingWindowSpec"),
        (several(SLIDING, spec("SlidingWindowSpec", **WIDER)), None, "SlidingWindowSpec"),
        (spec("SlidingWindowMLASpec", **WIDER, bounded_replay=True), None, "SlidingWindowMLASpec"),
        (spec("MLAAttentionSpec", tokens_per_state=Fraction(1, 2)), None, "several entries"),
        (spec("MLAAttentionSpec", **V4 | {"state_content_bytes": 356}), None, "keeps 356 bytes"),
        (spec("MLAAttentionSpec", compress_ratio=4, model_version="deepseek_v4"), None, "unknown"),
        (SLIDING, object(), "speculative decoding"),
    ],
)
def test_unsupported_groups_are_refused(kept: Any, draft: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        groups(FULL, kept, draft=draft)


def test_state_may_be_beside_tokens_that_ranks_share() -> None:
    assert len(groups(FULL, STATE, dcp=4)) == 2


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("whole", [SLIDING, spec("FullAttentionSpec", dcp_sharded=False)])
def test_groups_that_ranks_do_not_share_are_refused_beside_those_they_do(
    whole: Any, hybrid: bool
) -> None:
    assert len(groups(FULL, whole, hybrid=hybrid)) == 2
    with pytest.raises(InputError, match="leave out --decode-context-parallel-size"):
        groups(FULL, whole, hybrid=hybrid, dcp=4)


def test_blocks_of_the_scheduler_span_all_ranks() -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64),
        parallel_config=SimpleNamespace(decode_context_parallel_size=8),
    )
    assert shared_block_tokens(config) == 512


@pytest.mark.parametrize(
    ("engine_id", "index", "size", "replica"),
    [
        ("8c1f", 0, 1, None),
        ("8c1f_dp0", 0, 1, 0),  # a dense model's: vLLM says that there is one
        ("8c1f_dp1", 1, 1, 1),
        ("8c1f_dp1", 1, 4, 1),
    ],
)
def test_replica_index_of_dense_models(
    engine_id: str, index: int, size: int, replica: int | None
) -> None:
    parallel = SimpleNamespace(data_parallel_index=index, data_parallel_size=size)
    transfer = SimpleNamespace(engine_id=engine_id)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    assert replica_index(config) == replica
