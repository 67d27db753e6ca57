"""The whole conformance suite, with its cases about peers that die, stop, restart and close."""

# Where a case's name says everything, it has no docstring.
# ruff: noqa: D102
from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvferry.errors import TransportError
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports.base import (
    KIB,
    MARGIN,
    MIB,
    Cases,
    Crew,
    check_succeeded,
    deliver,
    expect,
)
from kvferry.testing.transports.bindings import PlacedPiece, after, binding_of, grid
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.testing.transports.writes import ImmediateWriteCases, RefusalCases, WriteCases
from kvferry.transports.base import WriteEnded

WHOLE = binding_of([PlacedPiece(0, 0, MIB)])
LARGE = grid(128, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB))


def wait_until_written(target: PeerProcess, offset: int) -> None:
    """Wait until something was written there in region 0."""
    deadline = time.monotonic() + 30
    while not any(target.peek(0, offset, 16)):
        assert time.monotonic() < deadline, "nothing arrives"


def check_ended(ended: Sequence[WriteEnded], num_writes: int) -> None:
    """Check that each write ended once, successfully or not."""
    fates = {one.op: one.fate for one in ended}
    assert len(ended) == len(fates) == num_writes, f"of {num_writes} writes these ended: {ended}"
    assert set(fates.values()) <= {WriteFate.FAILED, WriteFate.UNKNOWN, None}


def deliver_among(
    source: PeerProcess, target: PeerProcess, write: HostWrite, limit_s: float
) -> list[WriteEnded]:
    """Deliver one write while others are in flight; return those that ended meanwhile."""
    source.write(write)
    others: list[WriteEnded] = []
    deadline = time.monotonic() + limit_s
    while True:
        assert time.monotonic() < deadline, "a write was held up by another peer"
        ended = source.wait(num_ended=1, limit_s=limit_s)
        others += [one for one in ended if one.op != write.op]
        mine = [one for one in ended if one.op == write.op]
        if mine:
            break
    check_succeeded(mine, [write])
    expect(source, target, write)
    target.check()
    return others


class FailureCases(Cases):
    """Every write to a dead peer ends, and delays no write to another peer."""

    def test_a_peer_that_died_before_the_write(self, crew: Crew) -> None:
        """The write fails in time, unless the peer's memory outlives it."""
        source, victim, other = crew.source(MIB), crew.target(MIB), crew.target(MIB)
        dead, alive = source.connect(victim.metadata), source.connect(other.metadata)
        deliver(source, victim, HostWrite(dead, 1, WHOLE))
        victim.process.kill()
        source.write(HostWrite(dead, 2, WHOLE))
        early = deliver_among(source, other, HostWrite(alive, 3, WHOLE), limit_s=10)
        late = [] if early else source.wait(num_ended=1, limit_s=self.patience_s)
        check_ended([*early, *late], 1)
        assert self.kind.maps_peer or None not in {one.fate for one in (*early, *late)}
        source.disconnect(dead)
        deliver(source, other, HostWrite(alive, 4, WHOLE))

    def test_a_peer_that_dies_during_many_writes(self, crew: Crew) -> None:
        """All of them end, and those to another peer succeed."""
        source, victim, other = crew.source(8 * MIB), crew.target(8 * MIB), crew.target(8 * MIB)
        dead, alive = source.connect(victim.metadata), source.connect(other.metadata)
        source.ask("write", [HostWrite((dead, alive)[op % 2], op, LARGE) for op in range(80)])
        wait_until_written(victim, 0)
        victim.process.kill()
        source.answer(self.patience_s)
        ended = source.wait(num_ended=80, limit_s=self.patience_s)
        check_ended(ended, 80)
        assert [one for one in ended if one.op % 2 and one.fate is not None] == []
        other.regions = after(LARGE, source.regions, other.regions)
        other.check()

    def test_a_source_that_dies_during_its_writes(self, crew: Crew) -> None:
        """Its target still serves another source."""
        victim, source, target = crew.source(8 * MIB), crew.source(MIB), crew.target(8 * MIB)
        # All but the first MiB, which the other source writes.
        base = [Base(0, 0, MIB)]
        large = grid(112, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB), base, base)
        remote = victim.connect(target.metadata)
        victim.ask("write", [HostWrite(remote, op, large) for op in range(40)])
        wait_until_written(target, MIB)
        victim.process.kill()
        write = HostWrite(source.connect(target.metadata), 1, WHOLE)
        source.write(write)
        check_succeeded(source.wait(num_ended=1), [write])
        target.regions[0][:MIB] = source.regions[0]
        target.check_part(0, 0, MIB)

    def test_connecting_to_a_dead_peer(self, crew: Crew) -> None:
        """Either the connection is refused or the write ends."""
        source, victim = crew.source(MIB), crew.target(MIB)
        victim.process.kill()
        try:
            remote = source.connect(victim.metadata)
        except TransportError:
            return
        source.write(HostWrite(remote, 1, WHOLE))
        ended = source.wait(num_ended=1, limit_s=self.patience_s)
        check_ended(ended, 1)

    @pytest.mark.parametrize("written_before", [True, False])
    def test_a_stopped_peer_delays_no_other(self, crew: Crew, written_before: bool) -> None:
        """The write to the stopped peer arrives when that peer continues."""
        source, victim, other = crew.source(MIB), crew.target(MIB), crew.target(MIB)
        stopped, alive = source.connect(victim.metadata), source.connect(other.metadata)
        if written_before:
            deliver(source, victim, HostWrite(stopped, 1, binding_of([PlacedPiece(0, 5, 1000)])))
        victim.process.stop()
        write = HostWrite(stopped, 2, WHOLE)
        source.write(write)
        early = deliver_among(source, other, HostWrite(alive, 3, WHOLE), limit_s=10)
        victim.process.resume()
        late = [] if early else source.wait(num_ended=1)
        check_succeeded([*early, *late], [write])
        expect(source, victim, write)
        victim.check()

    def test_restart_under_the_same_name(self, crew: Crew) -> None:
        """The new incarnation has new metadata; the old metadata is useless and harmless."""
        source, victim = crew.source(MIB), crew.target(MIB)
        old = source.connect(victim.metadata)
        deliver(source, victim, HostWrite(old, 1, WHOLE))
        victim.process.kill()
        source.disconnect(old)
        successor = crew.target(MIB)
        assert successor.metadata != victim.metadata
        remote = source.connect(successor.metadata)
        deliver(source, successor, HostWrite(remote, 2, WHOLE))

    def test_a_new_transport_in_the_same_process(self, crew: Crew) -> None:
        """A target that closes and opens again is reached like a new one."""
        source, target = crew.source(MIB), crew.target(MIB)
        for op in range(3):
            remote = source.connect(target.metadata)
            deliver(source, target, HostWrite(remote, op, WHOLE))
            source.disconnect(remote)
            target.close()
            target.open_target([MIB])


class CloseCases(Cases):
    """Transports do not disturb each other, and always close."""

    def test_two_transports_in_two_threads(self, crew: Crew) -> None:
        """Both write to each other and to another process, and are written to."""
        pair, third = crew.process(num_peers=2), crew.target(4 * MIB, 4 * MIB)
        submitted: list[list[HostWrite]] = []
        for seed, peer in enumerate(pair.peers):
            peer.open_target([4 * MIB, 4 * MIB], MARGIN)
            peer.fill(seed=10 * seed)
        for index, peer in enumerate(pair.peers):
            near = peer.connect(pair.peers[1 - index].metadata)
            far = peer.connect(third.metadata)
            writes = []
            for op in range(32):
                # Read region 0, which nobody writes; the third peer has a region for each.
                piece = PlacedPiece(op * 100 * KIB, op * 128 * KIB, 100 * KIB, 0, 1)
                writes.append(HostWrite(near, 2 * op, binding_of([piece])))
                piece = piece._replace(target_region=index)
                writes.append(HostWrite(far, 2 * op + 1, binding_of([piece])))
            peer.ask("write", writes)
            submitted.append(writes)
            expect(peer, pair.peers[1 - index], *writes[::2])
            expect(peer, third, *writes[1::2])
        for peer in pair.peers:
            peer.answer()
        for peer, writes in zip(pair.peers, submitted, strict=True):
            check_succeeded(peer.wait(num_ended=64), writes)
        for peer in (*pair.peers, third):
            peer.check()

    def test_close_with_writes_in_flight(self, crew: Crew) -> None:
        """The close returns, the process lives on, and the target serves the next source."""
        source, target = crew.source(8 * MIB), crew.target(8 * MIB)
        remote = source.connect(target.metadata)
        source.write(*(HostWrite(remote, op, LARGE) for op in range(16)))
        source.close(limit_s=20)
        source.open_source([MIB])
        source.fill(77)
        target.close()
        target.open_target([MIB])
        deliver(source, target, HostWrite(source.connect(target.metadata), 1, WHOLE))

    def test_close_while_the_target_is_stopped(self, crew: Crew) -> None:
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, KIB)])))
        target.process.stop()
        source.write(HostWrite(remote, 2, WHOLE))
        source.close(limit_s=20)
        target.process.resume()
        assert target.peek(0, 0, 1) == target.regions[0][:1].tobytes()

    def test_the_target_closes_while_it_is_written(self, crew: Crew) -> None:
        """The source's writes end, successfully or not, and both processes live on."""
        source, target = crew.source(8 * MIB), crew.target(8 * MIB)
        remote = source.connect(target.metadata)
        source.ask("write", [HostWrite(remote, op, LARGE) for op in range(16)])
        target.close(limit_s=20)
        source.answer(self.patience_s)
        ended = source.wait(num_ended=16, limit_s=self.patience_s)
        assert sorted(one.op for one in ended) == list(range(16)), "each write ends once"

    def test_the_end_of_a_source_keeps_its_target_reachable(self, crew: Crew) -> None:
        """The next source reaches the same target by the same metadata."""
        target = crew.target(MIB)
        for _ in range(2):
            source = crew.source(MIB)
            deliver(source, target, HostWrite(source.connect(target.metadata), 1, WHOLE))
            assert source.process.end() == 0

    def test_close_without_a_write(self, crew: Crew) -> None:
        """Closing works with a peer connected, and twice: every close in this suite is repeated."""
        source, target = crew.source(KIB), crew.target(KIB)
        source.connect(target.metadata)
        assert source.close() == []
        assert target.close() == []


class TransportSuite(WriteCases, RefusalCases, FailureCases, CloseCases, ImmediateWriteCases):
    """Everything that a transport must do, over real processes."""
