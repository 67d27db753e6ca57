"""The Mooncake transport: conformance, and tests of Mooncake's own behaviour."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.coalesce import Stride
from kvferry.protocol.events import WriteEnded, WriteFate
from kvferry.regions import Device, Region
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of, grid
from kvferry.testing.transports.base import Crew, deliver
from kvferry.testing.transports.bindings import after, copy_by_memmove
from kvferry.testing.transports.host import HostWrite
from kvferry.transports.base import TransportSetup
from kvferry.transports.mooncake import MooncakeTransport, package

MIB = 1 << 20
WHOLE = binding_of([PlacedPiece(0, 0, MIB)])
LARGE = binding_of([PlacedPiece(0, 0, 16 * MIB)])


class TestConformance(TransportSuite):
    transport = "mooncake"

    def test_a_dead_peer_leaves_only_sent_writes_unknown(self, crew: Crew) -> None:
        """Nothing of the last writes was sent, so they fail, as later ones do."""
        source, victim = crew.source(MIB), crew.target(MIB)
        remote = source.connect(victim.metadata)
        many = grid(1024, 512, Stride(1024, 1024))
        source.write(*(HostWrite(remote, op, many) for op in range(40)))
        victim.process.kill()
        fates = {one.op: one.fate for one in source.wait(num_ended=40)}
        assert set(fates) == set(range(40))
        assert fates[Op(39)] is WriteFate.FAILED
        assert WriteFate.UNKNOWN in fates.values()
        source.write(HostWrite(remote, 40, WHOLE))
        (refused,) = source.wait(num_ended=1)
        assert (refused.fate, "earlier" in refused.detail) == (WriteFate.FAILED, True)

    def test_reconnect_after_disconnecting_a_stopped_peer(self, crew: Crew) -> None:
        """Writes in flight end as UNKNOWN, once, and a new connection works."""
        source, target = crew.source(16 * MIB), crew.target(18 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 10)])))
        target.process.stop()
        source.write(HostWrite(remote, 2, LARGE), HostWrite(remote, 3, LARGE))
        assert source.wait(num_ended=1, limit_s=0.2) == []
        source.disconnect(remote)
        told = source.wait(num_ended=2)
        assert sorted((one.op, one.fate) for one in told) == [(2, "unknown"), (3, "unknown")]
        again = source.connect(target.metadata)
        far = binding_of([PlacedPiece(0, 17 * MIB, MIB)])
        source.write(HostWrite(again, 4, far))
        target.process.resume()
        assert source.wait(num_ended=1) == [WriteEnded(Op(4))]
        target.regions = after(far, source.regions, target.regions)
        target.check_part(0, 17 * MIB, MIB)

    def test_another_peer_at_the_address_of_an_earlier_one(self, crew: Crew) -> None:
        """Mooncake caches what it found at an address."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, WHOLE))
        told = msgspec.msgpack.decode(target.metadata) | {"agent": "another"}
        for op in range(2, 4):
            remote = source.connect(msgspec.msgpack.encode(told))
            deliver(source, target, HostWrite(remote, op, binding_of([PlacedPiece(op, 0, 1000)])))

    def test_a_peer_that_is_stopped_before_the_first_contact(self, crew: Crew) -> None:
        """Other peers are served meanwhile, and this one after it resumes."""
        source, silent, other = crew.source(MIB), crew.target(MIB), crew.target(MIB)
        silent.process.stop()
        waiting, remote = source.connect(silent.metadata), source.connect(other.metadata)
        source.write(HostWrite(waiting, 1, WHOLE))
        deliver(source, other, HostWrite(remote, 2, WHOLE))
        silent.process.resume()
        assert source.wait(num_ended=1) == [WriteEnded(Op(1))]


@pytest.fixture
def transport() -> Iterator[MooncakeTransport]:
    if MooncakeTransport.missing():
        pytest.skip(str(MooncakeTransport.missing()))
    made = MooncakeTransport(TransportSetup(agent="a", copy=copy_by_memmove))
    yield made
    made.close()


def test_gpu_memory_needs_a_cuda_build(transport: MooncakeTransport) -> None:
    if package.load().SUPPORT_CUDA:
        pytest.skip("this build is for GPUs")
    with pytest.raises(TransportError, match="host memory only"):
        transport.register([Region(4096, 4096, Device("cuda", 0))], writable=True)


def test_a_source_over_tcp_exposes_no_memory(transport: MooncakeTransport) -> None:
    """Anybody who reaches the port can read and write registered memory."""
    memory, loot = transport.allocate(4096), np.zeros(4096, dtype=np.uint8)
    memory[:] = 7
    where = [Region(memory.ctypes.data, memory.nbytes)]
    transport.register(where, writable=False)
    told = msgspec.msgpack.decode(transport.metadata())
    assert told["regions"] == []
    thief = package.start("127.0.0.1", "tcp", "")
    place = f"127.0.0.1:{told['port']}"
    assert thief.transfer_sync_read(place, loot.ctypes.data, where[0].address, 4096) == -1
    assert not loot.any()


def test_writable_memory_is_open_to_anybody(transport: MooncakeTransport) -> None:
    """Shows that the test above can fail."""
    memory, loot = transport.allocate(4096), np.zeros(4096, dtype=np.uint8)
    memory[:] = 7
    transport.register([Region(memory.ctypes.data, memory.nbytes)], writable=True)
    told = msgspec.msgpack.decode(transport.metadata())
    thief = package.start("127.0.0.1", "tcp", "")
    place = f"127.0.0.1:{told['port']}"
    assert thief.transfer_sync_read(place, loot.ctypes.data, memory.ctypes.data, 4096) == 0
    assert loot.tolist() == [7] * 4096


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("libibverbs.so.1: cannot open shared object file"), "install libibverbs1"),
        (ImportError("libcudart.so.12: cannot open"), "mooncake-transfer-engine-non-cuda"),
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'kvferry\[mooncake\]'"),
        (ImportError("something else"), "something else"),
    ],
)
def test_a_failed_import_has_a_remedy(error: ImportError, words: str) -> None:
    assert re.search(words, package.remedy(error))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rail": "3"}, "no option 'rail'; it has protocol, device"),
        ({"protocol": "smoke"}, "must be tcp or rdma, not 'smoke'"),
        (
            {"protocol": "rdma", "device": "none_0"},
            "no RDMA device none_0; name an existing",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], words: str) -> None:
    if MooncakeTransport.missing():
        pytest.skip(str(MooncakeTransport.missing()))
    with pytest.raises(TransportError, match=words):
        MooncakeTransport(TransportSetup(agent="a", copy=copy_by_memmove, options=options))


def test_a_process_with_engines_prints_nothing_and_exits_cleanly() -> None:
    if MooncakeTransport.missing():
        pytest.skip(str(MooncakeTransport.missing()))
    lines = [
        "from kvferry.transports.base import TransportSetup",
        "from kvferry.transports.mooncake.transport import MooncakeTransport",
        "made = [MooncakeTransport(TransportSetup(agent='a', copy=print)) for _ in range(2)]",
        "made[0].close()",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
