"""A mover's thread with a transport that writes down what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import pytest
from endpoint.jobs import direct

from kvferry.endpoint.calibration import STEPS, Calibration
from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.transport_thread import (
    Measured,
    Mover,
    MoverNews,
    Reached,
    Unreached,
)
from kvferry.errors import TransportError
from kvferry.ids import Op, Session
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan.bind import Binding
from kvferry.plan.choose import Path
from kvferry.plan.cost import Constants
from kvferry.plan.places import Base
from kvferry.protocol.events import Fate
from kvferry.protocol.messages import TransportOffer
from kvferry.regions import Region
from kvferry.transports.base import Ended, Remote, Setup, Transport
from kvferry.transports.mailbox import Mailbox

ONE, TWO = Session(1, 1), Session(1, 2)
BASES = Base(0, 0, 0), Base(0, 0, 0)
BULK = Binding.bulk(*BASES, 4096)
CONSTANTS = Constants(descriptor_s=1.0, bytes_per_s=1.0, copy_bytes_per_s=1.0)
WAIT_S = 15.0


class Diary(Transport):
    """Ends every write with the next poll, in the way that a test says."""

    name: ClassVar[str] = "diary"

    def __init__(self) -> None:
        super().__init__(Setup(agent="diary", copy=copy_binding))
        self.asked: list[str] = []
        self.fate: Fate | None = None
        self.ended: list[Ended] = []

    @classmethod
    def missing(cls) -> str | None:
        return None

    def register(self, regions: Sequence[Region], *, writable: bool) -> None: ...

    def metadata(self) -> bytes:
        return b""

    def connect(self, metadata: bytes) -> Remote:
        if metadata == b"garbage":
            raise TransportError("that is garbage")
        return Remote()

    def write(self, remote: Remote, op: Op, pieces: Binding) -> None:
        self.asked.append(f"write {op}")
        self.ended.append(Ended(op, self.fate, "as told"))

    def poll(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def disconnect(self, remote: Remote) -> None:
        self.asked.append("disconnect")

    def close(self) -> None:
        self.asked.append("close")


class Desk(NamedTuple):
    """A mover, its transport, and what it tells."""

    mover: Mover
    diary: Diary
    told: Mailbox[MoverNews]

    def reach(self, session: Session = ONE) -> None:
        self.mover.reach(session, [TransportOffer("diary", "")])
        assert isinstance(self.told.get(WAIT_S), Reached)

    def write(self, op: int, session: Session = ONE) -> WriteJob:
        job = direct(op, BULK, session)
        self.mover.write(job)
        assert self.told.get(WAIT_S) is job
        assert job.is_over
        return job


@pytest.fixture
def desk() -> Iterator[Desk]:
    diary, told = Diary(), Mailbox[MoverNews]()
    desk = Desk(Mover([diary], told.put, "mover"), diary, told)
    desk.mover.start()
    yield desk
    desk.mover.close()
    assert diary.asked[-1] == "close"


@pytest.mark.parametrize("fate", [None, *Fate])
def test_a_write_is_told_of_with_its_fate_and_size(desk: Desk, fate: Fate | None) -> None:
    desk.reach()
    desk.diary.fate = fate
    end = desk.write(3)
    assert (end.op, end.fate, end.detail) == (3, fate, "as told")
    assert (end.path, end.num_bytes, end.num_pieces) == (Path.RUNS, 4096, 1)


def test_nothing_of_a_session_starts_after_it_was_cut(desk: Desk) -> None:
    for session in (ONE, TWO):
        desk.reach(session)
    desk.mover.cut(ONE)
    assert desk.write(1).fate is Fate.FAILED
    desk.mover.measure(ONE, Calibration(*BASES), CONSTANTS)
    assert desk.write(2, TWO).fate is None
    assert desk.diary.asked == ["write 2"]


def test_a_peer_that_was_never_reached_says_why(desk: Desk) -> None:
    desk.mover.reach(ONE, [TransportOffer("diary", "", b"garbage")])
    assert desk.told.get(WAIT_S) == Unreached(ONE, ("diary: that is garbage",))
    refused = desk.write(1)
    assert (refused.fate, refused.detail) == (Fate.FAILED, "diary: that is garbage")
    desk.mover.forget(ONE)
    refused = desk.write(1)
    assert (refused.fate, refused.detail) == (Fate.FAILED, "the session is over")
    assert desk.diary.asked == []


def test_a_peer_that_was_forgotten_is_let_go_and_may_be_reached_again(desk: Desk) -> None:
    desk.reach()
    desk.mover.cut(ONE)
    desk.mover.forget(ONE)
    desk.mover.forget(ONE)
    assert desk.write(1).fate is Fate.FAILED
    assert desk.diary.asked == ["disconnect"]
    desk.reach()
    assert desk.write(1).fate is None


def test_costs_are_measured_by_writes_of_its_own(desk: Desk) -> None:
    desk.reach()
    desk.mover.measure(ONE, Calibration(*BASES), CONSTANTS)
    measured = desk.told.get(WAIT_S)
    assert isinstance(measured, Measured)
    assert measured.constants.copy_bytes_per_s == CONSTANTS.copy_bytes_per_s
    assert desk.diary.asked == [f"write {-n}" for n in range(1, len(STEPS) + 1)]
    assert desk.write(1).fate is None


def test_a_measure_that_fails_ends_and_is_not_told_of(desk: Desk) -> None:
    desk.reach()
    desk.diary.fate = Fate.FAILED
    desk.mover.measure(ONE, Calibration(*BASES), CONSTANTS)
    assert desk.write(1).op == 1
    assert desk.diary.asked == ["write -1", "write 1"]


class Closed(Diary):
    """Reaches nobody, and must be polled."""

    name: ClassVar[str] = "closed"
    needs_polling: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.polled = threading.Event()

    def connect(self, metadata: bytes) -> Remote:
        raise TransportError("no such memory")

    def poll(self) -> list[Ended]:
        self.polls += 1
        self.polled.set()
        return super().poll()


def test_the_first_transport_that_reaches_a_peer_carries_its_writes() -> None:
    closed, diary, told = Closed(), Diary(), Mailbox[MoverNews]()
    mover = Mover([closed, diary], told.put, "mover")
    mover.start()
    mover.reach(ONE, [TransportOffer("closed", ""), TransportOffer("diary", "")])
    reached = told.get(WAIT_S)
    assert isinstance(reached, Reached)
    assert (reached.transport, reached.problems) == (diary, ("closed: no such memory",))
    end = Desk(mover, diary, told).write(1)
    assert (end.fate, end.transport) == (None, "diary")
    assert (diary.asked, closed.asked, closed.polls) == (["write 1"], [], 0)
    mover.close()
    assert (diary.asked[-1], closed.asked) == ("close", ["close"])


def test_a_transport_is_polled_once_a_peer_writes_by_it() -> None:
    closed, told = Closed(), Mailbox[MoverNews]()
    mover = Mover([closed], told.put, "mover")
    mover.start()
    mover.let_write(ONE, "closed")
    assert closed.polled.wait(WAIT_S)
    mover.forget(ONE)
    mover.close()
