"""The crew of one test: processes kept warm between tests, transports made for each."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.testing.transports.bindings import after
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess, Process, ProcessBroken, TransportKind
from kvferry.transports.base import WriteEnded

MARGIN = 4096


class Pool:
    """Processes that wait for the next test. What was killed or is broken is replaced."""

    def __init__(self, kind: TransportKind) -> None:
        self.kind = kind
        self._spare: list[Process] = []

    def take(self, num_peers: int) -> Process:
        """A process that holds no transport."""
        for process in self._spare:
            if len(process.peers) == num_peers and process.alive:
                self._spare.remove(process)
                return process
        return Process(self.kind, num_peers)

    def give_back(self, process: Process) -> None:
        """Keep a process for later."""
        self._spare.append(process)

    def close(self) -> list[int]:
        """End them all; their exit statuses."""
        return [process.end() for process in self._spare]


class Crew:
    """The peers of one test. Every target starts zeroed, every source filled."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._processes: list[Process] = []

    def process(self, num_peers: int = 1) -> Process:
        """A process whose transports are still to be opened."""
        process = self._pool.take(num_peers)
        self._processes.append(process)
        return process

    def source(self, *sizes: int) -> PeerProcess:
        """A peer that writes to others."""
        peer = self.process().peers[0]
        peer.open_source(sizes)
        peer.fill(seed=len(self._processes))
        return peer

    def target(self, *sizes: int) -> PeerProcess:
        """A peer that others write to."""
        peer = self.process().peers[0]
        peer.open_target(sizes, MARGIN)
        return peer

    def dismiss(self) -> None:
        """Close every transport; nothing may have ended twice, and nothing hangs."""
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
            raise ProcessBroken(process.story("it ended without being told to"))
        process.resume()
        for peer in process.peers:
            leftover = peer.close(limit_s=20)
            assert not leftover, f"told more than once, or unasked: {leftover}"
        self._pool.give_back(process)


def all_well(ended: Iterable[WriteEnded], writes: Iterable[HostWrite]) -> None:
    """Each of these writes was told once, and each as a success."""
    told = sorted((one.op, one.fate or "well", one.detail) for one in ended)
    assert told == sorted((write.op, "well", "") for write in writes)


def deliver(
    source: PeerProcess, target: PeerProcess, *writes: HostWrite, limit_s: float = 30.0
) -> None:
    """Write to one target, await the end, and check that all has arrived and nothing else."""
    source.write(*writes)
    all_well(source.wait(num_ended=len(writes), limit_s=limit_s), writes)
    for write in writes:
        target.regions = after(write.binding, source.regions, target.regions)
    target.check()
