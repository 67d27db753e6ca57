"""The cuda transport without a GPU: what it decides, and what it says where it can't work."""

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
from kvferry.transports import descriptors
from kvferry.transports.base import TransportSetup
from kvferry.transports.cuda import CudaTransport
from kvferry.transports.cuda.exports import Backing, IpcSpan, SpanPlace, VmmSpan, lay_out
from kvferry.transports.cuda.maps import Exporter, demand_proof
from kvferry.transports.cuda.waiter import Waiter

GPU = Device("cuda")
MIB = 1 << 20


def transport() -> CudaTransport:
    return CudaTransport(TransportSetup(agent="test", copy=copy_by_memmove))


def reader(*backings: Backing) -> Callable[[int], Backing]:
    """The driver's answer to what lies around an address."""

    def backing_at(address: int) -> Backing:
        return next(one for one in backings if one.address <= address < one.end)

    return backing_at


class TestArranging:
    """Which handles stand for which regions."""

    def test_many_pools_in_one_allocation_take_one_handle(self) -> None:
        whole = Backing(1000, 500, joins=False)
        regions = [Region(1000, 100, GPU), Region(1200, 50, GPU), Region(1250, 250, GPU)]
        arranged = lay_out(regions, reader(whole))
        assert arranged.spans == [[whole]]
        assert arranged.places == [
            SpanPlace(0, 0, 100),
            SpanPlace(0, 200, 50),
            SpanPlace(0, 250, 250),
        ]

    def test_pieces_under_a_pool_are_one_span(self) -> None:
        pieces = [Backing(20 * i, 20, joins=True) for i in range(5)]
        arranged = lay_out([Region(30, 45, GPU)], reader(*pieces))
        assert arranged.spans == [pieces[1:4]]
        assert arranged.places == [SpanPlace(0, 10, 45)]

    def test_pieces_with_a_gap_are_two_spans(self) -> None:
        pieces = [Backing(0, 20, joins=True), Backing(20, 20, True), Backing(60, 20, True)]
        arranged = lay_out([Region(60, 20, GPU), Region(0, 40, GPU)], reader(*pieces))
        assert arranged.spans == [pieces[:2], pieces[2:]]
        assert arranged.places == [SpanPlace(1, 0, 20), SpanPlace(0, 0, 40)]

    def test_allocations_that_touch_stay_apart(self) -> None:
        """A peer maps each wherever it likes."""
        both = [Backing(0, 20, joins=False), Backing(20, 20, joins=False)]
        assert lay_out([Region(5, 5, GPU), Region(25, 5, GPU)], reader(*both)).spans == [
            both[:1],
            both[1:],
        ]
        with pytest.raises(TransportError, match="lies in several allocations; allocate it at on"):
            lay_out([Region(15, 10, GPU)], reader(*both))

    def test_an_empty_region_needs_nothing(self) -> None:
        assert lay_out([Region(0, 0, GPU)], reader()) == ([], [SpanPlace(0, 0, 0)])

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1),
        st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), max_size=6),
    )
    def test_every_byte_keeps_its_distance(
        self, shape: list[tuple[int, int, bool]], wanted: list[tuple[int, int]]
    ) -> None:
        """Byte ``i`` of a region is byte ``offset + i`` of its span, whatever lies around it."""
        backings, at = [], 0
        for gap, num_bytes, joins in shape:
            backings.append(Backing(at + gap, num_bytes, joins))
            at += gap + num_bytes
        owned = {byte for one in backings for byte in range(one.address, one.end)}
        regions = [
            Region(address, size, GPU)
            for address, size in wanted
            if owned.issuperset(range(address, address + size))
        ]
        try:
            arranged = lay_out(regions, reader(*backings))
        except TransportError:
            assert any(not one.joins for one in backings)
            return
        for region, place in zip(regions, arranged.places, strict=True):
            bytes_of_span = [
                byte for one in arranged.spans[place.span] for byte in range(one.address, one.end)
            ]
            there = bytes_of_span[place.offset : place.end]
            assert there == list(range(region.address, region.end))


class TestRefusing:
    """What can be refused without a GPU."""

    def test_host_memory(self) -> None:
        with pytest.raises(TransportError, match="GPU memory only; use shm or nixl"):
            transport().register([Region(4096, 10)], writable=True)

    def test_two_gpus(self) -> None:
        regions = [Region(4096, 10, Device("cuda", i)) for i in range(2)]
        with pytest.raises(TransportError, match="one GPU, not of 2; use one endpoint for each"):
            transport().register(regions, writable=True)

    def test_a_setup_without_copies_on_gpus(self) -> None:
        with pytest.raises(TransportError, match="no copies on cuda:0; give it copies_on"):
            transport().setup.copies_on(GPU)

    def test_an_unknown_option(self) -> None:
        setup = TransportSetup(agent="test", copy=copy_by_memmove, options={"rail": "1"})
        with pytest.raises(TransportError, match="has no option 'rail'"):
            CudaTransport(setup)

    @pytest.mark.parametrize(
        ("spans", "place", "sentence"),
        [
            ([], (0, 0, 1), "names memory that it does not list"),
            ([("ipc", 100, bytes(64))], (0, 90, 11), "a region beyond its memory's end"),
            ([("vmm", (60, 40), (3, 4))], (0, 1, 100), "a region beyond its memory's end"),
            ([("vmm", (60, 40), (3,))], (0, 0, 1), "can't be read"),
            ([("ipc", 100, bytes(63))], (0, 0, 1), "can't be read"),
            ([("ipc", -1, bytes(64))], (0, 0, 1), "can't be read"),
            ([("fax", 100, bytes(64))], (0, 0, 1), "can't be read"),
            ([("ipc", 100, bytes(64))], (0, -1, 1), "can't be read"),
            ([("ipc", 100, bytes(64))], (0, 1 << 62, 1), "can't be read"),
        ],
    )
    def test_metadata_that_contradicts_itself(
        self, spans: object, place: tuple[int, int, int], sentence: str
    ) -> None:
        """Before any handle is opened."""
        key = bytes(16)
        told = {"type": "cuda", "life": key, "proof": 3, "pid": 1, "began": 1, "gpu": key}
        metadata = msgspec.msgpack.encode({**told, "spans": spans, "regions": [place]})
        with pytest.raises(TransportError, match=sentence):
            transport().connect(metadata)

    def test_spans_can_be_read_again(self) -> None:
        for span in (IpcSpan(100, bytes(64)), VmmSpan((60, 40), (3, 4))):
            packed = msgspec.msgpack.encode(span)
            assert msgspec.msgpack.decode(packed, type=IpcSpan | VmmSpan) == span

    def test_what_is_missing_is_a_sentence(self) -> None:
        missing = CudaTransport.missing()
        assert missing is None or missing.endswith(
            ("pip install 'kvferry[cuda]'", "use shm or nixl without GPUs")
        )

    def test_processes_of_one_host_have_one_realm(self) -> None:
        code = (
            "from kvferry.transports.base import TransportSetup; "
            "from kvferry.transports.cuda.transport import CudaTransport; "
            "print(CudaTransport(TransportSetup(agent='a', copy=print)).realm)"
        )
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == transport().realm


class TestDescriptors:
    """Files of another process."""

    def child(self) -> subprocess.Popen[str]:
        """A process that waits with a file of its own, whose number it prints."""
        code = (
            "import os, sys; read, write = os.pipe(); os.write(write, b'taken'); "
            "print(read, flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    def test_one_is_taken_and_others_are_refused(self) -> None:
        with self.child() as child:
            assert child.stdout is not None
            descriptor = int(child.stdout.readline())
            began = descriptors.started(child.pid)
            with pytest.raises(TransportError, match="has ended"):
                descriptors.DescriptorHolder(child.pid, began + 1)
            before = len(os.listdir("/proc/self/fd"))
            with descriptors.DescriptorHolder(child.pid, began) as holder:
                taken = holder.fetch(descriptor)
                assert os.read(taken, 10) == b"taken"
                assert not os.get_inheritable(taken)
                os.close(taken)
                with pytest.raises(TransportError, match="no file descriptor 999 for us"):
                    holder.fetch(999)
            assert len(os.listdir("/proc/self/fd")) == before
            child.kill()
        with pytest.raises(TransportError, match="has ended"):
            descriptors.DescriptorHolder(child.pid, began)


class TestProof:
    """A process is the peer only if it has the peer's secret."""

    @pytest.fixture
    def secret(self) -> Iterator[tuple[int, bytes]]:
        descriptor, secret = os.memfd_create("test"), os.urandom(16)
        os.write(descriptor, secret)
        yield descriptor, secret
        os.close(descriptor)

    def demand(self, secret: bytes, proof: int) -> None:
        pid, began = os.getpid(), descriptors.started(os.getpid())
        with descriptors.DescriptorHolder(pid, began) as holder:
            demand_proof(holder, Exporter(pid, began, secret, proof))

    def test_the_secret_proves_it(self, secret: tuple[int, bytes]) -> None:
        descriptor, known = secret
        before = len(os.listdir("/proc/self/fd"))
        self.demand(known, descriptor)
        with pytest.raises(TransportError, match="is not the peer"):
            self.demand(bytes(16), descriptor)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_nothing_else_does(self, secret: tuple[int, bytes]) -> None:
        """Nor is anything waited for: a pipe that nobody writes to, a folder, nothing."""
        read, write = os.pipe()
        folder = os.open("/", os.O_RDONLY)
        for descriptor in (read, write, folder):
            with pytest.raises(TransportError, match="is not the peer"):
                self.demand(secret[1], descriptor)
            os.close(descriptor)
        with pytest.raises(TransportError, match="no file descriptor"):
            self.demand(secret[1], 100_000)


class TestWaiter:
    """A thread that sleeps until copies end."""

    def test_ends_are_told_in_order_and_failures_are_sentences(self) -> None:
        gates = [threading.Event() for _ in range(3)]
        told = threading.Semaphore(0)
        waiter: Waiter[int] = Waiter(told.release, "waiter")

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
