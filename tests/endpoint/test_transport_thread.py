"""The transport thread with a transport that records its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import pytest
from endpoint.jobs import direct

from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.link_costs import STEPS, Calibration
from kvferry.endpoint.transport_thread import (
    Measured,
    Reached,
    TransportResult,
    TransportThread,
)
from kvferry.errors import TransportError
from kvferry.ids import Op, Peer, Session
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.plan.cost import LinkCost
from kvferry.plan.places import Base
from kvferry.protocol.events import MemoryReached, WriteFate
from kvferry.protocol.messages import TransportOffer
from kvferry.regions import Region
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.mailbox import Mailbox

ONE, TWO = Session(1, 1), Session(1, 2)
BASES = Base(0, 0, 0), Base(0, 0, 0)
BULK = Binding.bulk(*BASES, 4096)
CONSTANTS = LinkCost(descriptor_s=1.0, bytes_per_s=1.0, copy_bytes_per_s=1.0)
WAIT_S = 15.0


class RecordingTransport(Transport):
    """Ends each write at the next poll, with the fate that a test sets."""

    name: ClassVar[str] = "diary"

    def __init__(self) -> None:
        super().__init__(TransportSetup(agent="diary", copy=copy_binding))
        self.asked: list[str] = []
        self.fate: WriteFate | None = None
        self.ended: list[WriteEnded] = []

    @classmethod
    def missing(cls) -> str | None:
        return None

    def register(self, regions: Sequence[Region], *, writable: bool) -> None: ...

    def metadata(self) -> bytes:
        return b""

    def connect(self, metadata: bytes) -> RemoteMemory:
        if metadata == b"garbage":
            raise TransportError("that is garbage")
        return RemoteMemory()

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        self.asked.append(f"write {op}")
        self.ended.append(WriteEnded(op, self.fate, "as told"))

    def poll(self) -> list[WriteEnded]:
        ended, self.ended = self.ended, []
        return ended

    def disconnect(self, remote: RemoteMemory) -> None:
        self.asked.append("disconnect")

    def close(self) -> None:
        self.asked.append("close")


class Bench(NamedTuple):
    """A transport thread, its transport, and its results."""

    transport_thread: TransportThread
    diary: RecordingTransport
    results: Mailbox[TransportResult]

    def reach(self, session: Session = ONE) -> None:
        self.transport_thread.reach(session, [TransportOffer("diary", "")])
        assert isinstance(self.results.get(WAIT_S), Reached)

    def write(self, op: int, session: Session = ONE) -> WriteJob:
        job = direct(op, BULK, session)
        self.transport_thread.write(job)
        assert self.results.get(WAIT_S) is job
        assert job.is_over
        return job


@pytest.fixture
def bench() -> Iterator[Bench]:
    diary, results = RecordingTransport(), Mailbox[TransportResult]()
    bench = Bench(TransportThread([diary], results.put, Peer("p", 0)), diary, results)
    bench.transport_thread.start()
    yield bench
    bench.transport_thread.close()
    assert diary.asked[-1] == "close"


@pytest.mark.parametrize("fate", [None, *WriteFate])
def test_the_result_of_a_write_has_its_fate_and_size(bench: Bench, fate: WriteFate | None) -> None:
    bench.reach()
    bench.diary.fate = fate
    end = bench.write(3)
    assert (end.op, end.fate, end.detail) == (3, fate, "as told")
    assert (end.mode, end.num_bytes, end.num_pieces) == (TransferMode.RUNS, 4096, 1)


def test_no_write_of_a_cut_session_starts(bench: Bench) -> None:
    for session in (ONE, TWO):
        bench.reach(session)
    bench.transport_thread.cut(ONE)
    assert bench.write(1).fate is WriteFate.FAILED
    bench.transport_thread.measure(ONE, Calibration(*BASES), CONSTANTS)
    assert bench.write(2, TWO).fate is None
    assert bench.diary.asked == ["write 2"]


def test_a_write_to_an_unreached_peer_fails_with_the_reason(bench: Bench) -> None:
    bench.transport_thread.reach(ONE, [TransportOffer("diary", "", b"garbage")])
    assert bench.results.get(WAIT_S) == MemoryReached(ONE, "", ("diary: that is garbage",))
    refused = bench.write(1)
    assert (refused.fate, refused.detail) == (WriteFate.FAILED, "diary: that is garbage")
    bench.transport_thread.forget(ONE)
    refused = bench.write(1)
    assert (refused.fate, refused.detail) == (WriteFate.FAILED, "the session is over")
    assert bench.diary.asked == []


def test_a_forgotten_peer_is_disconnected_and_can_be_reached_again(bench: Bench) -> None:
    bench.reach()
    bench.transport_thread.cut(ONE)
    bench.transport_thread.forget(ONE)
    bench.transport_thread.forget(ONE)
    assert bench.write(1).fate is WriteFate.FAILED
    assert bench.diary.asked == ["disconnect"]
    bench.reach()
    assert bench.write(1).fate is None


def test_a_link_is_measured_with_calibration_writes(bench: Bench) -> None:
    bench.reach()
    bench.transport_thread.measure(ONE, Calibration(*BASES), CONSTANTS)
    measured = bench.results.get(WAIT_S)
    assert isinstance(measured, Measured)
    assert measured.link_cost.copy_bytes_per_s == CONSTANTS.copy_bytes_per_s
    assert bench.diary.asked == [f"write {-n}" for n in range(1, len(STEPS) + 1)]
    assert bench.write(1).fate is None


def test_a_failed_calibration_ends_silently(bench: Bench) -> None:
    bench.reach()
    bench.diary.fate = WriteFate.FAILED
    bench.transport_thread.measure(ONE, Calibration(*BASES), CONSTANTS)
    assert bench.write(1).op == 1
    assert bench.diary.asked == ["write -1", "write 1"]


class Closed(RecordingTransport):
    """Cannot connect, and needs polling."""

    name: ClassVar[str] = "closed"
    needs_polling: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.polled = threading.Event()

    def connect(self, metadata: bytes) -> RemoteMemory:
        raise TransportError("no such memory")

    def poll(self) -> list[WriteEnded]:
        self.polls += 1
        self.polled.set()
        return super().poll()


def test_the_first_transport_that_connects_makes_the_writes() -> None:
    closed, diary, results = Closed(), RecordingTransport(), Mailbox[TransportResult]()
    transport_thread = TransportThread([closed, diary], results.put, Peer("p", 0))
    transport_thread.start()
    transport_thread.reach(ONE, [TransportOffer("closed", ""), TransportOffer("diary", "")])
    reached = results.get(WAIT_S)
    assert isinstance(reached, Reached)
    assert (reached.transport, reached.problems) == (diary, ("closed: no such memory",))
    end = Bench(transport_thread, diary, results).write(1)
    assert (end.fate, end.transport) == (None, "diary")
    assert (diary.asked, closed.asked, closed.polls) == (["write 1"], [], 0)
    transport_thread.close()
    assert (diary.asked[-1], closed.asked) == ("close", ["close"])


def test_a_transport_is_polled_while_a_peer_writes_by_it() -> None:
    closed, results = Closed(), Mailbox[TransportResult]()
    transport_thread = TransportThread([closed], results.put, Peer("p", 0))
    transport_thread.start()
    transport_thread.accept_writes(ONE, "closed")
    assert closed.polled.wait(WAIT_S)
    transport_thread.forget(ONE)
    transport_thread.close()
