"""Cases in which a transport must say no: bounds, garbage, and what it is missing."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import PlacedPiece, binding_of
from kvferry.testing.transports.crew import Crew, deliver
from kvferry.testing.transports.host import HostWrite

KIB = 1 << 10

OUTSIDE = {
    "past the end of the target": PlacedPiece(0, 63 * KIB, 2 * KIB),
    "one byte past the end of the target": PlacedPiece(0, 63 * KIB, KIB + 1),
    "before the start of the target": PlacedPiece(0, -1, 16),
    "a region that the target has not": PlacedPiece(0, 0, 16, target_region=2),
    "a negative region of the target": PlacedPiece(0, 0, 16, target_region=-1),
    "one byte past the end of the source": PlacedPiece(63 * KIB, 0, KIB + 1),
    "before the start of the source": PlacedPiece(-16, 0, 16),
    "a region that the source has not": PlacedPiece(0, 0, 16, source_region=1),
    "far away": PlacedPiece(0, 1 << 45, 16),
}


class RefusingCases(Cases):
    """Nothing is written outside a region, and bad input harms nothing else."""

    @pytest.mark.parametrize("case", OUTSIDE)
    def test_a_piece_outside_its_region_fails_the_write(self, crew: Crew, case: str) -> None:
        """Not one byte is written, also not of its good pieces; the next write works."""
        source, target = crew.source(64 * KIB), crew.target(64 * KIB, 64 * KIB)
        remote = source.connect(target.metadata)
        good = PlacedPiece(0, 0, 32 * KIB)
        source.write(HostWrite(remote, 1, binding_of([good, OUTSIDE[case]])))
        (ended,) = source.wait(num_ended=1)
        assert (ended.op, ended.fate) == (1, WriteFate.FAILED)
        assert ended.detail, "a failure must say what is wrong"
        target.check()
        deliver(source, target, HostWrite(remote, 2, binding_of([good])))

    def test_garbage_metadata_is_refused(self, crew: Crew) -> None:
        """By a ``TransportError``, after which real metadata still works."""
        source, target = crew.source(64 * KIB), crew.target(64 * KIB)
        noise = np.random.default_rng(1).bytes(4096)
        half = target.metadata[: len(target.metadata) // 2]
        for garbage in (b"", b"garbage", noise, half, b"\0" * 100):
            with pytest.raises(TransportError):
                source.connect(garbage)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 64 * KIB)])))

    def test_missing_is_a_sentence_or_nothing(self) -> None:
        """What to install, or None; here it was None, or all of this was skipped."""
        assert self.kind.missing() is None
        assert self.kind.name == self.transport

    def test_processes_of_one_host_share_a_realm(self, crew: Crew) -> None:
        """Otherwise the handshake would refuse them."""
        assert crew.source(KIB).realm() == crew.target(KIB).realm()
