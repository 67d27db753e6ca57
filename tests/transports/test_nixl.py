"""The NIXL transport: the conformance suite over two means of UCX, and what is its own."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest

from kvferry.errors import TransportError
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of
from kvferry.testing.transports.base import Crew, deliver
from kvferry.testing.transports.bindings import after, copy_by_memmove
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.testing.transports.suite import wait_until_written
from kvferry.transports.base import TransportSetup, WriteEnded
from kvferry.transports.nixl import NixlTransport

MIB = 1 << 20
LARGE = binding_of([PlacedPiece(0, 0, 16 * MIB)])


class NixlSuite(TransportSuite):
    """The suite, and what NIXL's own habits ask for."""

    transport = "nixl"

    def test_disconnected_from_a_stopped_peer_and_connected_again(self, crew: Crew) -> None:
        """What was under way is of unknown fate, once; and a new connection works."""
        source, target = crew.source(16 * MIB), crew.target(18 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 10)])))
        target.process.stop()
        source.write(HostWrite(remote, 2, LARGE), HostWrite(remote, 3, LARGE))
        early = source.wait(num_ended=2, limit_s=0.2)
        source.disconnect(remote)
        told = [*early, *source.wait(num_ended=2 - len(early))]
        fates = {one.op: one.fate for one in told}
        assert (len(told), set(fates)) == (2, {2, 3})
        assert set(fates.values()) <= {None, WriteFate.UNKNOWN}
        again = source.connect(target.metadata)
        target.process.resume()
        target.regions = after(LARGE, source.regions, target.regions)
        far = binding_of([PlacedPiece(0, 17 * MIB, MIB)])
        source.write(HostWrite(again, 4, far))
        assert source.wait(num_ended=1) == [(4, None, "")]
        wait_until_written(target, 16 * MIB - 16)
        target.regions = after(far, source.regions, target.regions)
        target.check()

    def test_a_peer_that_lives_and_breaks_the_connection_leaves_doubt(self, crew: Crew) -> None:
        """It might still take what was sent. Nothing more is, until it is connected again."""
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

    def test_the_next_life_is_reached_while_the_last_is_still_connected(self, crew: Crew) -> None:
        """The two have different names, whatever their endpoint is called."""
        source, target = crew.source(MIB), crew.target(MIB)
        whole = binding_of([PlacedPiece(0, 0, MIB)])
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, whole))
        target.close()
        target.open_target([MIB])
        again = source.connect(target.metadata)
        deliver(source, target, HostWrite(again, 2, whole))


class TestConformance(NixlSuite):
    pass


class TestConformanceOverTcp(NixlSuite):
    """As on machines that forbid one process to write another's memory."""

    options: ClassVar = {"ucx": "TLS=tcp,NET_DEVICES=lo"}


def test_an_unknown_option_is_refused() -> None:
    setup = TransportSetup(agent="a", copy=copy_by_memmove, options={"ucz": "TLS=tcp"})
    with pytest.raises(TransportError, match="no option 'ucz'; it has ucx"):
        NixlTransport(setup)


def test_a_process_with_an_agent_says_nothing_and_ends_well() -> None:
    """Also one that forgot to close; NIXL's copies of system libraries must not clash."""
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
