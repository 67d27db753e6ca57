"""The base of all cases: hooks for subclasses, and the processes of each test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import pytest

from kvferry.testing.transports.bindings import after
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess, Process, ProcessBroken, TransportKind
from kvferry.transports.base import Transport, WriteEnded
from kvferry.transports.registry import load

MARGIN = 4096
KIB, MIB = 1 << 10, 1 << 20


class Pool:
    """Idle processes for later tests. Killed and broken ones are replaced."""

    def __init__(self, kind: TransportKind) -> None:
        self.kind = kind
        self._idle: list[Process] = []

    def take(self, num_peers: int) -> Process:
        """Return a process that has no transport."""
        for process in self._idle:
            if len(process.peers) == num_peers and process.alive:
                self._idle.remove(process)
                return process
        return Process(self.kind, num_peers)

    def give_back(self, process: Process) -> None:
        """Keep a process for a later test."""
        self._idle.append(process)

    def close(self) -> list[int]:
        """End every process, and return their exit statuses."""
        return [process.end() for process in self._idle]


class Crew:
    """The peers of one test. Every target starts with zeros, every source with a pattern."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._processes: list[Process] = []

    def process(self, num_peers: int = 1) -> Process:
        """Return a process whose transports are not open yet."""
        process = self._pool.take(num_peers)
        self._processes.append(process)
        return process

    def source(self, *sizes: int) -> PeerProcess:
        """Return a peer with regions of these sizes, which writes to others."""
        peer = self.process().peers[0]
        peer.open_source(sizes)
        peer.fill(seed=len(self._processes))
        return peer

    def target(self, *sizes: int) -> PeerProcess:
        """Return a peer with regions of these sizes, which others write to."""
        peer = self.process().peers[0]
        peer.open_target(sizes, MARGIN)
        return peer

    def dismiss(self) -> None:
        """Close every transport, and check that none hangs or has unexpected results."""
        broken: list[AssertionError] = []
        for process in self._processes:
            try:
                self._dismiss(process)
            except AssertionError as error:
                broken.append(error)
                process.kill()
                process.end()
        self._processes = []
        if broken:
            raise broken[0]

    def _dismiss(self, process: Process) -> None:
        if process.dismissed:
            process.end()
            return
        if not process.alive:
            raise ProcessBroken(process.describe("it ended on its own"))
        process.resume()
        for peer in process.peers:
            leftover = peer.close(limit_s=20)
            assert not leftover, f"reported more than once, or without a write: {leftover}"
        self._pool.give_back(process)


class Cases:
    """The base of every group of cases. Set ``transport`` to an entry point's name.

    The rest is optional: ``options`` go into the transport's setup, ``environment`` is added to
    that of its processes, ``device`` is where memory is, and ``patience_s`` is how long a write to
    a dead peer may take to end.
    """

    transport: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    device: ClassVar[str] = "cpu"
    patience_s: ClassVar[float] = 30.0

    pool: ClassVar[Pool]
    kind: ClassVar[type[Transport]]

    @classmethod
    def setup_class(cls) -> None:
        """Skip everything if the transport's requirements are missing."""
        cls.kind = load(cls.transport)
        missing = cls.kind.missing()
        if missing:
            pytest.skip(missing)
        cls.pool = Pool(TransportKind(cls.transport, cls.options, cls.environment, cls.device))

    @classmethod
    def teardown_class(cls) -> None:
        """End the processes, and check that none crashed."""
        statuses = cls.pool.close()
        assert not any(statuses), f"a process ended with a status other than 0: {statuses}"

    @pytest.fixture
    def crew(self) -> Iterator[Crew]:
        """Yield the peers of one test."""
        crew = Crew(self.pool)
        yield crew
        crew.dismiss()


def check_succeeded(ended: Iterable[WriteEnded], writes: Iterable[HostWrite]) -> None:
    """Check that each of these writes ended once, and successfully."""
    found = sorted((one.op, one.fate or "succeeded", one.detail) for one in ended)
    assert found == sorted((write.op, "succeeded", "") for write in writes)


def deliver(
    source: PeerProcess, target: PeerProcess, *writes: HostWrite, limit_s: float = 30.0
) -> None:
    """Write to one target, wait for the end, and check all of the target's memory."""
    source.write(*writes)
    check_succeeded(source.wait(num_ended=len(writes), limit_s=limit_s), writes)
    expect(source, target, *writes)
    target.check()


def expect(source: PeerProcess, target: PeerProcess, *writes: HostWrite) -> None:
    """Note what these writes put into a target's memory."""
    for write in writes:
        target.regions = after(write.binding, source.regions, target.regions)
