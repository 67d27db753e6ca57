"""Threads of an endpoint that fail or hang: what happens to rooms, memory and the liveness port."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, NamedTuple

import pytest
from endpoint.fleets import QUICK, eventually, layout, view_of
from endpoint.jobs import scatter
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.copy_thread import CopyThread
from kvferry.endpoint.liveness.port import Liveness, probe
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.endpoint.transport_thread import ThreadFailed
from kvferry.errors import Misuse
from kvferry.ids import Op
from kvferry.layout.spec import attention
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.pools import Memory
from kvferry.plan.bind import Binding
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.transports.base import RemoteMemory, TransportSetup, WriteEnded
from kvferry.transports.mailbox import Mailbox
from kvferry.transports.shm import ShmTransport

LAYOUT = layout(attention(layers=1, kv_heads=2, head_dim=8), 4)
WAIT_S = 15.0
ALERT = replace(QUICK, stalled_s=0.2)


class Faulty(ShmTransport):
    """Shared memory whose writes first call a function of the test."""

    name: ClassVar[str] = "shm"
    # The transport thread must make the writes.
    supports_write_now: ClassVar[bool] = False

    def __init__(self, setup: TransportSetup, on_write: Callable[[], None]) -> None:
        super().__init__(setup)
        self.on_write = on_write
        self.on_poll: Callable[[], None] = lambda: None

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        self.on_write()
        super().write(remote, op, pieces)

    def poll(self) -> list[WriteEnded]:
        self.on_poll()
        return super().poll()


class Pair(NamedTuple):
    source: SourceEndpoint
    target: TargetEndpoint
    view: InstanceView
    registry: CollectorRegistry


@contextlib.contextmanager
def pair_of(on_write: Callable[[], None], config: EndpointConfig) -> Iterator[Pair]:
    setups = [
        TransportSetup(agent=f"faulty-{n}-{id(on_write)}", copy=copy_binding) for n in range(2)
    ]
    ours, theirs = Faulty(setups[0], on_write), ShmTransport(setups[1])
    memories = [Memory.allocate(LAYOUT, 0, 8, each.allocate) for each in (ours, theirs)]
    registry = CollectorRegistry()
    with (
        SourceEndpoint(
            LAYOUT,
            memories[0],
            name="p",
            model="m",
            transport=ours,
            config=config,
            registry=registry,
        ) as source,
        TargetEndpoint(
            LAYOUT, memories[1], name="d", model="m", transport=theirs, config=config
        ) as target,
    ):
        yield Pair(source, target, view_of(source.record), registry)


def wait_for(event: threading.Event) -> None:
    event.wait(WAIT_S)


def raise_a_bug() -> None:
    raise ZeroDivisionError("a bug in a transport")


def test_a_failed_transport_thread_fails_the_rooms_with_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair_of(raise_a_bug, EndpointConfig(protocol=QUICK)) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=4, pages=[0])
        out = pair.source.open("r")
        out.push((0, 4), [0])
        ended = out.wait(WAIT_S), into.wait(WAIT_S)
        assert [end.code for end in ended if isinstance(end, Failure)] == [FailureCode.INTERNAL] * 2
        assert "a bug in a transport" in str(ended[0])
        assert "transport thread" in str(ended[1])
        with pytest.raises(Misuse, match="a bug in a transport"):
            pair.source.open("another")
        assert pair.source.stats.broken == {"transport": 1}
        labels = {"endpoint": "p/0", "transport": "shm", "thread": "transport"}
        assert pair.registry.get_sample_value("kvferry_broken_threads_total", labels) == 1
        # The fate of the write is unknown, so its memory is not released.
        assert not out.released
        assert not pair.source.close(0.1)
        # A closed liveness port would prove to peers that the write is over.
        assert (
            probe(pair.source.liveness_port, pair.source.record.incarnation, 0.2)
            is Liveness.UNKNOWN
        )
    assert "thread-broken" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_failed_copy_thread_is_reported() -> None:
    told: Mailbox[object] = Mailbox()
    copier = CopyThread("copier", told.put, lambda _: None)

    def bind() -> Binding:
        raise ZeroDivisionError

    copier.submit(scatter(1, bind))
    failed = told.get(WAIT_S)
    assert isinstance(failed, ThreadFailed)
    assert failed.thread == "copy"
    copier.close()


def test_a_stalled_transport_thread_is_reported_and_named_in_the_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    go_on = threading.Event()
    config = EndpointConfig(protocol=ALERT, deadline_s=3.0)
    with pair_of(partial(wait_for, go_on), config) as pair:
        pair.target.receive("r", prefill=pair.view, tokens=4, pages=[0])
        out = pair.source.open("r")
        out.push((0, 4), [0])
        ended = out.wait(WAIT_S)
        assert isinstance(ended, Failure)
        assert ended.code is FailureCode.DEADLINE
        assert "stalled here: the transport thread" in ended.message
        assert pair.source.stats.stalled["transport"] > 0.2
        go_on.set()
        eventually(lambda: pair.source.stats.stalled["transport"] == 0)
        out.wait_released(WAIT_S)
    assert "thread-stalled endpoint=p/0 thread=transport" in caplog.text
    assert "thread-recovered endpoint=p/0 thread=transport" in caplog.text


def test_rooms_of_a_stalled_loop_fail_at_their_deadline() -> None:
    go_on = threading.Event()
    config = EndpointConfig(protocol=ALERT, deadline_s=2.0)
    with pair_of(lambda: None, config) as pair:
        stuck = pair.source.open("stuck")
        other = pair.source.open("other")
        # An engine's callback runs on the loop thread and must not wait.
        stuck.on_release(partial(wait_for, go_on))
        stuck.abort()
        ended = other.wait(WAIT_S)
        assert isinstance(ended, Failure)
        assert ended.code is FailureCode.INTERNAL
        assert "the loop thread of p/0 has stalled" in ended.message
        go_on.set()
