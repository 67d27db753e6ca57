"""The cuda transport on a GPU: the conformance suite, forged handles, and lifetimes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.coalesce import Stride
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of, grid
from kvferry.testing.transports.base import KIB, MIB, Cases, Crew, deliver
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.testing.transports.suite import WHOLE
from kvferry.testing.transports.writes import WriteCases
from kvferry.transports.base import WriteEnded
from kvferry.transports.cuda.driver import missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing() is not None, reason=missing() or "all is there"),
]

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class TestCuda(TransportSuite):
    transport = "cuda"
    device = "cuda"


def grown(told: dict[str, Any], by: int) -> dict[str, Any]:
    """Metadata that claims a larger size for every span, or for its last piece."""

    def span(kind: str, size: Any, handle: Any) -> tuple[str, Any, Any]:
        return kind, size + by if kind == "ipc" else [*size[:-1], size[-1] + by], handle

    return {**told, "spans": [span(*each) for each in told["spans"]]}


class ForgingCases(Cases):
    """False metadata is refused, and never leads to writes outside the peer's memory."""

    transport = "cuda"
    device = "cuda"

    @contextlib.contextmanager
    def forged(self, crew: Crew) -> Iterator[tuple[PeerProcess, dict[str, Any]]]:
        """Yield a source and metadata to falsify; afterwards, check the true metadata."""
        source, target = crew.source(MIB), crew.target(4 * MIB, MIB)
        yield source, msgspec.msgpack.decode(target.metadata)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, WHOLE))

    def refuse(self, source: PeerProcess, told: dict[str, Any], sentence: str) -> None:
        with pytest.raises(TransportError, match=sentence):
            source.connect(msgspec.msgpack.encode(told))

    def test_a_claim_of_larger_memory_is_refused(self, crew: Crew) -> None:
        with self.forged(crew) as (source, told):
            for by in (1, 2 * MIB, 1 << 30):
                self.refuse(source, grown(told, by), "smaller than its metadata says|cannot map")

    def test_an_unknown_gpu_is_refused(self, crew: Crew) -> None:
        with self.forged(crew) as (source, told):
            self.refuse(source, {**told, "gpu": bytes(range(16))}, "CUDA_VISIBLE_DEVICES")

    def test_other_regions_of_the_allocation_are_not_written(self, crew: Crew) -> None:
        """Writes stay inside the regions of the metadata."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        for offset in (-1, 1, 2 * MIB, 1 << 40):
            source.write(HostWrite(remote, 1, binding_of([PlacedPiece(0, offset, MIB)])))
            (ended,) = source.wait(num_ended=1)
            assert ended.fate is WriteFate.FAILED
        target.check()

    def test_connections_share_a_mapping(self, crew: Crew) -> None:
        source, target = crew.source(MIB), crew.target(MIB)
        first, second = (source.connect(target.metadata) for _ in range(2))
        source.disconnect(first)
        deliver(source, target, HostWrite(second, 1, WHOLE))
        source.disconnect(second)
        third = source.connect(target.metadata)
        deliver(source, target, HostWrite(third, 2, WHOLE))

    def test_disconnect_with_writes_in_flight(self, crew: Crew) -> None:
        """They complete, and the memory is unmapped after them."""
        source, target = crew.source(64 * MIB), crew.target(64 * MIB)
        remote = source.connect(target.metadata)
        large = grid(1024, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB))
        source.write(*(HostWrite(remote, op, large) for op in range(64)))
        source.disconnect(remote)
        ended = source.wait(num_ended=64)
        assert [(one.op, one.fate) for one in ended] == [(op, None) for op in range(64)]
        again = source.connect(target.metadata)
        target.regions = [source.regions[0].copy()]
        target.regions[0][64 * KIB - 1 :: 64 * KIB] = 0
        target.check()
        source.write(HostWrite(again, 99, WHOLE))
        assert source.wait(num_ended=1) == [WriteEnded(Op(99))]


class TestForging(ForgingCases):
    """Memory of cudaMalloc."""

    def test_empty_handles_are_refused(self, crew: Crew) -> None:
        with self.forged(crew) as (source, told):
            for handle in (bytes(64), bytes(range(64)), b"\xff" * 64):
                spans = [("ipc", size, handle) for _, size, _ in told["spans"]]
                self.refuse(source, {**told, "spans": spans}, "cannot map")

    def test_handles_with_a_flipped_bit(self, crew: Crew) -> None:
        """They are refused, or the driver reports memory of at least the claimed size."""
        with self.forged(crew) as (source, told):
            (_, size, handle), *others = told["spans"]
            for byte in range(64):
                turned = bytearray(handle)
                turned[byte] ^= 1
                with contextlib.suppress(TransportError):
                    forged = {**told, "spans": [("ipc", size, bytes(turned)), *others]}
                    source.disconnect(source.connect(msgspec.msgpack.encode(forged)))


class TestExpandable(ForgingCases, WriteCases):
    """Memory of torch's expandable segments, mapped piece by piece."""

    environment: ClassVar[dict[str, str]] = EXPANDABLE

    def test_spans_are_exported_as_descriptors(self, crew: Crew) -> None:
        target = crew.target(50 * MIB)
        (span,) = msgspec.msgpack.decode(target.metadata)["spans"]
        assert span[0] == "vmm"
        assert len(span[1]) == len(span[2]) > 1, "the pool should lie in several pieces"

    def test_other_descriptors_are_refused(self, crew: Crew) -> None:
        with self.forged(crew) as (source, told):
            for descriptor in (0, 1, 2, 100_000):
                spans = [("vmm", sizes, [descriptor] * len(sizes)) for _, sizes, _ in told["spans"]]
                sentence = "cannot map|no file descriptor"
                self.refuse(source, {**told, "spans": spans}, sentence)

    def test_other_processes_are_refused(self, crew: Crew) -> None:
        with self.forged(crew) as (source, told):
            self.refuse(source, {**told, "pid": os.getpid()}, "has ended")
            self.refuse(source, {**told, "began": told["began"] + 1}, "has ended")

    def test_another_processs_memory_is_refused(self, crew: Crew) -> None:
        """A peer claims another target's memory."""
        with self.forged(crew) as (source, told):
            other = msgspec.msgpack.decode(crew.target(MIB).metadata)
            stolen = ("pid", "began", "proof", "spans", "regions")
            theirs = {**told, **{name: other[name] for name in stolen}}
            self.refuse(source, theirs, "is not the peer")

    def test_reordered_pieces_stay_inside_the_peers_memory(self, crew: Crew) -> None:
        source, target = crew.source(MIB), crew.target(50 * MIB)
        told = msgspec.msgpack.decode(target.metadata)
        (_, sizes, descriptors) = told["spans"][0]
        spans = [("vmm", sizes, descriptors[::-1])]
        remote = source.connect(msgspec.msgpack.encode({**told, "spans": spans}))
        source.write(HostWrite(remote, 1, WHOLE))
        assert source.wait(num_ended=1) == [WriteEnded(Op(1))]

    def test_a_dead_peers_memory_stays_mapped(self, crew: Crew) -> None:
        """Its memory stays while it is mapped; new connections are refused."""
        source, late = crew.source(MIB), crew.source(MIB)
        victim = crew.target(MIB)
        remote = source.connect(victim.metadata)
        deliver(source, victim, HostWrite(remote, 1, WHOLE))
        victim.process.kill()
        source.write(HostWrite(remote, 2, WHOLE))
        assert source.wait(num_ended=1) == [WriteEnded(Op(2))]
        with pytest.raises(TransportError, match=r"has ended|cannot find"):
            late.connect(victim.metadata)


def registered(code: str, **environment: str) -> str:
    """Return the output of registering a pool in a separate process."""
    script = (
        "import torch\n"
        "from kvferry.errors import TransportError\n"
        "from kvferry.regions import Device, Region\n"
        "from kvferry.transports.base import TransportSetup\n"
        "from kvferry.transports.cuda.transport import CudaTransport\n"
        f"{code}\n"
        "transport = CudaTransport(TransportSetup(agent='a', copy=print))\n"
        "region = Region(pool.data_ptr(), pool.numel(), Device('cuda'))\n"
        "try:\n"
        "    transport.register([region], writable=True)\n"
        "    print('taken')\n"
        "except TransportError as error:\n"
        "    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )
    return told.stdout.strip() or told.stderr


def test_memory_of_another_allocator_is_refused_with_the_setting() -> None:
    code = "pool = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')"
    told = registered(code, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert "PYTORCH_CUDA_ALLOC_CONF=backend:native" in told


def test_too_few_file_descriptors_are_refused_with_the_limit() -> None:
    code = (
        "import resource\n"
        "pool = torch.empty(4 << 30, dtype=torch.uint8, device='cuda')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    )
    assert "ulimit -n" in registered(code, **EXPANDABLE)
