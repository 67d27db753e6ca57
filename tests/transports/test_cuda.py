"""The parts of the cuda transport that work without a GPU: layout, refusals, descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.regions import Device, Region
from kvferry.testing.transports import copy_by_memmove
from kvferry.transports.base import TransportSetup
from kvferry.transports.cuda import CudaTransport
from kvferry.transports.cuda.copy_waiter import CopyWaiter
from kvferry.transports.cuda.exports import Allocation, IpcSpan, SpanPlace, VmmSpan, lay_out
from kvferry.transports.cuda.maps import Exporter, demand_proof
from kvferry.transports.cuda.pidfd import PidFd, start_ticks

GPU = Device("cuda")
MIB = 1 << 20


def transport() -> CudaTransport:
    return CudaTransport(TransportSetup(agent="test", copy=copy_by_memmove))


def reader(*allocations: Allocation) -> Callable[[int], Allocation]:
    """Return a function that finds the allocation around an address, as the driver does."""

    def allocation_at(address: int) -> Allocation:
        return next(one for one in allocations if one.address <= address < one.end)

    return allocation_at


class TestLayOut:
    """Which handles cover which regions."""

    def test_pools_in_one_allocation_share_a_handle(self) -> None:
        whole = Allocation(1000, 500, joins=False)
        regions = [Region(1000, 100, GPU), Region(1200, 50, GPU), Region(1250, 250, GPU)]
        arranged = lay_out(regions, reader(whole))
        assert arranged.spans == [[whole]]
        assert arranged.places == [
            SpanPlace(0, 0, 100),
            SpanPlace(0, 200, 50),
            SpanPlace(0, 250, 250),
        ]

    def test_pieces_under_a_pool_are_one_span(self) -> None:
        pieces = [Allocation(20 * i, 20, joins=True) for i in range(5)]
        arranged = lay_out([Region(30, 45, GPU)], reader(*pieces))
        assert arranged.spans == [pieces[1:4]]
        assert arranged.places == [SpanPlace(0, 10, 45)]

    def test_pieces_with_a_gap_are_two_spans(self) -> None:
        pieces = [Allocation(0, 20, joins=True), Allocation(20, 20, True), Allocation(60, 20, True)]
        arranged = lay_out([Region(60, 20, GPU), Region(0, 40, GPU)], reader(*pieces))
        assert arranged.spans == [pieces[:2], pieces[2:]]
        assert arranged.places == [SpanPlace(1, 0, 20), SpanPlace(0, 0, 40)]

    def test_adjacent_allocations_stay_separate_spans(self) -> None:
        """A peer may map them anywhere."""
        both = [Allocation(0, 20, joins=False), Allocation(20, 20, joins=False)]
        assert lay_out([Region(5, 5, GPU), Region(25, 5, GPU)], reader(*both)).spans == [
            both[:1],
            both[1:],
        ]
        with pytest.raises(TransportError, match="lies in several allocations; allocate it as on"):
            lay_out([Region(15, 10, GPU)], reader(*both))

    def test_an_empty_region_needs_no_handle(self) -> None:
        assert lay_out([Region(0, 0, GPU)], reader()) == ([], [SpanPlace(0, 0, 0)])

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1),
        st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), max_size=6),
    )
    def test_every_byte_keeps_its_offset(
        self, shape: list[tuple[int, int, bool]], wanted: list[tuple[int, int]]
    ) -> None:
        """Byte ``i`` of a region is byte ``offset + i`` of its span."""
        allocations, at = [], 0
        for gap, num_bytes, joins in shape:
            allocations.append(Allocation(at + gap, num_bytes, joins))
            at += gap + num_bytes
        owned = {byte for one in allocations for byte in range(one.address, one.end)}
        regions = [
            Region(address, size, GPU)
            for address, size in wanted
            if owned.issuperset(range(address, address + size))
        ]
        try:
            arranged = lay_out(regions, reader(*allocations))
        except TransportError:
            assert any(not one.joins for one in allocations)
            return
        for region, place in zip(regions, arranged.places, strict=True):
            bytes_of_span = [
                byte for one in arranged.spans[place.span] for byte in range(one.address, one.end)
            ]
            there = bytes_of_span[place.offset : place.end]
            assert there == list(range(region.address, region.end))


class TestRefusals:
    """Refusals that need no GPU."""

    def test_host_memory_is_refused(self) -> None:
        with pytest.raises(TransportError, match="GPU memory only; use shm or nixl"):
            transport().register([Region(4096, 10)], writable=True)

    def test_two_gpus_are_refused(self) -> None:
        regions = [Region(4096, 10, Device("cuda", i)) for i in range(2)]
        with pytest.raises(TransportError, match="one GPU, not of 2; use one endpoint per GPU"):
            transport().register(regions, writable=True)

    def test_a_setup_without_gpu_copies_is_refused(self) -> None:
        with pytest.raises(TransportError, match="cannot copy on cuda:0; set copies_on"):
            transport().setup.copies_on(GPU)

    def test_an_unknown_option_is_refused(self) -> None:
        setup = TransportSetup(agent="test", copy=copy_by_memmove, options={"rail": "1"})
        with pytest.raises(TransportError, match="has no option 'rail'"):
            CudaTransport(setup)

    @pytest.mark.parametrize(
        ("spans", "place", "sentence"),
        [
            ([], (0, 0, 1), "a region outside its spans"),
            ([("ipc", 100, bytes(64))], (0, 90, 11), "a region outside its spans"),
            ([("vmm", (60, 40), (3, 4))], (0, 1, 100), "a region outside its spans"),
            ([("vmm", (60, 40), (3,))], (0, 0, 1), "cannot read"),
            ([("ipc", 100, bytes(63))], (0, 0, 1), "cannot read"),
            ([("ipc", -1, bytes(64))], (0, 0, 1), "cannot read"),
            ([("fax", 100, bytes(64))], (0, 0, 1), "cannot read"),
            ([("ipc", 100, bytes(64))], (0, -1, 1), "cannot read"),
            ([("ipc", 100, bytes(64))], (0, 1 << 62, 1), "cannot read"),
        ],
    )
    def test_inconsistent_metadata_is_refused(
        self, spans: object, place: tuple[int, int, int], sentence: str
    ) -> None:
        """It is refused before any handle is opened."""
        key = bytes(16)
        told = {"type": "cuda", "life": key, "proof": 3, "pid": 1, "began": 1, "gpu": key}
        metadata = msgspec.msgpack.encode({**told, "spans": spans, "regions": [place]})
        with pytest.raises(TransportError, match=sentence):
            transport().connect(metadata)

    def test_spans_survive_encoding(self) -> None:
        for span in (IpcSpan(100, bytes(64)), VmmSpan((60, 40), (3, 4))):
            packed = msgspec.msgpack.encode(span)
            assert msgspec.msgpack.decode(packed, type=IpcSpan | VmmSpan) == span

    def test_missing_names_the_remedy(self) -> None:
        missing = CudaTransport.missing()
        assert missing is None or missing.endswith(
            ("pip install 'kvferry[cuda]'", "use shm or nixl without GPUs")
        )

    def test_processes_of_one_host_share_a_realm(self) -> None:
        code = (
            "from kvferry.transports.base import TransportSetup; "
            "from kvferry.transports.cuda.transport import CudaTransport; "
            "print(CudaTransport(TransportSetup(agent='a', copy=print)).realm)"
        )
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == transport().realm


class TestPidFd:
    """File descriptors of another process."""

    def child(self) -> subprocess.Popen[str]:
        """A process that prints the number of an open pipe and waits."""
        code = (
            "import os, sys; read, write = os.pipe(); os.write(write, b'taken'); "
            "print(read, flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    def test_fetch_duplicates_a_descriptor(self) -> None:
        with self.child() as child:
            assert child.stdout is not None
            descriptor = int(child.stdout.readline())
            began = start_ticks(child.pid)
            with pytest.raises(TransportError, match="has ended"):
                PidFd(child.pid, began + 1)
            before = len(os.listdir("/proc/self/fd"))
            with PidFd(child.pid, began) as holder:
                taken = holder.fetch(descriptor)
                assert os.read(taken, 10) == b"taken"
                assert not os.get_inheritable(taken)
                os.close(taken)
                with pytest.raises(TransportError, match="no file descriptor 999"):
                    holder.fetch(999)
            assert len(os.listdir("/proc/self/fd")) == before
            child.kill()
        with pytest.raises(TransportError, match="has ended"):
            PidFd(child.pid, began)


class TestProof:
    """A process is the peer only if it has the peer's secret."""

    @pytest.fixture
    def secret(self) -> Iterator[tuple[int, bytes]]:
        descriptor, secret = os.memfd_create("test"), os.urandom(16)
        os.write(descriptor, secret)
        yield descriptor, secret
        os.close(descriptor)

    def demand(self, secret: bytes, proof: int) -> None:
        pid, began = os.getpid(), start_ticks(os.getpid())
        with PidFd(pid, began) as holder:
            demand_proof(holder, Exporter(pid, began, secret, proof))

    def test_the_secret_is_accepted(self, secret: tuple[int, bytes]) -> None:
        descriptor, known = secret
        before = len(os.listdir("/proc/self/fd"))
        self.demand(known, descriptor)
        with pytest.raises(TransportError, match="is not the peer"):
            self.demand(bytes(16), descriptor)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_anything_else_is_refused(self, secret: tuple[int, bytes]) -> None:
        """Without blocking: an empty pipe, a folder, and a descriptor that is not open."""
        read, write = os.pipe()
        folder = os.open("/", os.O_RDONLY)
        for descriptor in (read, write, folder):
            with pytest.raises(TransportError, match="is not the peer"):
                self.demand(secret[1], descriptor)
            os.close(descriptor)
        with pytest.raises(TransportError, match="no file descriptor"):
            self.demand(secret[1], 100_000)


class TestCopyWaiter:
    """The thread that sleeps until copies complete."""

    def test_copies_are_reported_in_order_with_their_errors(self) -> None:
        gates = [threading.Event() for _ in range(3)]
        told = threading.Semaphore(0)
        waiter: CopyWaiter[int] = CopyWaiter(told.release, "waiter")

        def wait(number: int) -> None:
            assert gates[number].wait(30)
            if number == 1:
                raise RuntimeError("CUDA error: an illegal memory access")

        for number in range(3):
            waiter.watch(number, partial(wait, number))
        assert waiter.ended() == []
        gates[0].set()
        assert told.acquire(timeout=30)
        assert waiter.ended() == [(0, "")]
        gates[1].set()
        assert told.acquire(timeout=30)
        ((number, problem),) = waiter.ended()
        assert number == 1
        assert "an illegal memory access" in problem
        assert "restart this process" in problem
        gates[2].set()
        waiter.close()
        assert waiter.ended() == [(2, "")]
