"""Tests of how many layers to push at a time, and of the reasons given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import InputError, LinkCost, layers_per_push
from kvferry.plan.cost import PRESETS

LINK = LinkCost(descriptor_s=1e-6, bytes_per_s=1e10, copy_bytes_per_s=1e12, maps_peer=True)


def layers(layer_ms: float, layer_mb: float, num_layers: int = 32) -> tuple[int, str]:
    found = layers_per_push(
        num_layers=num_layers,
        layer_s=layer_ms / 1e3,
        layer_bytes=int(layer_mb * 1e6),
        layer_pieces=1,
        link_cost=LINK,
    )
    assert found.left_s <= found.whole_s
    return found.layers, found.reason


def test_small_groups_if_computing_takes_longer_than_sending() -> None:
    few, reason = layers(layer_ms=5.0, layer_mb=10)
    assert 1 <= few <= 2
    assert "sending keeps up" in reason
    assert "instead of" in reason


def test_larger_groups_if_a_push_costs_more_than_a_layer() -> None:
    few, _ = layers(layer_ms=0.1, layer_mb=0.3)
    assert 4 <= few < 32


def test_some_overlap_where_sending_is_the_slower() -> None:
    few, reason = layers(layer_ms=5.0, layer_mb=100)
    assert few < 8
    assert "sending is slower" in reason


@pytest.mark.parametrize(
    ("layer_ms", "layer_mb", "why"),
    [
        (0.05, 0.01, "the whole chunk takes only|longer than computing it"),
        (0.001, 50, "little to hide it behind"),
        (0.5, 0.001, "little to win"),
    ],
)
def test_whole_chunks_if_groups_do_not_pay(layer_ms: float, layer_mb: float, why: str) -> None:
    few, reason = layers(layer_ms, layer_mb)
    assert few == 32
    assert any(part in reason for part in why.split("|")), reason


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 100),
    st.floats(0, 0.05),
    st.integers(0, 1 << 28),
    st.integers(0, 5000),
    st.sampled_from(sorted(PRESETS)),
)
def test_advice_is_never_predicted_to_be_slower(
    num_layers: int, layer_s: float, layer_bytes: int, pieces: int, link: str
) -> None:
    found = layers_per_push(
        num_layers=num_layers,
        layer_s=layer_s,
        layer_bytes=layer_bytes,
        layer_pieces=pieces,
        link_cost=PRESETS[link],
    )
    assert 1 <= found.layers <= num_layers
    assert found.left_s <= found.whole_s
    assert (found.layers == num_layers) == (found.left_s == found.whole_s)
    assert found.reason


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"layer_s": -1.0}, {"layer_bytes": -1}])
def test_invalid_arguments_are_refused(wrong: dict[str, int]) -> None:
    good: dict[str, Any] = {"num_layers": 1, "layer_s": 0.0, "layer_bytes": 1}
    with pytest.raises(InputError, match="or more"):
        layers_per_push(link_cost=LINK, **(good | wrong))
