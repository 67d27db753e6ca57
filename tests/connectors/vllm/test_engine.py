"""Reading a VllmConfig, with stand-ins for vLLM's cache groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import InputError
from kvferry.connectors.vllm.caches import BlockGroup
from kvferry.connectors.vllm.engine import block_groups, check_parallelism, replica_index
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


def groups(*specs: Any, hybrid: bool = True, draft: object = None) -> list[BlockGroup]:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    vllm_config = SimpleNamespace(scheduler_config=scheduler, speculative_config=draft)
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


def test_without_the_hybrid_allocator_all_tokens_are_kept() -> None:
    assert [group.window for group in groups(SLIDING, hybrid=False)] == [None]


def test_layers_of_one_kind_may_differ_in_size() -> None:
    several = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": FULL})
    assert groups(several)[0].window is None


@pytest.mark.parametrize(
    ("kept", "draft", "said"),
    [
        (STATE, object(), "recurrent state .* speculative decoding"),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": STATE}), None, "several forms"),
        (spec("ChunkedLocalAttentionSpec"), None, "--disable-hybrid-kv-cache-manager"),
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": SLIDING}), None, "SlidingWindowSpec"),
        (SLIDING, object(), "speculative decoding"),
        (spec("FullAttentionSpec", block_size=32), None, "blocks of 16, 32 tokens"),
    ],
)
def test_unsupported_groups_are_refused(kept: Any, draft: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        groups(FULL, kept, draft=draft)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_context_parallelism_is_refused(side: str) -> None:
    name = f"{side}_context_parallel_size"
    check_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**{name: 1})))
    with pytest.raises(InputError, match=f"{name} above 1 yet; leave it out"):
        check_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**{name: 2})))


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
