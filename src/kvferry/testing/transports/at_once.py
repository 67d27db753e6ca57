"""Cases for transports that can write at once, on any thread."""

from __future__ import annotations

import pytest

from kvferry.protocol.events import WriteFate
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import PlacedPiece, after, binding_of
from kvferry.testing.transports.crew import Crew, all_well
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.moving import scattered, stripes
from kvferry.testing.transports.refusing import KIB, OUTSIDE

MIB = 1 << 20


class AtOnceCases(Cases):
    """``write_now`` says how a write ended, or leaves that to ``look``, and is in nobody's way."""

    @pytest.fixture
    def at_once(self, crew: Crew) -> Crew:
        """The processes of one test, of a transport that can."""
        if not self.kind.supports_write_now:
            pytest.skip(f"{self.transport} does not write at once")
        return crew

    def test_written_at_once(self, at_once: Crew) -> None:
        """When its end is told, the bytes are there, and it is told once."""
        source, target = at_once.source(*[MIB] * 3), at_once.target(*[MIB] * 3)
        remote = source.connect(target.metadata)
        bindings = [scattered(1, 200, 3, MIB), binding_of([]), scattered(2, 200, 3, MIB)]
        for op, binding in enumerate(bindings):
            told = source.write_now([HostWrite(remote, op, binding)]) or source.wait(num_ended=1)
            assert told == [(op, None, "")]
            target.regions = after(binding, source.regions, target.regions)
            target.check()

    def test_a_piece_outside_its_region_is_refused_at_once(self, at_once: Crew) -> None:
        """Not one byte is written, also not of its good pieces."""
        source, target = at_once.source(64 * KIB), at_once.target(64 * KIB, 64 * KIB)
        remote, good = source.connect(target.metadata), PlacedPiece(0, 0, 32 * KIB)
        for where, piece in OUTSIDE.items():
            (ended,) = source.write_now([HostWrite(remote, 1, binding_of([good, piece]))])
            assert (ended.op, ended.fate) == (1, WriteFate.FAILED), where
            assert ended.detail, "a failure must say what is wrong"
            target.check()

    def test_two_threads_at_once(self, at_once: Crew) -> None:
        """And the transport's own thread, which writes meanwhile, to the same peer."""
        source, target = at_once.source(48 * MIB), at_once.target(48 * MIB)
        remote = source.connect(target.metadata)
        writes = stripes(remote, 48)
        ours, shares = writes[::3], (writes[1::3], writes[2::3])
        ended = source.write_now(*shares, meanwhile=ours)
        ended += source.wait(num_ended=len(writes) - len(ended))
        all_well(ended, [*ours, *shares[0], *shares[1]])
        for write in writes:
            target.regions = after(write.binding, source.regions, target.regions)
        target.check()
