"""Compatibility of the layouts of SGLang, vLLM and the reference engine for one model."""

from __future__ import annotations

import pytest

from kvferry import DType, Layout, Parallel, Refused, attention, reshard
from kvferry.connectors.sglang.geometry import layout_of
from kvferry.connectors.sglang.pools import Buffers, KvHeads, RankPosition, SglangCache
from kvferry.connectors.vllm.caches import CacheView, EngineShape, plan_caches

LAYERS, HEADS, DIM = 2, 3, 64


def sglang(tp: int, page: int) -> Layout:
    num_heads = HEADS // tp
    page_bytes = page * num_heads * DIM * 4
    return layout_of(
        SglangCache(
            num_layers=LAYERS,
            layers=tuple(range(LAYERS)),
            stages=(LAYERS,),
            position=RankPosition(tp=tp, tp_rank=0),
            heads=KvHeads(total=HEADS, k_dim=DIM, v_dim=DIM),
            buffers=Buffers(
                addresses=[1 << 20] * 2 * LAYERS,
                lengths=[8 * page_bytes] * 2 * LAYERS,
                page_lengths=[page_bytes] * 2 * LAYERS,
                layers=tuple(range(LAYERS)),
                page_tokens=page,
                dtype=DType.FLOAT32,
            ),
        )
    )


def vllm(*, on_cpu: bool) -> Layout:
    shape = (8, HEADS, 16, 2 * DIM)
    strides = (HEADS * 16 * 2 * DIM, 16 * 2 * DIM, 2 * DIM, 1)
    views = {
        f"model.layers.{layer}.self_attn.attn": CacheView(shape, strides, "float32")
        for layer in range(LAYERS)
    }
    return plan_caches(views, EngineShape(1, (LAYERS,), 0, HEADS, 16, on_cpu)).layout


def own(tp: int, page: int) -> Layout:
    spec = attention(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=DType.FLOAT32)
    return Layout(spec, Parallel(tp=tp), page_tokens=page)


def test_reference_engine_and_sglang_are_compatible() -> None:
    assert reshard(own(1, 8), sglang(3, 16)).moves
    assert reshard(sglang(3, 1), own(1, 8)).moves


def test_vllms_unknown_cpu_pages_and_sglang_are_refused() -> None:
    """Kernels whose form of K is not known: only the same kernels can read their pages."""
    ours, theirs = vllm(on_cpu=True), sglang(1, 16)
    for prefill, decode, said in (
        (ours, theirs, "the tensors blocks_of_16_tokens at prefill and k, v at decode"),
        (theirs, ours, "the tensors k, v at prefill and blocks_of_16_tokens at decode"),
    ):
        with pytest.raises(Refused, match=f"{said}, so one can't read the other's; use engines"):
            reshard(prefill, decode)
