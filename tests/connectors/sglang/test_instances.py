"""Instances at a bootstrap address: replicas by rank, and other engines."""

from __future__ import annotations

import pytest

from kvferry import InputError
from kvferry.connectors.sglang.instances import Replica, instances_at


def test_replicas_are_ordered_by_rank() -> None:
    names = [str(Replica("10.0.0.1:8998", rank, 2)) for rank in (1, 0)]
    info = instances_at("prefill:8998", names)
    assert info.names == ("sglang/10.0.0.1:8998/dp0of2", "sglang/10.0.0.1:8998/dp1of2")
    assert info.dp_size == 2
    assert Replica.parse(info.names[1]) == Replica("10.0.0.1:8998", 1, 2)


def test_missing_replicas_are_named() -> None:
    assert instances_at("a", [str(Replica("a", 1, 3))]).dp_size == 3


def test_a_single_instance_of_another_engine_is_used() -> None:
    assert instances_at("a", ["prefill-0"]).names == ("prefill-0",)
    assert instances_at("a", ["decode-0", "sglang/a/dp0of1"]).names == ("sglang/a/dp0of1",)


@pytest.mark.parametrize("names", [[], ["p", "q"], ["sglang/a/dp0of1", "sglang/b/dp0of1"]])
def test_an_ambiguous_address_is_rejected(names: list[str]) -> None:
    with pytest.raises(InputError, match="one SGLang prefill server, or one other instance"):
        instances_at("here", names)
