"""Cases in which a peer dies, stops or comes back, and what the others must not notice."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvferry.errors import TransportError
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import PlacedPiece, after, binding_of, grid
from kvferry.testing.transports.crew import Crew, all_well, deliver
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.transports.base import WriteEnded

KIB, MIB = 1 << 10, 1 << 20
WHOLE = binding_of([PlacedPiece(0, 0, MIB)])
LARGE = grid(128, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB))


def until_written(target: PeerProcess, offset: int) -> None:
    """Wait until something has been written there in region 0."""
    deadline = time.monotonic() + 30
    while not any(target.peek(0, offset, 16)):
        assert time.monotonic() < deadline, "nothing arrives"


def all_over(ended: Sequence[WriteEnded], num_writes: int) -> None:
    """Each write was told once, in whatever way it ended."""
    told = {one.op: one.fate for one in ended}
    assert len(ended) == len(told) == num_writes, f"of {num_writes} writes these ended: {ended}"
    assert set(told.values()) <= {WriteFate.FAILED, WriteFate.UNKNOWN, None}


class FailingCases(Cases):
    """Every write to a dead peer ends, and nobody else's is held up by it."""

    def test_a_peer_that_died_before_the_write(self, crew: Crew) -> None:
        """It fails in time, unless its memory outlives it; others are served."""
        source, victim, other = crew.source(MIB), crew.target(MIB), crew.target(MIB)
        dead, alive = source.connect(victim.metadata), source.connect(other.metadata)
        deliver(source, victim, HostWrite(dead, 1, WHOLE))
        victim.process.kill()
        source.write(HostWrite(dead, 2, WHOLE))
        early = deliver_among(source, other, HostWrite(alive, 3, WHOLE), limit_s=10)
        late = [] if early else source.wait(num_ended=1, limit_s=self.patience_s)
        all_over([*early, *late], 1)
        assert self.kind.maps_peer or None not in {one.fate for one in (*early, *late)}
        source.disconnect(dead)
        deliver(source, other, HostWrite(alive, 4, WHOLE))

    def test_a_peer_that_dies_during_many_writes(self, crew: Crew) -> None:
        """All of them end, and those to another peer succeed."""
        source, victim, other = crew.source(8 * MIB), crew.target(8 * MIB), crew.target(8 * MIB)
        dead, alive = source.connect(victim.metadata), source.connect(other.metadata)
        source.ask("write", [HostWrite((dead, alive)[op % 2], op, LARGE) for op in range(80)])
        until_written(victim, 0)
        victim.process.kill()
        source.answer(self.patience_s)
        ended = source.wait(num_ended=80, limit_s=self.patience_s)
        all_over(ended, 80)
        assert [one for one in ended if one.op % 2 and one.fate is not None] == []
        other.regions = after(LARGE, source.regions, other.regions)
        other.check()

    def test_a_source_that_dies_during_its_writes(self, crew: Crew) -> None:
        """Its target goes on serving others."""
        victim, source, target = crew.source(8 * MIB), crew.source(MIB), crew.target(8 * MIB)
        # All but the first MiB, which is for the other source.
        base = [Base(0, 0, MIB)]
        large = grid(112, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB), base, base)
        remote = victim.connect(target.metadata)
        victim.ask("write", [HostWrite(remote, op, large) for op in range(40)])
        until_written(target, MIB)
        victim.process.kill()
        write = HostWrite(source.connect(target.metadata), 1, WHOLE)
        source.write(write)
        all_well(source.wait(num_ended=1), [write])
        target.regions[0][:MIB] = source.regions[0]
        target.check_part(0, 0, MIB)

    def test_connecting_to_the_dead(self, crew: Crew) -> None:
        """It is refused, or the write fails."""
        source, victim = crew.source(MIB), crew.target(MIB)
        victim.process.kill()
        try:
            remote = source.connect(victim.metadata)
        except TransportError:
            return
        source.write(HostWrite(remote, 1, WHOLE))
        ended = source.wait(num_ended=1, limit_s=self.patience_s)
        all_over(ended, 1)

    @pytest.mark.parametrize("acquainted", [True, False])
    def test_a_stopped_peer_holds_nobody_up(self, crew: Crew, acquainted: bool) -> None:
        """Also not if it stops before the first write; what it is owed arrives later."""
        source, victim, other = crew.source(MIB), crew.target(MIB), crew.target(MIB)
        stopped, alive = source.connect(victim.metadata), source.connect(other.metadata)
        if acquainted:
            deliver(source, victim, HostWrite(stopped, 1, binding_of([PlacedPiece(0, 5, 1000)])))
        victim.process.stop()
        write = HostWrite(stopped, 2, WHOLE)
        source.write(write)
        early = deliver_among(source, other, HostWrite(alive, 3, WHOLE), limit_s=10)
        victim.process.resume()
        late = [] if early else source.wait(num_ended=1)
        all_well([*early, *late], [write])
        victim.regions = after(WHOLE, source.regions, victim.regions)
        victim.check()

    def test_restart_under_the_same_name(self, crew: Crew) -> None:
        """A new life has new metadata; the old one's is useless and harmless."""
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


def deliver_among(
    source: PeerProcess, target: PeerProcess, write: HostWrite, limit_s: float
) -> list[WriteEnded]:
    """Deliver one write while others are under way; which of those have ended meanwhile."""
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
    all_well(mine, [write])
    target.regions = after(write.binding, source.regions, target.regions)
    target.check()
    return others
