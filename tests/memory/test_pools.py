"""Tests that units of an engine's pools are found where the engine's arrays have them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from endpoint.fleets import COMPRESSED, HYBRID, LATENT, layout, with_pages
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.layout import Layout, Order
from kvferry.layout.spec import DType, attention
from kvferry.memory.pools import Memory, PoolArrays
from kvferry.plan.places import Base, Placement, PoolMap
from kvferry.regions import HOST, Device, Region

SPEC = attention(layers=2, kv_heads=4, head_dim=6, v_head_dim=5)
PAGES, TOKENS, HEADS = 3, 4, 4
NHD = layout(SPEC, TOKENS)
HND = layout(SPEC, TOKENS, Order.HND)


def numbered(*shape: int) -> NDArray[np.uint16]:
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def unit(memory: Memory, tensor: str, layer: int, at: tuple[int, int, int]) -> bytes:
    """Return the bytes of a unit at the address that the memory gives."""
    placement = memory.map.of("kv", tensor)
    (base,) = placement.bases_of((layer,))
    strides = (placement.page_stride, placement.token_stride, placement.unit_stride)
    offset = base.offset + sum(i * s for i, s in zip(at, strides, strict=True))
    size = SPEC.group("kv").tensors[tensor == "v"].unit_bytes
    region = memory.regions[base.region]
    assert offset + size <= region.num_bytes
    return ctypes.string_at(region.address + offset, size)


def assert_found(memory: Memory, arrays: dict[str, list[Any]], *, units_first: bool) -> None:
    """Compare every unit with arrays of ``[pages, tokens, units, ...]``, or units first."""
    for tensor, layers in arrays.items():
        for layer, array in enumerate(layers):
            for page, token, head in np.ndindex(PAGES, TOKENS, HEADS):
                middle = (head, token) if units_first else (token, head)
                expected = array[page, middle[0], middle[1]].tobytes()
                assert unit(memory, tensor, layer, (page, token, head)) == expected


@pytest.mark.parametrize("order", Order)
def test_one_array_for_each_layer(order: Order) -> None:
    middle = (HEADS, TOKENS) if order is Order.HND else (TOKENS, HEADS)
    arrays = {
        "k": [numbered(PAGES, *middle, 6) + 1000 * layer for layer in range(2)],
        "v": [numbered(PAGES, *middle, 5) + 5000 * layer for layer in range(2)],
    }
    memory = Memory.of(layout(SPEC, TOKENS, order), 0, {"kv": arrays})
    assert_found(memory, arrays, units_first=order is Order.HND)
    assert len(memory.regions) == 4
    assert memory.device == HOST


def test_one_array_for_all_layers() -> None:
    k, v = numbered(2, PAGES, TOKENS, HEADS, 6), numbered(2, PAGES, TOKENS, HEADS, 5)
    memory = Memory.of(NHD, 0, {"kv": {"k": k, "v": v}})
    assert_found(memory, {"k": list(k), "v": list(v)}, units_first=False)


def test_arrays_by_layer_number() -> None:
    staged = layout(SPEC, TOKENS, pp=2)
    k, v = numbered(PAGES, TOKENS, HEADS, 6), numbered(PAGES, TOKENS, HEADS, 5)
    memory = Memory.of(staged, 1, {"kv": {"k": {0: None, 1: k}, "v": {1: v}}})
    assert unit(memory, "k", 1, (2, 3, 1)) == k[2, 3, 1].tobytes()
    with pytest.raises(InputError, match=r"kv\.v has no array for layer 0"):
        Memory.of(staged, 0, {"kv": {"k": {0: k}, "v": {1: v}}})


@pytest.mark.parametrize("packed_first", [True, False])
def test_keys_and_values_in_one_tensor_are_one_region(packed_first: bool) -> None:
    """Engines pack K and V before the pages, or inside each page."""
    spec = attention(layers=1, kv_heads=HEADS, head_dim=6)
    if packed_first:
        whole = numbered(2, PAGES, TOKENS, HEADS, 6)
        k, v = whole[0], whole[1]
    else:
        whole = numbered(PAGES, 2, TOKENS, HEADS, 6)
        k, v = whole[:, 0], whole[:, 1]
    memory = Memory.of(layout(spec, TOKENS), 0, {"kv": {"k": [k], "v": [v]}})
    for page, token, head in np.ndindex(PAGES, TOKENS, HEADS):
        assert unit(memory, "k", 0, (page, token, head)) == k[page, token, head].tobytes()
    value = memory.map.of("kv", "v")
    at = memory.regions[value.bases[0].region].address + value.bases[0].offset
    assert at == v.ctypes.data
    # Interleaved views share a region; adjacent ones have two.
    assert len(memory.regions) == (2 if packed_first else 1)


def test_torch_tensors_of_any_type_and_stride() -> None:
    spec = attention(layers=1, kv_heads=HEADS, head_dim=6)
    # Stored with heads first, seen with tokens first.
    stored = torch.arange(PAGES * TOKENS * HEADS * 6).to(torch.bfloat16)
    k = stored.reshape(PAGES, HEADS, TOKENS, 6).permute(0, 2, 1, 3)
    v = torch.zeros(PAGES, TOKENS, HEADS, 6, dtype=torch.float16)
    memory = Memory.of(layout(spec, TOKENS), 0, {"kv": {"k": [k], "v": [v]}})
    words = k.view(torch.int16)
    for page, token, head in np.ndindex(PAGES, TOKENS, HEADS):
        expected = words[page, token, head].numpy().tobytes()
        assert unit(memory, "k", 0, (page, token, head)) == expected


def test_single_unit_needs_no_axis() -> None:
    pages = 5
    latent = [np.zeros((pages, TOKENS, 72), dtype=np.uint16) for _ in range(3)]
    # With an axis it is as good.
    index = [np.zeros((pages, TOKENS, 1, 5), dtype=np.uint8) for _ in range(2)]
    pools: PoolArrays = {"latent": {"ckv": latent}, "index": {"k": index}}
    memory = Memory.of(layout(LATENT, TOKENS, tp=4), 3, pools)
    placement = memory.map.of("latent", "ckv")
    assert (placement.page_stride, placement.token_stride) == (TOKENS * 144, 144)
    assert (placement.num_pages, placement.unit_stride) == (pages, 144)
    assert memory.map.of("index", "k").token_stride == 5


def test_arrays_have_the_page_of_their_group() -> None:
    its = with_pages(layout(COMPRESSED, 16), swa=5, sparse=8)
    rows = {"swa": 5, "sparse": 2, "heavy": 1, "inputs": 16}
    pools = {
        group.name: {
            tensor.name: np.zeros(
                (len(group.layers), 7, rows[group.name], tensor.unit_bytes), np.uint8
            )
            for tensor in group.tensors
        }
        for group in COMPRESSED.groups
    }
    placements = Memory.of(its, 0, pools).map.placements
    assert {(each.num_pages, each.page_stride // each.token_stride) for each in placements} == {
        (7, count) for count in rows.values()
    }


def test_state_rows_have_no_tokens() -> None:
    tp2 = layout(HYBRID, TOKENS, tp=2)
    paged = [np.zeros((PAGES, TOKENS, 2, 16), dtype=np.uint16) for _ in range(2)]
    pools: PoolArrays = {
        "full": {"k": paged, "v": paged},
        "near": {"k": paged[:1], "v": paged[:1]},
        "conv": {"state": [np.zeros((7, 4, 3), dtype=np.float32) for _ in range(2)]},
        "ssm": {"state": [np.zeros((7, 2, 3, 11), dtype=np.float32)]},
    }
    memory = Memory.of(tp2, 1, pools)
    conv, ssm = memory.map.of("conv", "state"), memory.map.of("ssm", "state")
    assert (conv.num_pages, conv.page_stride, conv.unit_stride) == (7, 48, 12)
    assert (ssm.num_pages, ssm.page_stride, ssm.unit_stride) == (7, 264, 132)


def test_raw_pointers() -> None:
    array = numbered(PAGES, TOKENS, HEADS, 6)
    placement = Placement("kv", "k", 48 * TOKENS, 48, 12, PAGES, (Base(0, 0, 0),))
    pools = PoolMap((placement,))
    ways: list[Region | tuple[int, int] | tuple[int, int, str]] = [
        (array.ctypes.data, array.nbytes),
        (array.ctypes.data, array.nbytes, "cpu"),
        Region(array.ctypes.data, array.nbytes),
    ]
    for region in ways:
        memory = Memory.at(pools, [region])
        assert unit(memory, "k", 0, (2, 1, 3)) == array[2, 1, 3].tobytes()
    assert Memory.at(pools, [(1 << 40, 4096, "cuda:1")]).device == Device("cuda", 1)
    with pytest.raises(InputError, match="names region 0, but only 0 were given"):
        Memory.at(pools, [])


def test_pools_on_two_devices_are_refused() -> None:
    memory = Memory.at(PoolMap(()), [(4096, 1), (4096, 1, "cuda:0")])
    with pytest.raises(InputError, match="several devices; use an endpoint for each device"):
        memory.device  # noqa: B018 - it is the reading that is refused


K = numbered(PAGES, TOKENS, HEADS, 6)
V = numbered(PAGES, TOKENS, HEADS, 5)


@pytest.mark.parametrize(
    ("its", "pools", "problem"),
    [
        (NHD, {}, r"no pool for kv\.k; pass pools=\{'kv': \{'k': \[...\]\}\}"),
        (NHD, {"kv": {"k": [K, K]}}, r"no pool for kv\.v"),
        (NHD, {"kv": {"k": [K], "v": [V]}}, r"kv\.k has 1 arrays, but this rank holds 2 layers"),
        (NHD, {"kv": {"k": [K, V], "v": [V, V]}}, r"kv\.k of layer 1 has shape \[3, 4, 4, 5\]"),
        (NHD, {"kv": {"k": [K[:, :3]] * 2, "v": [V, V]}}, r"needs \[pages, 4, 4, ...\], 12 b"),
        (NHD, {"kv": {"k": [K[..., ::-1]] * 2, "v": [V, V]}}, r"shape"),
        (NHD, {"kv": {"k": [numbered(PAGES, TOKENS, HEADS, 12)[..., ::2]] * 2}}, r"gaps inside a"),
        (NHD, {"kv": {"k": [K, K[:2]], "v": [V, V]}}, r"in layers 1 and 0"),
        (NHD, {"kv": {"k": [K.tolist()] * 2, "v": [V, V]}}, r"not list; for raw pointers"),
        (HND, {"kv": {"k": [numbered(PAGES, 5, HEADS, 6)] * 2, "v": [V, V]}}, r"pages, 4, 4"),
    ],
)
def test_invalid_arrays_are_refused(its: Layout, pools: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Memory.of(its, 0, pools)


def test_allocated_pools_are_dense() -> None:
    memory = Memory.allocate(NHD, 0, 8, lambda size: np.zeros(size, dtype=np.uint8))
    assert sum(region.num_bytes for region in memory.regions) == 8 * TOKENS * SPEC.payload_bytes(1)
    assert {p.num_pages for p in memory.map.placements} == {8}


def test_only_the_width_of_a_dtype_matters() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=8, dtype=DType.FLOAT8_E4M3)
    good = np.zeros((PAGES, TOKENS, 1, 8), dtype=np.uint8)
    Memory.of(layout(spec, TOKENS), 0, {"kv": {"k": [good], "v": [good]}})
    wide = good.astype(np.uint16)
    with pytest.raises(InputError, match="8 bytes per unit"):
        Memory.of(layout(spec, TOKENS), 0, {"kv": {"k": [wide], "v": [good]}})
