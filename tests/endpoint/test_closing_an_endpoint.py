"""Closing an endpoint: rooms fail, memory is free, a second close does nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvferry import Memory, SourceEndpoint, TargetEndpoint, make_transport
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.errors import InputError, Misuse
from kvferry.layout import Layout, attention
from kvferry.protocol.outcome import Failure, FailureCode

LAYOUT = Layout(attention(layers=2, kv_heads=2, head_dim=8), page_tokens=4)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return logged errors. Warnings do not count: a busy machine causes some."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def code(outcome: object) -> FailureCode | None:
    return outcome.code if isinstance(outcome, Failure) else None


@pytest.mark.parametrize("transport", ["shm", "nixl", "mooncake"])
def test_closing_a_target_that_waits_for_its_instance(
    url: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    means = make_transport(transport)
    memory = Memory.allocate(LAYOUT, 0, 8, means.allocate)
    target = TargetEndpoint(LAYOUT, memory, name="d", model="m", transport=means, discovery=url)
    room = target.receive("x", prefill="nobody", tokens=4, pages=[1])
    assert target.close()
    assert code(room.outcome) is FailureCode.ABORTED
    assert room.released
    assert target.close()
    assert not errors_in(caplog)
    with pytest.raises(Misuse, match="closing"):
        target.receive("y", prefill="nobody", tokens=4, pages=[1])


@pytest.mark.parametrize("name", ["", "no body", "\ud800", "x" * 257])
def test_impossible_instance_names_are_refused(url: str, name: str) -> None:
    means = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 8, means.allocate)
    target = TargetEndpoint(LAYOUT, memory, name="d", model="m", transport=means, discovery=url)
    with pytest.raises(InputError, match="is not a valid instance name; use 1 to 256 letters"):
        target.receive("x", prefill=name, tokens=4, pages=[1])
    assert target.close()


@pytest.mark.parametrize("transport", ["shm", "nixl", "mooncake"])
def test_closing_a_source_without_a_target(
    url: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    means = make_transport(transport)
    memory = Memory.allocate(LAYOUT, 0, 8, means.allocate)
    source = SourceEndpoint(LAYOUT, memory, name="p", model="m", transport=means, discovery=url)
    room = source.open("x")
    room.push((0, 4), [0])
    assert source.close()
    assert code(room.outcome) is FailureCode.ABORTED
    assert room.released
    assert source.close()
    assert not errors_in(caplog)
