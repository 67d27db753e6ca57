"""A restarted source under the same name, while its former incarnation still answers."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint.fleets import HEADS, QUICK, eventually, layout
from msgspec.structs import replace

from kvferry import (
    DiscoveryClient,
    EndpointConfig,
    InstanceView,
    Memory,
    SourceEndpoint,
    TargetEndpoint,
    make_transport,
)
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.protocol.outcome import Done

LAYOUT = layout(HEADS, 4)
WAIT_S = 15.0
# Long timers, so that heartbeats cannot reveal the restart.
CONFIG = EndpointConfig(protocol=replace(QUICK, heartbeat_s=60.0, silence_s=120.0))


def common(url: str | None) -> dict[str, Any]:
    means = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 8, means.allocate)
    return {"pools": memory, "transport": means, "discovery": url, "config": CONFIG}


def source_at(url: str) -> SourceEndpoint:
    return SourceEndpoint(LAYOUT, name="p", model="m", **common(url))


def target_at(url: str | None) -> TargetEndpoint:
    return TargetEndpoint(LAYOUT, name="d", model="m", **common(url))


def carry(
    source: SourceEndpoint, target: TargetEndpoint, room: str, prefill: str | InstanceView = "p"
) -> object:
    into = target.receive(room, prefill=prefill, tokens=4, pages=[1])
    out = source.open(room)
    out.push((0, 4), [0])
    out.close()
    outcome = into.wait(WAIT_S)
    into.wait_released(WAIT_S)
    out.wait_released(WAIT_S)
    return outcome


def is_linked(target: TargetEndpoint) -> bool:
    return any(link.state == "up" for link in target.view().result(WAIT_S).links)


@pytest.mark.timeout(90)
def test_the_next_room_goes_to_the_new_incarnation() -> None:
    with (
        DiscoveryServer() as discovery,
        target_at(discovery.url) as target,
        source_at(discovery.url) as before,
    ):
        assert isinstance(carry(before, target, "1"), Done)
        assert is_linked(target)
        with source_at(discovery.url) as after:
            eventually(lambda: not is_linked(target))
            assert isinstance(carry(after, target, "2"), Done)


@pytest.mark.timeout(90)
def test_a_view_from_the_engine_names_the_new_incarnation() -> None:
    """The target has no discovery, so only the engine's view tells it of the restart."""
    with (
        DiscoveryServer() as discovery,
        DiscoveryClient(discovery.url) as client,
        target_at(None) as target,
        source_at(discovery.url) as before,
    ):
        assert isinstance(carry(before, target, "1", client.resolve("p", WAIT_S)), Done)
        with source_at(discovery.url) as after:
            view = client.resolve("p", WAIT_S)
            assert view.ranks[0].incarnation == after.record.incarnation
            assert isinstance(carry(after, target, "2", view), Done)
