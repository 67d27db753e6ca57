"""Tests of layouts: ownership, refusals, and encoding as a message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError, Reason, ReasonCode, Refused
from kvferry.layout import (
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    Part,
    Pattern,
    Shard,
    Span,
    StateRow,
    Tensor,
    Tokens,
    Window,
    attention,
    mismatches,
)
from kvferry.layout.layout import MAX_RANKS, find_shard
from kvferry.testing.strategies import layouts, specs

SPEC = attention(layers=10, kv_heads=4, head_dim=8)


def codes(reasons: tuple[Reason, ...]) -> list[ReasonCode]:
    assert all(reason.message for reason in reasons)
    return [reason.code for reason in reasons]


def refused(spec: CacheSpec, sharding: Parallel | ExplicitSharding) -> list[ReasonCode]:
    with pytest.raises(Refused) as caught:
        Layout(spec, sharding)
    return codes(caught.value.reasons)


# ---------------------------------------------------------------- ownership


def test_rank_order_is_pipeline_then_context_then_tensor() -> None:
    layout = Layout(SPEC, Parallel(tp=2, pp=2, cp=3))
    held = layout.shards()
    assert layout.num_ranks == 12
    assert held[(1 * 3 + 2) * 2 + 1] == (
        Shard("kv", Span(5, 10), Span(2, 4), Tokens.interleaved(2, 3)),
    )


def test_more_ranks_than_heads_replicate_heads() -> None:
    units = [held[0].units for held in Layout(SPEC, Parallel(tp=8)).shards()]
    assert units == [Span(i // 2, i // 2 + 1) for i in range(8)]


def test_an_uneven_split_favours_the_first_stages() -> None:
    assert Parallel(pp=3).stage_spans(10) == (Span(0, 4), Span(4, 7), Span(7, 10))
    assert Parallel(pp=2, stages=(1, 9)).stage_spans(10) == (Span(0, 1), Span(1, 10))


def test_a_stage_without_layers_of_a_group_holds_nothing_of_it() -> None:
    group = Group("kv", Paged(), (0, 1), 2, (Tensor("k", DType.INT8, 1),))
    held = Layout(CacheSpec(4, (group,)), Parallel(pp=2)).shards()
    assert [len(shards) for shards in held] == [1, 0]


def test_find_shard_of_a_rank() -> None:
    held = Layout(SPEC, Parallel(tp=2, pp=2)).rank_shards(3)
    assert find_shard(held, "kv", 7).units == Span(2, 4)
    with pytest.raises(InputError, match="holds nothing"):
        find_shard(held, "kv", 2)


@given(st.data())
def test_shards_of_one_rank_agree_with_those_of_all(data: st.DataObject) -> None:
    layout = data.draw(specs().flatmap(layouts))
    assert layout.shards() == tuple(map(layout.rank_shards, range(layout.num_ranks)))


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match=r"has 0\.\.3"):
        Layout(SPEC, Parallel(tp=4)).rank_shards(rank)


# ---------------------------------------------------------------- transferred tokens


@pytest.mark.parametrize(
    ("kind", "tokens", "prefix", "owed"),
    [
        (Paged(), 10, 0, Span(0, 10)),
        (Paged(), 10, 3, Span(3, 10)),
        (Paged(), 10, 10, Span(10, 10)),
        (Paged(), 0, 0, Span(0, 0)),
        (Window(4), 10, 0, Span(6, 10)),
        (Window(4), 10, 8, Span(8, 10)),
        (Window(40), 10, 0, Span(0, 10)),
        (StateRow(), 10, 0, Span(9, 10)),
        (StateRow(), 10, 9, Span(9, 10)),
        (StateRow(), 10, 10, Span(10, 10)),
        (StateRow(), 0, 0, Span(0, 0)),
    ],
)
def test_owed_tokens_of_a_group(
    kind: Paged | Window | StateRow, tokens: int, prefix: int, owed: Span
) -> None:
    group = Group("g", kind, (0,), 1, (Tensor("t", DType.INT8, 1),))
    assert group.owed(tokens, prefix) == owed


def test_bytes_count_k_and_v_apart() -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=192, v_head_dim=128)
    assert [t.unit_bytes for t in spec.groups[0].tensors] == [384, 256]
    assert spec.payload_bytes(10) == 10 * 2 * 4 * (384 + 256)


# ---------------------------------------------------------------- refusals


def test_no_heads_no_layers_no_dims() -> None:
    for (layers, kv_heads, head_dim), code in (
        ((2, 0, 8), ReasonCode.NO_UNITS),
        ((0, 2, 8), ReasonCode.NO_LAYERS),
        ((2, 2, 0), ReasonCode.NO_UNITS),
        ((1 << 20, 2, 8), ReasonCode.TOO_LARGE),
        ((2, 1 << 20, 8), ReasonCode.TOO_LARGE),
        ((2, 2, (1 << 24) + 1), ReasonCode.TOO_LARGE),
    ):
        with pytest.raises(Refused) as caught:
            attention(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        assert codes(caught.value.reasons) == [code]


def test_sharding_that_does_not_fit_the_model() -> None:
    assert refused(SPEC, Parallel(tp=3)) == [ReasonCode.TP_UNITS]
    assert refused(SPEC, Parallel(tp=6)) == [ReasonCode.TP_UNITS]
    assert refused(SPEC, Parallel(pp=11)) == [ReasonCode.PP_LAYERS]
    assert refused(SPEC, Parallel(tp=3, pp=11)) == [ReasonCode.TP_UNITS, ReasonCode.PP_LAYERS]
    assert refused(SPEC, Parallel(pp=2, stages=(5, 6))) == [ReasonCode.STAGES]
    assert refused(SPEC, Parallel(pp=2, stages=(10, 0))) == [ReasonCode.STAGES]
    assert refused(SPEC, Parallel(stages=(5, 5))) == [ReasonCode.STAGES]


def stated(*shards: Shard) -> ExplicitSharding:
    return ExplicitSharding((shards,))


def test_stated_ownership_outside_the_model_or_in_conflict() -> None:
    everything = Shard("kv", Span(0, 10), Span(0, 4))
    assert Layout(SPEC, stated(everything)).num_ranks == 1
    assert refused(SPEC, stated(Shard("x", Span(0, 1), Span(0, 1)))) == [ReasonCode.OUTSIDE]
    assert refused(SPEC, stated(Shard("kv", Span(0, 11), Span(0, 4)))) == [ReasonCode.OUTSIDE]
    assert refused(SPEC, stated(Shard("kv", Span(0, 1), Span(0, 5)))) == [ReasonCode.OUTSIDE]
    assert refused(SPEC, stated(Shard("kv", Span(0, 1), Span(2, 2)))) == [ReasonCode.OUTSIDE]
    assert refused(SPEC, stated(everything, Shard("kv", Span(9, 10), Span(0, 4)))) == [
        ReasonCode.OVERLAP
    ]
    uneven = (Shard("kv", Span(0, 5), Span(0, 4)), Shard("kv", Span(5, 10), Span(0, 2)))
    assert refused(SPEC, stated(*uneven)) == [ReasonCode.NOT_PRODUCT]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Parallel(tp=0),
        lambda: Parallel(tp=MAX_RANKS, pp=2),
        lambda: Parallel(cp=1000),
        lambda: Layout(SPEC, page_tokens=0),
        lambda: Layout(SPEC, dp=0),
        lambda: ExplicitSharding(()),
        lambda: Window(0),
        lambda: Span(3, 2),
        lambda: Parallel(tp=4, dcp=3),
        lambda: Parallel(tp=2, dcp=2, interleave=1 << 21),
        lambda: Pattern(0, (Span(0, 1),)),
        lambda: Pattern(4, ()),
        lambda: Pattern(4, (Span(2, 3), Span(0, 1))),
        lambda: Pattern(4, (Span(2, 2),)),
        lambda: Pattern(4, (Span(0, 5),)),
        lambda: Tokens(1 << 63),
        lambda: Tokens(0, 1 << 63),
        lambda: Pattern(1 << 63),
        lambda: Group("g", Paged(), (1, 1), 1, (Tensor("t", DType.INT8, 1),)),
        lambda: Group("g", Paged(), (0,), 1, ()),
        lambda: CacheSpec(1, ()),
        lambda: CacheSpec(1, SPEC.groups),
        lambda: CacheSpec(10, SPEC.groups * 2),
        lambda: SPEC.group("nope"),
        lambda: DType.parse("float3"),
        lambda: Tokens().num_tokens,
    ],
)
def test_invalid_values_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert "['" not in str(caught.value)


def test_dtype_aliases() -> None:
    for text in ("bf16", "bfloat16", "torch.bfloat16", "BFLOAT16"):
        assert DType.parse(text) is DType.BFLOAT16
    assert DType.parse("fp8") is DType.FLOAT8_E4M3
    assert DType.parse("fp8_e5m2") is DType.FLOAT8_E5M2
    assert DType.parse("torch.float8_e5m2") is DType.FLOAT8_E5M2


def test_long_words_are_not_echoed_in_full() -> None:
    with pytest.raises(InputError) as caught:
        DType.parse("x" * 10_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(Refused) as refused:
        Layout(SPEC, Parallel(pp=2, stages=(1,) * 10_000))
    assert len(str(refused.value)) < 300


# ---------------------------------------------------------------- two sides


def test_every_mismatch_is_named() -> None:
    def one(**changes: object) -> CacheSpec:
        group = msgspec.structs.replace(SPEC.groups[0], **changes)
        return CacheSpec(10, (group,))

    tensors = SPEC.groups[0].tensors
    wide = (tensors[0], msgspec.structs.replace(tensors[1], elements=4))
    assert codes(mismatches(SPEC, SPEC)) == []
    assert codes(mismatches(SPEC, one(units=8))) == [ReasonCode.UNITS]
    assert codes(mismatches(SPEC, one(layers=(1, 2)))) == [ReasonCode.LAYERS]
    assert codes(mismatches(SPEC, one(kind=Window(4)))) == [ReasonCode.KIND]
    assert codes(mismatches(one(kind=Window(5)), one(kind=Window(4)))) == [ReasonCode.WINDOW]
    assert codes(mismatches(SPEC, one(tensors=tensors[:1]))) == [ReasonCode.TENSORS]
    assert codes(mismatches(SPEC, one(tensors=tensors[::-1]))) == [ReasonCode.TENSORS]
    assert codes(mismatches(SPEC, one(tensors=wide))) == [ReasonCode.HEAD_DIM]
    assert codes(mismatches(SPEC, one(name="other"))) == [ReasonCode.GROUPS]
    assert codes(mismatches(SPEC, attention(layers=9, kv_heads=4, head_dim=8))) == [
        ReasonCode.LAYERS,
        ReasonCode.LAYERS,
    ]


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize(
    "sharding",
    [Parallel(tp=2, pp=2, stages=(4, 6)), stated(Shard("kv", Span(0, 10), Span(0, 4)))],
)
def test_layout_survives_encoding(sharding: Parallel | ExplicitSharding) -> None:
    layout = Layout(SPEC, sharding, dp=3, page_tokens=64, order=Order.HND)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout


def test_invalid_layout_is_refused_by_the_decoder() -> None:
    good = msgspec.json.encode(Layout(SPEC, Parallel(tp=2)))
    bad = good.replace(b'"tp":2', b'"tp":3')
    assert bad != good
    with pytest.raises(msgspec.ValidationError, match="neither divides"):
        msgspec.json.decode(bad, type=Layout)


WINDOWED = CacheSpec(
    2,
    (
        Group("kv", Paged(), (0,), 1, (Tensor("k", DType.UINT8, 1),), 4),
        Group("swa", Window(9), (1,), 1, (Tensor("k", DType.UINT8, 1),)),
        Group("state", StateRow(), (1,), 1, (Tensor("s", DType.UINT8, 1),)),
    ),
)


def test_each_group_may_have_its_own_page_size() -> None:
    layout = Layout(WINDOWED, page_tokens=64, group_pages=(("swa", 6),))
    kv, swa, state = layout.spec.groups
    assert [layout.page_entries(group) for group in (kv, swa, state)] == [16, 6, 1]
    assert layout.smallest_page == 6
    assert repr(layout) == "<Layout TP1, page 64 (swa 6), NHD>"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout
    assert layout != Layout(WINDOWED, page_tokens=64)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ((("other", 4),), "no group 'other'"),
        ((("state", 4),), "a row per request"),
        ((("swa", 4), ("swa", 8)), "two page sizes"),
        ((("swa", 0),), "between 1 and"),
        ((("swa", (1 << 20) + 1),), "between 1 and"),
        ((("kv", 6),), "a page of 6 tokens does not hold whole entries of 4 tokens"),
    ],
)
def test_impossible_pages_of_a_group_are_refused(
    pages: tuple[tuple[str, int], ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        Layout(WINDOWED, page_tokens=64, group_pages=pages)


def test_layouts_print_well() -> None:
    layout = Layout(SPEC, Parallel(tp=2, pp=2, cp=2), dp=4, page_tokens=64, order=Order.HND)
    assert repr(layout) == "<Layout TP2·PP2·CP2 × 4 replicas, page 64, HND>"
    assert repr(Tokens(1, 9)) == "1:9"
    assert repr(Tokens.interleaved(1, 3, 4)) == "4:, 4 of 12"
    assert repr(Tokens.interleaved(1, 3)) == "1::3"


def test_entries_of_another_form_are_refused() -> None:
    packed = Tensor.composite(
        "c", Part("values", DType.FLOAT8_E4M3, 4), Part("s", DType.FLOAT32, 1)
    )
    sides = [
        CacheSpec(1, (Group("kv", Paged(), (0,), 1, (tensor,), ratio),))
        for tensor, ratio in ((packed, 1), (Tensor("c", DType.UINT8, 8), 1), (packed, 4))
    ]
    assert not mismatches(sides[0], sides[0])
    (parts,) = mismatches(sides[0], sides[1])
    assert "4 × float8_e4m3fn + 1 × float32 at prefill and 8 × uint8 at decode" in parts.message
    (ratio,) = mismatches(sides[0], sides[2])
    assert "an entry for 1 tokens at prefill and for 4 at decode" in ratio.message
    assert {parts.code, ratio.code} == {ReasonCode.ENTRY}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tensor("c", DType.UINT8, 9, (Part("values", DType.FLOAT8_E4M3, 4),)),
        lambda: Group("kv", Paged(), (0,), 1, (Tensor("c", DType.UINT8, 1),), 0),
        lambda: Group("s", StateRow(), (0,), 1, (Tensor("c", DType.UINT8, 1),), 4),
        lambda: Layout(
            CacheSpec(1, (Group("kv", Paged(), (0,), 1, (Tensor("c", DType.UINT8, 1),), 4),)),
            page_tokens=6,
        ),
    ],
)
def test_entries_that_do_not_add_up_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()


def test_turns_that_cut_an_entry_are_refused() -> None:
    spec = CacheSpec(1, (Group("kv", Paged(), (0,), 1, (Tensor("c", DType.UINT8, 1),), 4),))
    assert refused(spec, Parallel(cp=2, interleave=6)) == [ReasonCode.INTERLEAVE]
    assert Layout(spec, Parallel(cp=2, interleave=8)).num_ranks == 2
