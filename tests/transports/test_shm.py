"""The shared-memory transport: conformance, memory, connecting and copying."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transports.shm_scripts import PAGE, exists, make, names_of, region_of, run

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Device, Region
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of, copy_by_memmove
from kvferry.transports import segments
from kvferry.transports.base import WriteEnded
from kvferry.transports.segments import SharedFile
from kvferry.transports.shm import ShmTransport


class TestConformance(TransportSuite):
    transport = "shm"


@pytest.fixture
def ours() -> Iterator[ShmTransport]:
    transport = make()
    yield transport
    transport.close()


@pytest.fixture
def theirs() -> Iterator[ShmTransport]:
    transport = make()
    yield transport
    transport.close()


class TestMemory:
    @pytest.mark.parametrize("num_bytes", [0, 1, PAGE, 10 * PAGE + 1])
    def test_allocated_memory_is_zeroed_aligned_and_writable(
        self, ours: ShmTransport, num_bytes: int
    ) -> None:
        array = ours.allocate(num_bytes)
        assert array.shape == (num_bytes,)
        assert not array.any()
        assert array.ctypes.data % PAGE == 0
        array[:] = 7
        assert np.all(array == 7)

    def test_writable_memory_must_be_shared(self, ours: ShmTransport) -> None:
        with pytest.raises(TransportError, match=r"100 bytes is not in shared.*allocate\(\)"):
            ours.register([region_of(np.zeros(100, dtype=np.uint8))], writable=True)

    @pytest.mark.parametrize(("start", "num_bytes"), [(-1, 10), (PAGE - 9, 10), (0, PAGE + 1)])
    def test_a_region_must_lie_inside_a_segment(
        self, ours: ShmTransport, start: int, num_bytes: int
    ) -> None:
        address = ours.allocate(PAGE).ctypes.data
        with pytest.raises(TransportError, match="not in shared memory"):
            ours.register([Region(address + start, num_bytes)], writable=True)

    def test_torch_tensors_are_moved_with_their_views(
        self, ours: ShmTransport, theirs: ShmTransport
    ) -> None:
        cache = torch.arange(6 * PAGE, dtype=torch.int32)
        low, high = cache[: 2 * PAGE], cache[3 * PAGE :].view(3, PAGE)[:, 5:]
        theirs.adopt([low, high, np.zeros(3)])
        assert torch.equal(cache, torch.arange(6 * PAGE, dtype=torch.int32))
        address, num_bytes = low.data_ptr(), 4 * low.numel()
        theirs.register([Region(address, num_bytes), Region(high.data_ptr(), 4)], writable=True)
        assert len(names_of(theirs)) == 1
        values = np.array([7, 8], dtype=np.int32)
        ours.register([region_of(values.view(np.uint8))], writable=False)
        pieces = binding_of([PlacedPiece(0, 8, 4), PlacedPiece(4, 0, 4, 0, 1)])
        assert ours.write_now(ours.connect(theirs.metadata()), Op(1), pieces) == WriteEnded(
            Op(1), None
        )
        assert cache[[2, 3 * PAGE + 5]].tolist() == [7, 8]
        before = high.data_ptr()
        theirs.adopt([high])
        assert high.data_ptr() == before, "shared memory is not moved again"
        name = names_of(theirs)[0]
        theirs.close()
        assert not exists(name)

    def test_adjacent_mappings_of_a_file_are_joined(self) -> None:
        lines = [
            "7f0000000000-7f0000002000 rw-s 00001000 00:1b 5    /dev/shm/torch_1",
            "7f0000002000-7f0000004000 rw-s 00003000 00:1b 5    /dev/shm/torch_1",
            "7f0000004000-7f0000005000 rw-s 00009000 00:1b 5    /dev/shm/torch_1",
            "7f0000005000-7f0000006000 rw-s 00000000 00:1b 6    /dev/shm/torch_2 (deleted)",
            "7f0000006000-7f0000007000 rw-p 00000000 00:1b 7    /dev/shm/torch_3",
            "7f0000007000-7f0000008000 rw-p 00000000 00:00 0",
        ]
        start = 0x7F0000000000
        assert segments.shared_files(lines) == [
            SharedFile(start, 4 * PAGE, PAGE, "/dev/shm/torch_1"),
            SharedFile(start + 4 * PAGE, PAGE, 9 * PAGE, "/dev/shm/torch_1"),
        ]

    def test_a_source_may_use_any_host_memory(self, ours: ShmTransport) -> None:
        ours.register([region_of(np.zeros(100, dtype=np.uint8))], writable=False)
        assert names_of(ours) == []

    @pytest.mark.parametrize("writable", [True, False])
    def test_a_gpu_is_refused(self, ours: ShmTransport, writable: bool) -> None:
        with pytest.raises(TransportError, match="host memory only; use cuda or nixl"):
            ours.register([Region(4096, 100, Device("cuda", 1))], writable=writable)

    def test_regions_keep_their_order(self, ours: ShmTransport, theirs: ShmTransport) -> None:
        first, second = theirs.allocate(PAGE), theirs.allocate(2 * PAGE)
        parts = [second[PAGE:], first[100:200], second[:50], first[:100]]
        theirs.register([region_of(part) for part in parts], writable=True)
        data = np.arange(40, dtype=np.uint8)
        ours.register([region_of(data)], writable=False)
        pieces = [PlacedPiece(10 * i, i, 10, target_region=i) for i in range(4)]
        ours.write(ours.connect(theirs.metadata()), Op(1), binding_of(pieces))
        assert ours.poll() == [WriteEnded(Op(1))]
        for i, part in enumerate(parts):
            assert part[i : i + 10].tolist() == list(range(10 * i, 10 * i + 10))

    def test_too_large_an_allocation_is_refused(self, ours: ShmTransport) -> None:
        mounted = Path("/dev/shm")
        if not mounted.is_dir() or not os.statvfs(mounted).f_blocks:
            pytest.skip("this machine has no limit on shared memory")
        with pytest.raises(TransportError, match=r"no room for \d+ bytes; enlarge /dev/shm"):
            ours.allocate(1 << 50)
        assert ours.allocate(PAGE).nbytes == PAGE


class TestConnecting:
    @staticmethod
    def metadata(names: Sequence[str], regions: Sequence[tuple[int, int, int]]) -> bytes:
        body = {"type": "shm", "segments": names, "regions": regions}
        return msgspec.msgpack.encode(body)

    def test_a_missing_segment_is_refused(self, ours: ShmTransport) -> None:
        metadata = self.metadata(["/kvferry-0123456789abcdef"], [(0, 0, 10)])
        with pytest.raises(TransportError, match=r"cannot be opened .* has ended, or"):
            ours.connect(metadata)

    @pytest.mark.parametrize("name", ["/psm_1234", "/../etc/passwd", "", "/kvferry-\0", "x" * 300])
    def test_only_kvferry_names_are_opened(self, ours: ShmTransport, name: str) -> None:
        with pytest.raises(TransportError, match="cannot read"):
            ours.connect(self.metadata([name], []))

    @pytest.mark.parametrize(
        "region",
        [
            (0, 0, 2**40),
            (0, 2**61, 2**61),
            (0, PAGE, 2**16),
            (1, 0, 1),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, -1),
            (0, 2**63, 1),
        ],
    )
    def test_regions_must_lie_in_their_segments(
        self, ours: ShmTransport, theirs: ShmTransport, region: tuple[int, int, int]
    ) -> None:
        theirs.register([region_of(theirs.allocate(PAGE))], writable=True)
        with pytest.raises(TransportError):
            ours.connect(self.metadata(names_of(theirs), [region]))

    def test_another_users_segment_is_refused(self) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can become another user")
        result = run("""
            array = registered(1 << 20)
            if os.fork() == 0:
                os.setuid(65534)
                try:
                    transport.connect(transport.metadata())
                except Exception as error:
                    print(type(error).__name__, error)
                sys.exit(0)
            os.wait()
        """)
        assert result.stdout.startswith("TransportError the peer's shared memory belongs to")

    def test_nothing_is_mapped_when_connecting_fails(
        self, ours: ShmTransport, theirs: ShmTransport
    ) -> None:
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("only Linux lists mappings")
        theirs.register([region_of(theirs.allocate(PAGE))], writable=True)
        names = [*names_of(theirs), "/kvferry-0123456789abcdef"]
        before = maps.read_text().count(names[0])
        with pytest.raises(TransportError):
            ours.connect(self.metadata(names, [(0, 0, 1)]))
        assert maps.read_text().count(names[0]) == before


def test_an_exception_in_a_copy_fails_only_its_write(theirs: ShmTransport) -> None:
    def copy(binding: Binding, sources: Sequence[int], targets: Sequence[int]) -> None:
        if binding.num_bytes == 13:
            raise ArithmeticError("thirteen")
        copy_by_memmove(binding, sources, targets)

    array = theirs.allocate(PAGE)
    theirs.register([region_of(array)], writable=True)
    ours, data = make(copy), np.ones(PAGE, dtype=np.uint8)
    ours.register([region_of(data)], writable=False)
    called: list[int] = []
    ours.on_completion = lambda: called.append(len(called))
    remote = ours.connect(theirs.metadata())
    ours.write(remote, Op(1), binding_of([PlacedPiece(0, 0, 13)]))
    ours.write(remote, Op(2), binding_of([PlacedPiece(0, 0, 14)]))
    assert ours.poll() == [
        WriteEnded(Op(1), WriteFate.FAILED, "copying failed (ArithmeticError: thirteen)"),
        WriteEnded(Op(2)),
    ]
    assert called == [0, 1]
    assert array.sum() == 14
    ours.close()


def test_a_write_after_disconnect_or_close_fails(ours: ShmTransport, theirs: ShmTransport) -> None:
    array = theirs.allocate(PAGE)
    theirs.register([region_of(array)], writable=True)
    ours.register([region_of(np.ones(PAGE, dtype=np.uint8))], writable=False)
    remote = ours.connect(theirs.metadata())
    ours.disconnect(remote)
    ours.write(remote, Op(1), binding_of([PlacedPiece(0, 0, 10)]))
    remote = ours.connect(theirs.metadata())
    ours.close()
    ours.write(remote, Op(2), binding_of([PlacedPiece(0, 0, 10)]))
    assert [ended.fate for ended in ours.poll()] == [WriteFate.FAILED, WriteFate.FAILED]
    assert not array.any()


class TestSeparateDevShm:
    """A process with its own /dev/shm of 1 MiB, as in a container."""

    @pytest.fixture
    def apart(self) -> list[str]:
        mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
        before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
        try:
            subprocess.run([*before, "true"], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this machine does not allow mount namespaces")
        return before

    def test_the_realm_differs(self, ours: ShmTransport, apart: list[str]) -> None:
        body = "print(transport.realm)"
        assert run(body).stdout.strip() == ours.realm
        result = run(body, *apart)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip() != ours.realm
        assert result.stdout.startswith("shm:")

    def test_too_large_an_allocation_fails_at_once(self, apart: list[str]) -> None:
        body = """
            try:
                transport.allocate(2 << 20)
            except Exception as error:
                print(type(error).__name__, error)
            registered(1 << 19)[:] = 1
        """
        result = run(body, *apart)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("TransportError shared memory has no room for 2097152 b")
