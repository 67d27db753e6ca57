"""The NIXL transport: conformance over two UCX transports, and tests of NIXL's own behaviour."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of
from kvferry.testing.transports.base import Crew, deliver
from kvferry.testing.transports.bindings import after, copy_by_memmove
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.testing.transports.suite import wait_until_written
from kvferry.transports.base import TransportSetup, WriteEnded
from kvferry.transports.nixl import NixlTransport

KIB, MIB = 1 << 10, 1 << 20
LARGE = binding_of([PlacedPiece(0, 0, 16 * MIB)])


def _pages(count: int, num_bytes: int, stride: int, order: str) -> Binding:
    """Return pages of two layers, the last of them partial, ``stride`` pages apart."""
    rng, one = np.random.default_rng(stride), np.ones(count, dtype=np.int64)
    source, target = (
        (rng.permutation(count) if order == "random" else np.arange(count)) * stride * num_bytes
        for _ in range(2)
    )
    lengths = one * num_bytes
    lengths[-1] = 1000
    flat = Stride(0, 0)
    pieces = Pieces(source, target, lengths, one, one, flat, flat, whole_pages=True)
    sources, targets = (Base(0, 0, 0), Base(1, 1, 0)), (Base(0, 0, 4 * MIB), Base(1, 0, 0))
    return Binding((BindingPart("kv", "k", sources, targets, pieces),))


class NixlSuite(TransportSuite):
    """The conformance suite with NIXL's own cases."""

    transport = "nixl"

    def test_reconnect_after_disconnecting_a_stopped_peer(self, crew: Crew) -> None:
        """Writes in flight end as UNKNOWN, once, and a new connection works."""
        source, target = crew.source(16 * MIB), crew.target(18 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 10)])))
        target.process.stop()
        source.write(HostWrite(remote, 2, LARGE), HostWrite(remote, 3, LARGE))
        early = source.wait(num_ended=2, limit_s=0.2)
        source.disconnect(remote)
        ended = [*early, *source.wait(num_ended=2 - len(early))]
        fates = {one.op: one.fate for one in ended}
        assert (len(ended), set(fates)) == (2, {2, 3})
        assert set(fates.values()) <= {None, WriteFate.UNKNOWN}
        again = source.connect(target.metadata)
        target.process.resume()
        target.regions = after(LARGE, source.regions, target.regions)
        far = binding_of([PlacedPiece(0, 17 * MIB, MIB)])
        source.write(HostWrite(again, 4, far))
        assert source.wait(num_ended=1) == [WriteEnded(Op(4))]
        wait_until_written(target, 16 * MIB - 16)
        target.regions = after(far, source.regions, target.regions)
        target.check()

    def test_a_broken_connection_to_a_living_peer_ends_as_unknown(self, crew: Crew) -> None:
        """The peer may still receive sent bytes. Later writes fail until it is connected again."""
        source, target = crew.source(MIB), crew.target(MIB)
        whole = binding_of([PlacedPiece(0, 0, MIB)])
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, whole))
        target.close()
        target.open_target([MIB])
        ops = iter(range(2, 100))
        while (ended := self._one(source, remote, next(ops))).fate is None:
            pass  # The memory is still there, and the loss has not been noticed.
        assert ended.fate is WriteFate.UNKNOWN
        refused = self._one(source, remote, next(ops))
        assert (refused.fate, refused.detail[-9:]) == (WriteFate.FAILED, "is broken")
        source.disconnect(remote)
        deliver(source, target, HostWrite(source.connect(target.metadata), 100, whole))

    def _one(self, source: PeerProcess, remote: int, op: int) -> WriteEnded:
        source.write(HostWrite(remote, op, binding_of([PlacedPiece(0, 0, 1)])))
        (ended,) = source.wait(num_ended=1)
        return ended

    def test_a_restarted_peer_is_reached_while_the_old_one_is_connected(self, crew: Crew) -> None:
        """Agents of one endpoint have different names."""
        source, target = crew.source(MIB), crew.target(MIB)
        whole = binding_of([PlacedPiece(0, 0, MIB)])
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, whole))
        target.close()
        target.open_target([MIB])
        again = source.connect(target.metadata)
        deliver(source, target, HostWrite(again, 2, whole))

    def test_whole_pages_with_a_partial_one(self, crew: Crew) -> None:
        """Named by their cells in prepared lists. The lists end with the connection."""
        source, target = crew.source(4 * MIB, 4 * MIB), crew.target(8 * MIB)
        for op, stride in enumerate((1, 2), start=1):
            remote = source.connect(target.metadata)
            for number, order in enumerate(("random", "consecutive")):
                pages = _pages(32, 16 * KIB, stride, order)
                deliver(source, target, HostWrite(remote, 10 * op + number, pages))
            source.disconnect(remote)


class TestConformance(NixlSuite):
    pass


class TestConformanceOverTcp(NixlSuite):
    """As on machines where one process may not write another's memory."""

    options: ClassVar = {"ucx": "TLS=tcp,NET_DEVICES=lo"}


def test_an_unknown_option_is_refused() -> None:
    setup = TransportSetup(agent="a", copy=copy_by_memmove, options={"ucz": "TLS=tcp"})
    with pytest.raises(TransportError, match="no option 'ucz'; it has ucx"):
        NixlTransport(setup)


def test_a_process_with_agents_prints_nothing_and_exits_cleanly() -> None:
    """Even if it does not close them; NIXL's bundled libraries must not clash with the system's."""
    if NixlTransport.missing():
        pytest.skip(str(NixlTransport.missing()))
    lines = [
        "from kvferry.transports.base import WriteEnded, TransportSetup",
        "from kvferry.transports.nixl.transport import NixlTransport",
        "made = [NixlTransport(TransportSetup(agent='a', copy=print)) for _ in range(2)]",
        "made[0].close()",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
