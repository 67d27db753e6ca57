"""Our own threads: what they wait with, and what is told when one of them fails us."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from typing import Any, ClassVar, NamedTuple

import pytest
import zmq
from endpoint.fleets import QUICK, eventually, layout
from endpoint.jobs import scatter
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.discovery.records import InstanceView, RankRecord, RankView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.copy_thread import CopyThread
from kvferry.endpoint.liveness.port import Liveness, probe
from kvferry.endpoint.loop.inbox import Inbox, new_pipe
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.endpoint.transport_thread import ThreadBroke
from kvferry.endpoint.watchdog import ThreadHeartbeat, WatchedThreads
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


# ---------------------------------------------------------------- waiting


class LateWriter(FileIO):
    """The sending end of an inbox, whose byte leaves after the owner has taken the call."""

    def before(self, drain: Callable[[], object]) -> None:
        self._drain = drain

    def write(self, signal: Any) -> int:
        self._drain()
        return super().write(signal)


def test_a_byte_that_comes_after_its_call_does_not_keep_the_owner_awake() -> None:
    reader, other = new_pipe()
    writer = LateWriter(os.dup(other.fileno()), "w")
    other.close()
    inbox: Inbox[str] = Inbox((reader, writer))
    taken: list[str] = []
    writer.before(lambda: taken.extend(inbox.drain()))
    inbox.put("a write has ended")
    assert len(taken) == 1
    assert inbox.rest()
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    inbox.rise(called=True)
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()


def test_a_short_wait_is_not_rounded_up_to_a_millisecond() -> None:
    inbox, context = Inbox[str](), zmq.Context()
    listening = context.socket(zmq.PULL)
    poller = Poller()
    poller.watch(inbox.fileno())
    poller.watch(listening)
    seconds = []
    for _ in range(200):
        begin = time.perf_counter()
        assert poller.wait(200e-6) == set()
        seconds.append(time.perf_counter() - begin)
    # The shortest of many: a busy machine only delays.
    assert 150e-6 < min(seconds) < 900e-6
    context.destroy(0)
    inbox.close()


@pytest.mark.parametrize("timeout_s", [5e-4, 5.0])
def test_whatever_is_readable_ends_a_wait(timeout_s: float) -> None:
    inbox, context = Inbox[str](), zmq.Context()
    listening, saying = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    saying.connect(f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}")
    poller = Poller()
    poller.watch(inbox.fileno())
    poller.watch(listening)
    saying.send(b"a")
    saying.send(b"b")
    eventually(lambda: poller.wait(timeout_s) == {listening})
    listening.recv()
    # The file of a ZeroMQ socket is quiet about what was there before.
    eventually(lambda: poller.wait(timeout_s) == {listening})
    listening.recv()
    inbox.put("news")
    assert poller.wait(timeout_s) == {inbox.fileno()}
    poller.unwatch(listening)
    context.destroy(0)
    inbox.close()


# ---------------------------------------------------------------- signs of life


class Desk(NamedTuple):
    """A thread's heartbeat, its work, and what was said of it."""

    heartbeat: ThreadHeartbeat
    work: list[str]
    watched: WatchedThreads
    told: list[tuple[str, float]]


@pytest.fixture
def desk() -> Desk:
    work: list[str] = []
    told: list[tuple[str, float]] = []
    heartbeat = ThreadHeartbeat("transport_thread", lambda: bool(work))
    watched = WatchedThreads([heartbeat], 5.0, lambda *what: told.append(what))
    return Desk(heartbeat, work, watched, told)


def test_a_thread_with_nothing_to_do_may_sleep_for_ever(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    for now in (0.0, 100.0, 1e6):
        desk.watched.look(now)
    assert desk.told == []


def test_a_thread_that_sleeps_past_its_own_time_is_told_of(desk: Desk) -> None:
    desk.heartbeat.beat(10.0)
    desk.watched.look(14.0)
    assert desk.told == []
    desk.watched.look(16.0)
    assert desk.told == [("transport_thread", 6.0)]
    desk.heartbeat.beat(20.0)
    desk.watched.look(17.0)
    assert desk.told == [("transport_thread", 6.0), ("transport_thread", 0.0)]
    desk.watched.look(18.0)
    assert len(desk.told) == 2


def test_a_thread_that_does_not_touch_its_work_is_told_of(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    desk.watched.look(100.0)
    desk.work.append("a write")
    desk.watched.look(104.0)
    assert desk.told == []
    desk.watched.look(105.5)
    assert desk.told == [("transport_thread", 5.5)]


def test_a_thread_that_always_has_work_and_does_it_is_well(desk: Desk) -> None:
    desk.work.append("a write")
    for now in range(0, 100, 4):
        desk.heartbeat.beat(float(now))
        desk.watched.look(float(now))
    assert desk.told == []


# ---------------------------------------------------------------- threads that fail us


class Faulty(ShmTransport):
    """Shared memory whose writes do what a test says."""

    name: ClassVar[str] = "shm"
    # So that it is the transport_thread that writes.
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


def view_of(record: RankRecord) -> InstanceView:
    rank = RankView(record.rank, record.incarnation, record.control)
    its = (record.fingerprint, record.layout, record.transport)
    return InstanceView(record.instance, "", *its, (rank,))


def wait_for(event: threading.Event) -> None:
    event.wait(WAIT_S)


def raise_a_bug() -> None:
    raise ZeroDivisionError("a bug in a transport")


def test_a_bug_in_the_mover_fails_the_rooms_with_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair_of(raise_a_bug, EndpointConfig(protocol=QUICK)) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=4, pages=[0])
        out = pair.source.open("r")
        out.push((0, 4), [0])
        ended = out.wait(WAIT_S), into.wait(WAIT_S)
        assert [end.code for end in ended if isinstance(end, Failure)] == [FailureCode.INTERNAL] * 2
        assert "a bug in a transport" in str(ended[0])
        assert "transport_thread" in str(ended[1])
        with pytest.raises(Misuse, match="a bug in a transport"):
            pair.source.open("another")
        assert pair.source.stats.broken == {"transport_thread": 1}
        labels = {"endpoint": "p/0", "transport": "shm", "thread": "transport_thread"}
        assert pair.registry.get_sample_value("kvferry_broken_threads_total", labels) == 1
        # Nobody knows what became of the write, so nobody gets its memory.
        assert not out.released
        assert not pair.source.close(0.1)
        # And a closed liveness_port would tell others that the write is over.
        assert (
            probe(pair.source.liveness_port, pair.source.record.incarnation, 0.2)
            is Liveness.UNKNOWN
        )
    assert "thread-broken" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_the_copier_is_told() -> None:
    told: Mailbox[object] = Mailbox()
    copier = CopyThread("copier", told.put, lambda _: None)

    def bind() -> Binding:
        raise ZeroDivisionError

    copier.submit(scatter(1, bind))
    broke = told.get(WAIT_S)
    assert isinstance(broke, ThreadBroke)
    assert broke.thread == "copier"
    copier.close()


def test_a_mover_that_hangs_is_told_of_and_named_in_the_failure(
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
        assert "no life here of the transport_thread thread" in ended.message
        assert pair.source.stats.stalled["transport_thread"] > 0.2
        go_on.set()
        eventually(lambda: pair.source.stats.stalled["transport_thread"] == 0)
        out.wait_released(WAIT_S)
    assert "thread-stalled endpoint=p/0 thread=transport_thread" in caplog.text
    assert "thread-alive endpoint=p/0 thread=transport_thread" in caplog.text


def test_an_owner_that_hangs_keeps_nobody_beyond_the_deadline() -> None:
    go_on = threading.Event()
    config = EndpointConfig(protocol=ALERT, deadline_s=2.0)
    with pair_of(lambda: None, config) as pair:
        stuck = pair.source.open("stuck")
        other = pair.source.open("other")
        # An engine's callback runs on the owner's thread, and must not wait.
        stuck.on_release(partial(wait_for, go_on))
        stuck.abort()
        ended = other.wait(WAIT_S)
        assert isinstance(ended, Failure)
        assert ended.code is FailureCode.INTERNAL
        assert "the owner thread of p/0 has shown no life" in ended.message
        go_on.set()
