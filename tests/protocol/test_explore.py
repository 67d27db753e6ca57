"""Every interleaving of a small model keeps the promises, and a broken rule is noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvferry.ids import Op, SlotIndex
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import Action, Event, Report, Sent
from kvferry.protocol.lanes import Lane, SourceRoom
from kvferry.protocol.legs import TargetRoom
from kvferry.protocol.messages import Abort, Arrived, Close, Drained, Nudge
from kvferry.protocol.outcome import Failure
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LegState, RoomState
from kvferry.protocol.target import TargetMachine
from kvferry.runtime.driver.driver import SourceDriver
from kvferry.testing.explore import (
    CHUNKED,
    DIRECT,
    MODELS,
    STAGED,
    Case,
    Fault,
    Model,
    cases,
    explore,
)
from kvferry.testing.explore.model import AHEAD, METADATA
from kvferry.testing.explore.snapshot import copy_of, key_of
from kvferry.testing.sim.drivers import ForgetsDoubt, ProvesTooEarly, asks_nobody, notes_first

QUICK = list(cases())


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_world_keeps_the_promises(case: Case) -> None:
    result = case.run()
    assert result.violation is None, str(result.violation)
    assert result.complete
    assert result.terminals > 0


def test_every_kind_of_fault_is_explored() -> None:
    assert {fault for case in QUICK for fault in case.faults} == set(Fault)


def test_an_exploration_that_was_cut_short_says_so() -> None:
    result = explore(DIRECT, max_states=100)
    assert not result.complete
    assert result.violation is None


def test_copies_are_equal_and_share_nothing_mutable() -> None:
    for machine, script in zip(STAGED.machines(), STAGED.scripts(), strict=True):
        before = key_of(machine)
        copied = copy_of(machine)
        assert key_of(copied) == before
        copied.handle(script[0], 0.0)
        assert key_of(copied) != before
        assert key_of(machine) == before


# ------------------------------------------------------------ broken rules


class ReleasesAtAbort(TargetMachine):
    """L1: pages of a failed room are released without waiting for Drained."""

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        super()._fail(room, failure)
        if self.rooms.get(room.name) is room and not room.scatters:
            self._forget(room)


class FreesSlotsAtAbort(TargetMachine):
    """S4: credits of a failed room are taken back without proof."""

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        super()._fail(room, failure)
        for source in room.legs:
            self.credits.settle((room.name, source))


class CountsMessages(TargetMachine):
    """C6: done when as many notes have come as there were pushes."""

    def _on_arrived(self, link: Link, body: Arrived) -> None:
        self.num_notes = getattr(self, "num_notes", 0) + 1
        super()._on_arrived(link, body)

    def _is_complete(self, room: TargetRoom) -> bool:
        room.metadata = METADATA
        return getattr(self, "num_notes", 0) >= len(CHUNKED.pushes)


class TrustsClose(TargetMachine):
    """Done at Close, though a slot has not been scattered yet."""

    def _is_complete(self, room: TargetRoom) -> bool:
        return all(leg.state is LegState.CLOSED for leg in room.legs.values())


class TakesLostForGone(TargetMachine):
    """L6: a peer that is silent is taken for one that can't write."""

    def _link_lost(self, link: Link, failure: Failure) -> None:
        super()._link_lost(link, failure)
        self._link_gone(link)


class NeverGivesUp(TargetMachine):
    """L2: a room without a deadline."""

    def _tick_rooms(self) -> None:
        deadlines = {room.name: room.deadline for room in self.rooms.values()}
        for room in self.rooms.values():
            room.deadline = float("inf")
        super()._tick_rooms()
        for room in self.rooms.values():
            room.deadline = deadlines[room.name]


class IgnoresLateClose(TargetMachine):
    """C7: a Close for a room that has ended is not answered."""

    def _on_close(self, link: Link, body: Close) -> None:
        if body.room in self.rooms:
            super()._on_close(link, body)


class ReportsTwice(TargetMachine):
    """A second failure is reported too."""

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        self._do(Report(room.name, failure))
        super()._fail(room, failure)


class KeepsLegs(TargetMachine):
    """L8: a room whose source is gone is kept for ever."""

    def _link_gone(self, link: Link) -> None:
        pass


class ReleasesWhileWriting(SourceMachine):
    """L3: pages of a failed room are released while they are still read."""

    def _drain(self, room: SourceRoom) -> None:
        if room.failure and room.state is RoomState.FAILING:
            for lane in room.lanes.values():
                lane.inflight.clear()
        super()._drain(room)


class DrainedTooEarly(SourceMachine):
    """Drained is said though a write is in flight."""

    def _on_abort(self, link: Link, body: Abort) -> None:
        super()._on_abort(link, body)
        self._say(link, Drained(body.room, body.generation, body.failure, link.seq_in))


class SaysCloseOnce(SourceMachine):
    """C7: a lost Close is not repeated."""

    def _repeat(self, lane: Lane) -> None:
        lane.said_at = self._now

    def _on_nudge(self, link: Link, body: Nudge) -> None:
        pass


class SharesLocalSlot(SourceMachine):
    """S3: a local slot is filled again before the write has read it."""

    def _settle(self) -> None:
        if not self.local_slots:
            self.local_slots.append(SlotIndex(0))
        super()._settle()


class ForgetsDiscarded(SourceMachine):
    """S7: pages are released although a gather for nothing still reads them."""

    def _discard_held(self, lane: Lane) -> None:
        lane.inflight.difference_update(lane.held)
        super()._discard_held(lane)


class SharesTheOnlySlot(SourceMachine):
    """Whoever has a credit fills the slot that is taken back, before its gather has ended."""

    def _take_back(self) -> None:
        super()._take_back()
        for write in self.writing.values():
            if write.is_taken_back and not self.local_slots:
                assert write.local_slot is not None
                self.local_slots.append(write.local_slot)


class PostsAfterAll(SourceDriver):
    """What was gathered is posted although it was discarded."""

    def _discard(self, op: Op) -> None:
        gather = self._gathers.get(op)
        super()._discard(op)
        if gather is not None:
            self.ports.data.discard(op)


class IgnoresDigest(TargetMachine):
    """C10: what has the right length is taken for what was asked for."""

    def _differs(self, room: TargetRoom, body: Close) -> Failure | None:
        return None


class ForgetsAnEnd(SourceMachine):
    """The machine is not told of the first write that has ended."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if event == Sent(Op(1)) else super().handle(event, now)


BROKEN: list[tuple[Model, Fault | None, str]] = [
    (replace(DIRECT, target=ReleasesAtAbort), Fault.CANCEL_TARGET, "pages that were released"),
    (replace(STAGED, target=FreesSlotsAtAbort), Fault.CANCEL_TARGET, "not promised to it"),
    (replace(CHUNKED, target=CountsMessages), Fault.DUPLICATE, "never came"),
    (replace(STAGED, target=TrustsClose), None, "never came"),
    (replace(DIRECT, target=TakesLostForGone), Fault.KILL_SOURCE, "pages that were released"),
    (replace(DIRECT, target=NeverGivesUp), Fault.ABSENT, "nothing by its deadline"),
    (replace(DIRECT, target=IgnoresLateClose), Fault.DROP, "not everybody is Done"),
    (replace(DIRECT, target=ReportsTwice), Fault.CANCEL_TARGET, "reports a room that is FAILED"),
    (replace(MODELS["cached"], target=KeepsLegs), Fault.KILL_SOURCE, "never ends"),
    (replace(DIRECT, source=ReleasesWhileWriting), Fault.CANCEL_SOURCE, "is in flight"),
    (replace(DIRECT, source=DrainedTooEarly), Fault.CANCEL_TARGET, "pages that were released"),
    (replace(DIRECT, source=SaysCloseOnce), Fault.DROP, "not everybody is Done"),
    (replace(STAGED, source=SharesLocalSlot), None, "which is in flight"),
    (replace(AHEAD, source=ForgetsDiscarded), Fault.CANCEL_SOURCE, "is in flight"),
    (replace(MODELS["only-slot"], source=SharesTheOnlySlot), None, "which is in flight"),
    (
        replace(AHEAD, source_driver=PostsAfterAll),
        Fault.CANCEL_SOURCE,
        "nothing was gathered for it",
    ),
    (replace(MODELS["mixed"], target=IgnoresDigest), None, "with another request's cache"),
    (replace(DIRECT, sessions=ForgetsDoubt), Fault.UNKNOWN, "is in flight"),
    (replace(DIRECT, source=ForgetsAnEnd), None, "never ends"),
    (replace(STAGED, ports=notes_first), None, "but its slot holds None"),
    (replace(DIRECT, sessions=ProvesTooEarly), Fault.CUT, "is in flight"),
    (replace(DIRECT, ports=asks_nobody), Fault.KILL_SOURCE, "never ends"),
]


@pytest.mark.parametrize(("model", "fault", "message"), BROKEN)
def test_a_broken_rule_is_noticed(model: Model, fault: Fault | None, message: str) -> None:
    result = explore(model, [fault] if fault else [])
    assert result.violation is not None
    assert message in result.violation.message
    assert not result.complete
    faults = Counter(line.startswith("FAULT") for line in result.violation.trace)
    assert faults[True] == (fault is not None)


def test_a_trace_reads_as_a_story() -> None:
    result = explore(replace(DIRECT, target=ReleasesAtAbort), [Fault.CANCEL_TARGET])
    story = str(result.violation).splitlines()
    assert story[0].endswith("landed in pages that were released")
    assert any("deliver Offer #2 decode/0→prefill/0" in line for line in story)
    assert story[-1].endswith("write 1 to decode/0 pages: land")


def test_the_full_set_has_every_fault_in_every_model_in_any_order() -> None:
    names = [str(case) for case in cases(full=True)]
    assert len(names) == len(set(names)) == len(MODELS) * (1 + len(Fault))
    assert all("any order" in name for name in names)


def test_a_push_that_crosses_the_report_is_not_misuse() -> None:
    result = explore(replace(DIRECT, heedless=True), [Fault.CANCEL_SOURCE])
    assert result.violation is None, str(result.violation)
