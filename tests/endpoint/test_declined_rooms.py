"""Rooms that decode aborts or declines: prefill releases their pages at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from endpoint.fleets import eventually
from prometheus_client import CollectorRegistry

from kvferry import (
    Done,
    EndpointConfig,
    Failure,
    FailureCode,
    Layout,
    Memory,
    ProtocolConfig,
    attention,
)
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.errors import InputError, Misuse
from kvferry.layout.layout import Parallel
from kvferry.memory.copy.cpu import copy_binding
from kvferry.telemetry.metrics import AGES
from kvferry.transports.base import TransportSetup
from kvferry.transports.shm import ShmTransport

SPEC = attention(layers=2, kv_heads=4, head_dim=8)
PREFILL, DECODE = (Layout(SPEC, Parallel(tp=tp), page_tokens=4) for tp in (2, 1))
NUM_PAGES = 16
WAIT_S = 15.0
NUMBERS = itertools.count()


class Trio(NamedTuple):
    """Two ranks of a prefill instance, and a decode rank that needs both."""

    sources: list[SourceEndpoint]
    target: TargetEndpoint
    registry: CollectorRegistry

    def kept(self) -> dict[str, int]:
        """Return how many rooms and declines each endpoint still has, without zeros."""
        machine = self.target._loop.runner.machine
        found = {"target": len(machine.rooms), "declines": len(machine.declines.waiting)}
        for rank, source in enumerate(self.sources):
            found[f"source {rank}"] = len(source._loop.runner.machine.rooms)
        return {name: count for name, count in found.items() if count}


@pytest.fixture
def make_trio() -> Iterator[Callable[[ProtocolConfig], Trio]]:
    with ExitStack() as undo:
        server = undo.enter_context(DiscoveryServer())
        registry = CollectorRegistry()

        def made(
            protocol: ProtocolConfig, kind: Any, layout: Layout, name: str, rank: int = 0
        ) -> Any:
            transport = ShmTransport(
                TransportSetup(agent=f"{name}-{next(NUMBERS)}", copy=copy_binding)
            )
            memory = Memory.allocate(layout, rank, NUM_PAGES, transport.allocate)
            config = EndpointConfig(protocol=protocol)
            common = {"model": "m", "discovery": server.url, "registry": registry}
            endpoint = kind(
                layout, memory, name=name, rank=rank, transport=transport, config=config, **common
            )
            return undo.enter_context(endpoint)

        def make(protocol: ProtocolConfig) -> Trio:
            sources = [made(protocol, SourceEndpoint, PREFILL, "p", rank) for rank in range(2)]
            return Trio(sources, made(protocol, TargetEndpoint, DECODE, "d"), registry)

        yield make


@pytest.fixture
def trio(make_trio: Callable[[ProtocolConfig], Trio]) -> Trio:
    return make_trio(ProtocolConfig())


def test_a_room_received_again_after_an_abort_leaves_nothing(trio: Trio) -> None:
    """Receiving a room twice is an error of the engine, but must not leak."""
    outs = [source.open("r") for source in trio.sources]
    into = trio.target.receive("r", prefill="p", tokens=8, pages=[0, 1])
    for out in outs:
        out.push((0, 4), [0])
    into.abort()
    into.wait_released(WAIT_S)
    for out in outs:
        out.wait_released(WAIT_S)
    eventually(lambda: trio.kept() == {})
    again = trio.target.receive("r", prefill="p", tokens=8, prefix=8, pages=[0, 1])
    again.abort()
    again.wait_released(WAIT_S)
    eventually(lambda: not trio.target._loop.runner.machine.rooms)


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_declined_room_is_released_at_once(trio: Trio, opened: str) -> None:
    if opened == "after":
        trio.target.decline("r", prefill="p")
        eventually(lambda: len(trio.kept()) == 2)  # both sources
    outs = [source.open("r") for source in trio.sources]
    for out in outs:
        out.push((0, 8), [0, 1])
        out.close()
    if opened == "before":
        trio.target.decline("r", prefill="p")
    for out in outs:
        failure = out.wait(WAIT_S)
        assert isinstance(failure, Failure)
        assert failure.code is FailureCode.ABORTED
        out.wait_released(WAIT_S)
    eventually(lambda: trio.kept() == {})


def test_an_abort_reaches_an_instance_that_is_found_later(trio: Trio) -> None:
    """The engine aborts before the discovery service has answered."""
    outs = [source.open("r") for source in trio.sources]
    trio.target.receive("r", prefill="p", tokens=8, pages=[0, 1]).abort()
    for out in outs:
        out.wait_released(WAIT_S)
    eventually(lambda: trio.kept() == {})


@pytest.mark.parametrize("limit", [{"max_rooms": 1}, {"max_tokens": 15}])
def test_a_full_target_refuses_a_room_before_prefill_has_computed(
    limit: dict[str, int], make_trio: Callable[[ProtocolConfig], Trio]
) -> None:
    trio = make_trio(ProtocolConfig(**limit))
    first = trio.target.receive("first", prefill="p", tokens=8, pages=[0, 1])
    outs = [source.open("second") for source in trio.sources]
    second = trio.target.receive("second", prefill="p", tokens=8, pages=[2, 3])
    for handle in (second, *outs):
        failure = handle.wait(WAIT_S)
        assert isinstance(failure, Failure)
        assert failure.code is FailureCode.TOO_MANY_ROOMS
        handle.wait_released(WAIT_S)
    for source in trio.sources:
        out = source.open("first")
        out.push((0, 8), [0, 1])
        out.close()
    assert isinstance(first.wait(WAIT_S), Done)
    eventually(lambda: trio.kept() == {})


def test_gauges_say_what_rooms_wait_for(trio: Trio) -> None:
    def waiting(endpoint: Any, side: str, reason: str) -> float:
        labels = {"endpoint": str(endpoint._setup.me), "transport": "shm", "side": side}
        name, more = "kvferry_waiting_rooms", {"reason": reason}
        return float(trio.registry.get_sample_value(name, labels | more) or 0.0)

    def tokens() -> float:
        labels = {"endpoint": "d/0", "transport": "shm", "side": "target"}
        name, ages = "kvferry_pinned_tokens", [{"age": age} for _, age in AGES]
        return sum(trio.registry.get_sample_value(name, labels | one) or 0.0 for one in ages)

    source = trio.sources[0]
    outs = [each.open("r") for each in trio.sources]
    eventually(lambda: waiting(source, "source", "offer") == 1)
    lost = trio.target.receive("lost", prefill="nobody", tokens=4, pages=[2])
    into = trio.target.receive("r", prefill="p", tokens=8, prefix=2, pages=[0, 1])
    eventually(lambda: waiting(trio.target, "target", "instance") == 1)
    eventually(lambda: waiting(trio.target, "target", "push") == 1)
    eventually(lambda: waiting(source, "source", "push") == 1)
    assert tokens() == 4 + 8 - 2
    into.abort()
    lost.abort()
    for handle in (*outs, into, lost):
        handle.wait_released(WAIT_S)
    eventually(lambda: waiting(trio.target, "target", "push") == 0)
    eventually(lambda: tokens() == 0)


def test_an_open_room_cannot_be_declined(trio: Trio) -> None:
    into = trio.target.receive("r", prefill="p", tokens=4, pages=[0])
    with pytest.raises(Misuse, match="abort its handle"):
        trio.target.decline("r", prefill="p")
    with pytest.raises(InputError, match="instance"):
        trio.target.decline("s", prefill=7)  # type: ignore[arg-type]
    for source in trio.sources:
        out = source.open("r")
        out.push((0, 4), [0])
        out.close()
    assert isinstance(into.wait(WAIT_S), Done)


def test_thousands_of_aborts_leave_nothing(trio: Trio) -> None:
    """5,000 requests whose clients disconnect, in every state of a room."""
    handles: list[Any] = [trio.target.receive("first", prefill="p", tokens=4, pages=[0])]
    for source in trio.sources:
        handles.append(source.open("first"))
        handles[-1].push((0, 4), [0])
        handles[-1].close()
    handles[0].wait(WAIT_S)
    for number in range(5000):
        room = f"r{number}"
        state = number % 5
        if state:
            outs = [source.open(room) for source in trio.sources]
            handles += outs
        if state == 4:
            trio.target.decline(room, prefill="p")
        else:
            into = trio.target.receive(room, prefill="p", tokens=8, pages=[0, 1])
            handles.append(into)
            if state >= 2:
                for out in outs:
                    out.push((0, 4), [0])
            if state == 3:
                for out in outs:
                    out.push((4, 8), [1])
                    out.close()
            into.abort()
        if not state:
            handles += [source.open(room) for source in trio.sources]
    last = time.monotonic()
    for handle in handles:
        handle.wait_released(WAIT_S)
    eventually(lambda: trio.kept() == {})
    # It takes a second on an idle machine.
    assert time.monotonic() - last < WAIT_S
