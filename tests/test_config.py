"""Validation of the timeouts and limits."""

from __future__ import annotations

from math import inf, nan

import pytest
from msgspec.structs import replace

from kvferry.config import LivenessConfig, ProtocolConfig
from kvferry.errors import InputError


@pytest.mark.parametrize(
    "name",
    sorted(
        {*ProtocolConfig.__struct_fields__} - {"early_gather_slots", "proof_rooms", "proof_share"}
    ),
)
@pytest.mark.parametrize("value", [0, -1])
def test_every_value_must_be_above_zero(name: str, value: int) -> None:
    with pytest.raises(InputError, match=name):
        replace(ProtocolConfig(), **{name: value})


@pytest.mark.parametrize("name", ["proof_rooms", "proof_share"])
def test_parts_are_from_zero_to_one(name: str) -> None:
    for value in (0.0, 0.5, 1.0):
        replace(ProtocolConfig(), **{name: value})
    for value in (-0.1, 1.1, nan):
        with pytest.raises(InputError, match=name):
            replace(ProtocolConfig(), **{name: value})


def test_early_gather_slots_may_be_zero() -> None:
    assert ProtocolConfig(early_gather_slots=0).early_gather_slots == 0
    with pytest.raises(InputError, match="early_gather_slots"):
        ProtocolConfig(early_gather_slots=-1)


@pytest.mark.parametrize("name", LivenessConfig.__struct_fields__)
@pytest.mark.parametrize("value", [inf, nan])
def test_a_liveness_timeout_is_finite(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} must be above 0 and finite"):
        LivenessConfig(**{name: value})


def test_silence_covers_a_lost_heartbeat() -> None:
    assert ProtocolConfig(heartbeat_s=1.0, silence_s=2.0).silence_s == 2.0
    with pytest.raises(InputError, match="heartbeat"):
        ProtocolConfig(heartbeat_s=1.0, silence_s=1.9)


def test_it_is_frozen_and_keyword_only() -> None:
    config = ProtocolConfig()
    with pytest.raises(AttributeError):
        config.heartbeat_s = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ProtocolConfig(1.0)  # type: ignore[call-arg]
