"""Endpoints that find each other by a static list, without a service."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from endpoint.fleets import QUICK, eventually, layout
from numpy.typing import NDArray

from kvferry.discovery.base import Discovery
from kvferry.discovery.static import StaticDiscovery, StaticInstance
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.setup import make_transport
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.errors import InputError
from kvferry.layout import attention
from kvferry.memory.pools import Memory
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome

LAYOUT = layout(attention(layers=1, kv_heads=2, head_dim=8), 4)
CONFIG = EndpointConfig(protocol=QUICK, deadline_s=20.0, discovery_timeout_s=0.1)
WAIT_S = 15.0


class ListedRank(NamedTuple):
    """A list of one prefill rank, and the rank's port in it."""

    discovery: StaticDiscovery
    port: int


@pytest.fixture
def listed() -> ListedRank:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    one = StaticInstance(name="p", ranks=(f"127.0.0.1:{port}",), layout=LAYOUT)
    return ListedRank(StaticDiscovery([one]), port)


def source_at(port: int, discovery: str | Discovery, fill: int = 7) -> SourceEndpoint:
    transport = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 8, transport.allocate)
    assert isinstance(memory.owners, list)
    for array in memory.owners:
        array[:] = fill
    config = msgspec.structs.replace(CONFIG, port=port)
    return SourceEndpoint(
        LAYOUT,
        memory,
        name="p",
        model="m",
        transport=transport,
        discovery=discovery,
        config=config,
    )


@contextmanager
def target_with(
    discovery: str | Discovery,
    model: str = "m",
    idle_s: float = 60.0,
    discovery_timeout_s: float = 0.1,
) -> Iterator[tuple[TargetEndpoint, NDArray[np.uint8]]]:
    transport = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 8, transport.allocate)
    assert isinstance(memory.owners, list)
    protocol = msgspec.structs.replace(QUICK, idle_s=idle_s)
    with TargetEndpoint(
        LAYOUT,
        memory,
        name="d",
        model=model,
        transport=transport,
        discovery=discovery,
        config=msgspec.structs.replace(
            CONFIG, protocol=protocol, discovery_timeout_s=discovery_timeout_s
        ),
    ) as target:
        yield target, memory.owners[0].reshape(8, -1)


def carry(source: SourceEndpoint, target: TargetEndpoint, room: str) -> Outcome:
    into = target.receive(room, prefill="p", tokens=8, pages=[3, 1])
    out = source.open(room)
    out.push((0, 8), [0, 1])
    out.close(b"token")
    outcome = into.wait(WAIT_S)
    if isinstance(outcome, Failure):
        # The source may never have heard of the room.
        out.abort()
    for handle in (into, out):
        handle.wait_released(WAIT_S)
    return outcome


def test_a_transfer_between_listed_endpoints(listed: ListedRank) -> None:
    with (
        source_at(listed.port, listed.discovery) as source,
        target_with(listed.discovery) as (target, pages),
    ):
        assert carry(source, target, "one") == Done(b"token")
        assert (pages[[3, 1]] == 7).all()
        assert not pages[[0, 2, 4, 5, 6, 7]].any()
        assert carry(source, target, "two") == Done(b"token")


def test_an_idle_link_closes_and_opens_again(listed: ListedRank) -> None:
    with (
        source_at(listed.port, listed.discovery) as source,
        target_with(listed.discovery, idle_s=0.3) as (target, pages),
    ):
        for room in ("one", "two"):
            assert carry(source, target, room) == Done(b"token")
            for endpoint in (source, target):
                eventually(lambda each=endpoint: not each.view().result(WAIT_S).links)  # type: ignore[misc]
        assert (pages[[3, 1]] == 7).all()


def test_a_restarted_source_is_reached_again(listed: ListedRank) -> None:
    with target_with(listed.discovery) as (target, pages):
        with source_at(listed.port, listed.discovery) as first:
            assert carry(first, target, "before") == Done(b"token")
        with source_at(listed.port, listed.discovery, fill=9) as second:
            assert second.record.incarnation != first.record.incarnation
            # The first room may still use the link to the old process, and fail.
            outcomes = [carry(second, target, f"after-{number}") for number in range(3)]
        for outcome in outcomes[:-1]:
            assert isinstance(outcome, Done) or outcome.code in {
                FailureCode.PEER_GONE,
                FailureCode.PEER_SILENT,
                FailureCode.PEER_RESTARTED,
            }
        assert outcomes[-1] == Done(b"token")
        assert (pages[[3, 1]] == 9).all()


def test_a_source_at_another_address_is_refused(listed: ListedRank) -> None:
    before = set(threading.enumerate())
    with pytest.raises(InputError, match=f"p/0 listens on .* says tcp://127.0.0.1:{listed.port}"):
        source_at(0, listed.discovery)
    assert set(threading.enumerate()) <= before
    source_at(listed.port, listed.discovery).close()


def test_an_unlisted_instance_is_refused(listed: ListedRank) -> None:
    with target_with(listed.discovery) as (target, _):
        handle = target.receive("room", prefill="q", tokens=4, pages=[0])
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.UNREACHABLE
        assert "static list has no instance 'q', only p" in outcome.message


def test_a_rank_that_does_not_run_is_unreachable(listed: ListedRank) -> None:
    with target_with(listed.discovery) as (target, _):
        outcome = target.receive("room", prefill="p", tokens=4, pages=[0]).wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.UNREACHABLE


def test_another_model_is_refused_at_the_handshake(listed: ListedRank) -> None:
    with (
        source_at(listed.port, listed.discovery) as source,
        target_with(listed.discovery, model="another") as (target, _),
    ):
        outcome = target.receive("room", prefill="p", tokens=4, pages=[0]).wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.REFUSED
        assert source.record.fingerprint == "m"
