"""Tests that nothing overflows 64 bits, and that no request takes minutes or gigabytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import msgspec
import pytest
from moving import plan_of

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import (
    PRESETS,
    Base,
    PagedView,
    PageTable,
    Placement,
    PoolMap,
    RankPair,
    Request,
    StagingView,
    bind,
    contiguous_pools,
    estimate,
    reshard,
)
from kvferry.plan.plan import MAX_TOKENS

SPEC = attention(layers=2, kv_heads=2, head_dim=4)
HUGE = attention(layers=2, kv_heads=65536, head_dim=1 << 24)


def test_request_size_is_limited() -> None:
    assert Request(MAX_TOKENS).num_tokens == MAX_TOKENS
    for wrong in (MAX_TOKENS + 1, 1 << 70, -1):
        with pytest.raises(InputError, match="tokens"):
            Request(wrong)


def placement(**changes: object) -> Placement:
    values: dict[str, object] = {
        "group": "kv",
        "tensor": "k",
        "page_stride": 1024,
        "token_stride": 64,
        "unit_stride": 8,
        "num_pages": 10,
        "bases": (Base(0, 0, 0),),
    }
    return Placement(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_stride": -1}, "negative"),
        ({"token_stride": -64}, "negative"),
        ({"unit_stride": -8}, "negative"),
        ({"num_pages": -1}, "negative"),
        ({"bases": (Base(0, 0, -1),)}, "negative"),
        ({"bases": (Base(0, -1, 0),)}, "negative"),
        ({"num_pages": 1 << 52}, "smaller pages"),
        ({"page_stride": 1 << 60}, "smaller pages"),
        ({"token_stride": 1 << 42}, "smaller pages"),
        ({"unit_stride": 1 << 46}, "smaller pages"),
        ({"bases": (Base(0, 0, 0), Base(1, 0, 1 << 62))}, "smaller pages"),
        ({"bases": (Base(0, 1 << 62, 0),)}, "smaller pages"),
        ({"num_pages": 1 << 62, "page_stride": 0}, "smaller pages"),
    ],
)
def test_placement_whose_offsets_could_overflow_is_refused(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        placement(**changes)


def test_placement_from_the_wire_is_checked() -> None:
    good = msgspec.json.encode(placement())
    assert msgspec.json.decode(good, type=Placement) == placement()
    with pytest.raises(msgspec.ValidationError, match="negative"):
        msgspec.json.decode(good.replace(b"1024", b"-1024"), type=Placement)


@pytest.mark.parametrize("pages", [[1 << 63], [-(1 << 64)], ["x"], [[1], [1, 2]]])
def test_page_numbers_fit_64_bits(pages: list[object]) -> None:
    with pytest.raises(InputError, match="page numbers"):
        PageTable(pages)  # type: ignore[arg-type]


def test_pool_that_is_too_large_is_refused() -> None:
    with pytest.raises(InputError, match="smaller pages"):
        contiguous_pools(Layout(HUGE), 0, num_pages=1 << 20)


def test_staged_move_that_is_too_large_is_refused() -> None:
    plan = plan_of(HUGE, Parallel(), Parallel())
    side = PagedView(contiguous_pools(plan.source, 0, 1 << 10).map, {"kv": PageTable([0])})
    with pytest.raises(InputError, match="fewer"):
        bind(plan, RankPair(0, 0), Request(MAX_TOKENS), StagingView(), side)


def test_move_whose_bytes_would_overflow_is_refused() -> None:
    """Strides of 0 put every page in one place: offsets are small, but not the sum of bytes."""
    plan = plan_of(HUGE, Parallel(), Parallel())
    flat = PoolMap(
        tuple(
            Placement("kv", tensor, 0, 0, 0, 1 << 20, (Base(0, 0, 0), Base(1, 0, 0)))
            for tensor in ("k", "v")
        )
    )
    side = PagedView(flat, {"kv": PageTable(range(1 << 17))})
    assert bind(plan, RankPair(0, 0), Request(16), side, side).num_bytes == 16 << 43
    with pytest.raises(InputError, match="fewer tokens"):
        bind(plan, RankPair(0, 0), Request(1 << 21), side, side)


def test_payloads_beyond_64_bits_are_exact() -> None:
    spec = attention(layers=4096, kv_heads=65536, head_dim=1 << 24)
    plan = reshard(Layout(spec), Layout(spec))
    exact = 4096 * 65536 * (1 << 24) * 2 * 2 * MAX_TOKENS
    assert plan.payload_bytes(Request(MAX_TOKENS)) == exact > 1 << 64


# ---------------------------------------------------------------- limits on work


@pytest.mark.parametrize(
    ("request_", "page"),
    [(Request(1_000_000_000), 1), (Request(MAX_TOKENS), 16), (Request(MAX_TOKENS, 1), 8)],
)
def test_estimate_over_too_many_pages_is_refused(request_: Request, page: int) -> None:
    plan = reshard(Layout(SPEC), Layout(SPEC, page_tokens=page))
    with pytest.raises(InputError, match="larger page or fewer tokens"):
        estimate(plan, request_, PRESETS["nixl-host"])


def test_estimate_of_a_nearly_cached_request_visits_few_pages() -> None:
    plan = reshard(Layout(SPEC, page_tokens=1), Layout(SPEC, page_tokens=1))
    costs = estimate(plan, Request(MAX_TOKENS, MAX_TOKENS - 5), PRESETS["nixl-host"])
    assert costs.num_bytes == 5 * SPEC.payload_bytes(1)


def test_token_classes_have_a_limit() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1)

    def sides(ours: int, theirs: int) -> tuple[Layout, Layout]:
        return Layout(spec, Parallel(cp=ours)), Layout(spec, Parallel(cp=theirs))

    assert len(reshard(*sides(32, 31)).moves) == 32 * 31
    with pytest.raises(Refused) as caught:
        reshard(*sides(33, 32))
    assert [reason.code for reason in caught.value.reasons] == [ReasonCode.TOO_LARGE]


def counted(work: Callable[[], object]) -> int:
    """Number of times that all shards of a side were computed."""
    calls = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is Layout.shards.__code__

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_estimate_computes_the_shards_of_each_side_once() -> None:
    spec = attention(layers=8, kv_heads=64, head_dim=1)
    plan = reshard(Layout(spec, Parallel(tp=64, pp=8)), Layout(spec, Parallel(tp=32, pp=4)))
    work = lambda: estimate(plan, Request(64), PRESETS["nixl-host"])  # noqa: E731
    assert counted(work) == 2
    assert counted(lambda: contiguous_pools(plan.source, 3, 4)) == 0
