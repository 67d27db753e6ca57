"""Packed and transposed tensors: what copies keep, and what they translate.

``test_bind`` moves the bytes of any such pair.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.layout import DType, Layout, Order, StateRow, attention
from kvferry.layout.spec import CacheSpec, Group, Part, Tensor
from kvferry.memory.pools import Memory
from kvferry.plan import (
    PRESETS,
    Binding,
    PagedView,
    PageTable,
    RankPair,
    Request,
    StagingView,
    TransferMode,
    bind,
    choose,
    contiguous_pools,
    reshard,
    shape_of,
)
from kvferry.protocol.checks import pools_problem

SPEC = attention(layers=2, kv_heads=4, head_dim=8, dtype=DType.FLOAT32)
ROWS = Layout(SPEC, page_tokens=4)
PACKED = replace(ROWS, packed=("kv",))
COLUMNS = replace(ROWS, order=Order.HND, transposed=("kv.k",))
PAIR = RankPair(0, 0)
TOKENS = 10


def bound(source: Layout, target: Layout, num_tokens: int = TOKENS) -> Binding:
    pages = -(-num_tokens // 4)
    from_, into = (
        PagedView(contiguous_pools(layout, 0, 2 * pages).map, {"kv": PageTable(range(pages))})
        for layout in (source, target)
    )
    return bind(reshard(source, target), PAIR, Request(num_tokens), from_, into)


def gathered(source: Layout, target: Layout) -> Binding:
    side = PagedView(contiguous_pools(source, 0, 6).map, {"kv": PageTable(range(3))})
    return bind(reshard(source, target), PAIR, Request(TOKENS), side, StagingView())


def test_packed_tensors_are_copied_as_one() -> None:
    binding = bound(PACKED, PACKED)
    assert [part.tensor for part in binding.parts] == ["k"]
    assert binding.contiguous
    assert binding.num_pieces == 2 * 3
    assert binding.num_bytes == reshard(PACKED, PACKED).payload_bytes(Request(TOKENS))


def test_tensors_that_one_side_packs_are_copied_apart() -> None:
    for pair in ((PACKED, ROWS), (ROWS, PACKED)):
        binding = bound(*pair)
        assert [part.tensor for part in binding.parts] == ["k", "v"]
        assert not binding.contiguous


def test_columns_stay_columns_if_both_sides_have_them() -> None:
    plan = reshard(COLUMNS, COLUMNS)
    assert plan.forms.translated == ()
    k, v = bound(COLUMNS, COLUMNS).parts
    # In a full page one piece for each head, in the partial one of 2 tokens one for each element.
    assert k.pieces.cols.tolist() == [1, 1, 8]
    assert k.pieces.rows.tolist() == [4, 4, 4]
    assert k.pieces.lengths.tolist() == [4 * 8 * 4, 4 * 8 * 4, 2 * 4]
    assert not k.pieces.is_translated
    assert v.pieces.num_bytes == k.pieces.num_bytes
    slot, _ = gathered(COLUMNS, COLUMNS).parts
    assert slot.pieces.lengths.tolist() == [16, 16, 8]


@pytest.mark.parametrize("pair", [(ROWS, COLUMNS), (COLUMNS, ROWS)])
def test_elements_are_translated_if_one_side_has_columns(pair: tuple[Layout, Layout]) -> None:
    assert reshard(*pair).forms.translated == ("kv.k",)
    k, v = bound(*pair).parts
    assert k.pieces.is_translated
    assert set(k.pieces.lengths) == {4}
    assert k.pieces.num_pieces == TOKENS * 4 * 8
    assert not v.pieces.is_translated


def test_translated_elements_are_never_described_one_by_one() -> None:
    shape = shape_of(bound(ROWS, COLUMNS))
    assert shape.is_translated
    assert set(choose(shape, PRESETS["nixl-host"]).seconds) == {TransferMode.STAGED}
    with pytest.raises(InputError, match="the mode slices is not open here; use one of staged"):
        choose(shape, PRESETS["nixl-host"], TransferMode.SLICES)
    assert choose(shape, PRESETS["shm"]).mode is TransferMode.SLICES


def test_forms_that_a_cache_can_not_have_are_refused() -> None:
    with pytest.raises(InputError, match=r"no tensor 'kv\.x' in this cache; it has kv\.k, kv\.v"):
        replace(ROWS, transposed=("kv.x",))
    with pytest.raises(InputError, match="no group 'other' in this cache"):
        replace(ROWS, packed=("other",))
    with pytest.raises(InputError, match=r"kv\.k can't be transposed"):
        replace(PACKED, transposed=("kv.k",))
    parts = Tensor.composite("t", Part("a", DType.FLOAT32, 1), Part("b", DType.BFLOAT16, 2))
    composite = CacheSpec(1, (Group("g", SPEC.groups[0].kind, (0,), 1, (parts,)),))
    with pytest.raises(InputError, match=r"g\.t can't be transposed"):
        Layout(composite, transposed=("g.t",))
    state = CacheSpec(1, (Group("g", StateRow(), (0,), 1, (Tensor("t", DType.UINT8, 8),)),))
    with pytest.raises(InputError, match=r"g\.t can't be transposed"):
        Layout(state, transposed=("g.t",))


def test_placements_must_have_the_layouts_form() -> None:
    for layout in (ROWS, PACKED, COLUMNS):
        assert pools_problem(layout, 0, contiguous_pools(layout, 0, 4).map) is None
    columns, rows = contiguous_pools(COLUMNS, 0, 4).map, contiguous_pools(ROWS, 0, 4).map
    differ = "the placement and the layout of kv.k differ in order"
    assert pools_problem(ROWS, 0, columns) == differ
    assert pools_problem(COLUMNS, 0, rows) == differ
    apart = "the tensors of group 'kv' are packed, but lie apart"
    assert pools_problem(PACKED, 0, rows) == apart


def test_arrays_of_transposed_tensors() -> None:
    layers = [np.zeros((5, 4, 2 * 4, 8), np.float32) for _ in range(2)]
    k = [layer[:, :, :4].reshape(5, 4, 8, 4).swapaxes(2, 3) for layer in layers]
    v = [layer[:, :, 4:] for layer in layers]
    placed = Memory.of(COLUMNS, 0, {"kv": {"k": k, "v": v}}).map.of("kv", "k")
    assert (placed.token_stride, placed.element_stride) == (4, 16)
    flat = [layer.reshape(5, 4, 4, 2, 4) for layer in v]
    with pytest.raises(InputError, match="its last axis must have the 8 elements of float32"):
        Memory.of(COLUMNS, 0, {"kv": {"k": flat, "v": v}})
