"""Tests that oversized explicit shardings are checked or refused quickly."""

from __future__ import annotations

import pytest

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout import ExplicitSharding, Layout, Parallel, Shard, Span, attention
from kvferry.layout.layout import MAX_REASONS, MAX_SHARDS
from kvferry.plan import reshard

SPEC = attention(layers=4096, kv_heads=1, head_dim=1)


def rows(count: int, layers: int) -> tuple[Shard, ...]:
    return tuple(Shard("kv", Span(n % layers, n % layers + 1), Span(0, 1)) for n in range(count))


def test_many_shards_of_one_rank_are_checked_quickly() -> None:
    # In pairs this would be two thousand million comparisons.
    with pytest.raises(Refused) as caught:
        Layout(SPEC, ExplicitSharding((rows(MAX_SHARDS, 4096),)))
    assert len(caught.value.reasons) == MAX_REASONS
    assert {reason.code for reason in caught.value.reasons} == {ReasonCode.OVERLAP}
    assert Layout(SPEC, ExplicitSharding((rows(4096, 4096),))).num_ranks == 1


def test_too_many_shards_are_refused() -> None:
    with pytest.raises(InputError, match="join neighbouring layers"):
        ExplicitSharding((rows(MAX_SHARDS + 1, 4096),))


def test_plan_of_too_many_cells_is_refused() -> None:
    spec = attention(layers=512, kv_heads=512, head_dim=1)
    with pytest.raises(Refused) as caught:
        reshard(Layout(spec, Parallel(pp=512)), Layout(spec, Parallel(tp=512)))
    assert [reason.code for reason in caught.value.reasons] == [ReasonCode.TOO_LARGE]
