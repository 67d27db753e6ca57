"""Every interleaving of a small model keeps the promises, and broken rules are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from kvferry.ids import Op, SlotIndex
from kvferry.plan import Block
from kvferry.protocol.credits import AccountKey, CreditBook
from kvferry.protocol.events import Action, Event, Report, WriteEnded
from kvferry.protocol.handshake import TargetLinks
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Body, Complete
from kvferry.protocol.outbound import OutboundTransfer, OutboundTransfers
from kvferry.protocol.outcome import Failure
from kvferry.protocol.slots import EarlyGather
from kvferry.protocol.source import SourceMachine, SourceParts
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine, TargetParts
from kvferry.protocol.writes import WriteQueue
from kvferry.testing.explore import MODELS, Case, ExploredModel, ModelFault, cases, explore
from kvferry.testing.explore.model import METADATA
from kvferry.testing.explore.snapshot import copy_of, key_of
from kvferry.testing.sim import BREAKS
from kvferry.testing.sim.breaks import DigestIgnored, UncheckedSlots
from kvferry.testing.sim.cluster import Machines
from kvferry.testing.sim.runner_breaks import PortWrapper

DIRECT, CHUNKED, STAGED = MODELS["direct"], MODELS["chunked"], MODELS["staged"]
EARLY, ONLY_SLOT = MODELS["early"], MODELS["only-slot"]
QUICK = list(cases())


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_world_keeps_the_promises(case: Case) -> None:
    result = case.run()
    assert result.violation is None, str(result.violation)
    assert result.complete
    assert result.terminals > 0


def test_every_kind_of_fault_is_explored() -> None:
    assert {fault for case in QUICK for fault in case.faults} == set(ModelFault)


def test_a_search_that_reaches_its_limit_is_not_complete() -> None:
    result = explore(DIRECT, max_states=100)
    assert not result.complete
    assert result.violation is None


def test_copies_are_equal_and_share_nothing_mutable() -> None:
    for runner, script in zip(STAGED.runners(None), STAGED.scripts(), strict=True):
        machine = runner.machine
        before = key_of(machine)
        copied = copy_of(machine)
        assert key_of(copied) == before
        copied.handle(script[0], 0.0)
        assert key_of(copied) != before
        assert key_of(machine) == before


# ------------------------------------------------------------ broken rules


class FreesSlotsAtAbort(CreditBook):
    """S4: credits of a failed room are freed without proof."""

    def stop(self, key: AccountKey) -> None:
        self.settle(key)


class CountsMessages(Ledger):
    """C6: completion is judged by the number of notes."""

    num_notes = 0

    def add_all(self, source: int, blocks: Iterable[Block]) -> None:
        super().add_all(source, blocks)
        self.num_notes += 1

    @property
    def complete(self) -> bool:
        return self.num_notes >= len(CHUNKED.pushes)


class LeadsWithMetadata(TargetMachine):
    """The metadata is known before any Close, so that only the bytes can be missing."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        for room in self.rooms.values():
            room.metadata = METADATA
        return actions


class TrustsClose(Ledger):
    """A room is done at Close, although a slot is not scattered yet."""

    closed = False

    def close(self, source: int) -> None:
        self.closed = True

    @property
    def complete(self) -> bool:
        return self.closed


class IgnoresLateClose(TargetLinks):
    """C7: a Close for a room that has ended is not answered."""

    def send(self, link: Link, body: Body) -> None:
        machine: Any = self._rooms
        if not isinstance(body, Complete) or body.room in machine.rooms:
            super().send(link, body)


class ReportsTwice(TargetMachine):
    """A failure is reported again."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        reports = [one for one in actions if isinstance(one, Report)]
        return [*actions, *(one for one in reports if isinstance(one.outcome, Failure))]


class KeepsInbounds(TargetLinks):
    """L8: a room whose source is dead is kept for ever."""

    def gone(self, link: Link) -> None:
        link.state = LinkState.GONE
        self._unlink(link)


class ClosesOnce(OutboundTransfers):
    """C7: a lost Close is not repeated."""

    def close(self, outbound: OutboundTransfer) -> None:
        if outbound.sent_at != inf:
            super().close(outbound)
        outbound.sent_at = inf


class SharesLocalSlot(UncheckedSlots):
    """S3: a local slot is filled again before the write has read it."""

    def __len__(self) -> int:
        return max(1, super().__len__())

    def allocate(self) -> SlotIndex:
        return super().allocate() if super().__len__() else SlotIndex(0)


class ForgetsDiscarded(WriteQueue):
    """S7: pages are released while a discarded gather still reads them."""

    def reads(self, outbound: OutboundTransfer) -> bool:
        writes = (self.inflight.writes[op] for op in outbound.inflight)
        return any(not write.is_ahead for write in writes)


class SharesTheOnlySlot(EarlyGather):
    """The only slot is taken back and filled again before its gather has ended."""

    def reclaim(self) -> None:
        super().reclaim()
        for write in self.inflight.writes.values():
            if write.is_reclaimed and not self.inflight.slots:
                assert write.local_slot is not None
                self.inflight.slots.free(write.local_slot)


class DiscardsTwice(PortWrapper):
    """Every gather is discarded twice."""

    def discard(self, op: Op) -> None:
        self.port.discard(op)
        self.port.discard(op)


def discards_twice(ports: Any) -> Any:
    return ports._replace(data=DiscardsTwice(ports.data))


class ForgetsAnEnd(SourceMachine):
    """The first write's result never reaches the machine."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if event == WriteEnded(Op(1)) else super().handle(event, now)


def source(model: ExploredModel, **parts: Any) -> ExploredModel:
    return replace(model, machines=Machines(source_parts=SourceParts(**parts)))


def target(model: ExploredModel, **parts: Any) -> ExploredModel:
    return replace(model, machines=Machines(target_parts=TargetParts(**parts)))


def broken(model: ExploredModel, name: str) -> ExploredModel:
    """Return the model with a broken rule of the simulator."""
    return replace(model, machines=BREAKS[name].machines)


COUNTED = replace(
    CHUNKED,
    machines=Machines(target=LeadsWithMetadata, target_parts=TargetParts(ledger=CountsMessages)),
)

BROKEN: list[tuple[ExploredModel, ModelFault | None, str]] = [
    (broken(DIRECT, "release-at-abort"), ModelFault.CANCEL_TARGET, "pages that were released"),
    (target(STAGED, credits=FreesSlotsAtAbort), ModelFault.CANCEL_TARGET, "not promised to it"),
    (COUNTED, ModelFault.DUPLICATE, "never came"),
    (target(STAGED, ledger=TrustsClose), None, "never came"),
    (broken(DIRECT, "silence-is-proof"), ModelFault.KILL_SOURCE, "pages that were released"),
    (broken(DIRECT, "no-deadline"), ModelFault.ABSENT, "nothing by its deadline"),
    (target(DIRECT, links=IgnoresLateClose), ModelFault.DROP, "not everybody is Done"),
    (
        replace(DIRECT, machines=Machines(target=ReportsTwice)),
        ModelFault.CANCEL_TARGET,
        "reports a room that is FAILED",
    ),
    (target(MODELS["cached"], links=KeepsInbounds), ModelFault.KILL_SOURCE, "never ends"),
    (broken(DIRECT, "release-while-writing"), ModelFault.CANCEL_SOURCE, "is in flight"),
    (broken(DIRECT, "drained-at-once"), ModelFault.CANCEL_TARGET, "pages that were released"),
    (source(DIRECT, outbounds=ClosesOnce), ModelFault.DROP, "not everybody is Done"),
    (source(STAGED, slots=SharesLocalSlot), None, "which is in flight"),
    (source(EARLY, writes=ForgetsDiscarded), ModelFault.CANCEL_SOURCE, "is in flight"),
    (source(ONLY_SLOT, gather=SharesTheOnlySlot, slots=UncheckedSlots), None, "which is in flight"),
    (
        replace(EARLY, machines=Machines(ports=discards_twice)),
        ModelFault.CANCEL_SOURCE,
        "nothing was gathered for it",
    ),
    (target(MODELS["mixed"], ledger=DigestIgnored), None, "with another request's cache"),
    (broken(DIRECT, "forget-unknown-writes"), ModelFault.UNKNOWN, "is in flight"),
    (replace(DIRECT, machines=Machines(source=ForgetsAnEnd)), None, "never ends"),
    (broken(STAGED, "note-before-data"), None, "but its slot holds None"),
    (broken(DIRECT, "proof-with-writes-in-flight"), ModelFault.CUT, "is in flight"),
    (broken(DIRECT, "never-probe"), ModelFault.KILL_SOURCE, "never ends"),
]


@pytest.mark.parametrize(("model", "fault", "message"), BROKEN)
def test_a_broken_rule_is_caught(
    model: ExploredModel, fault: ModelFault | None, message: str
) -> None:
    result = explore(model, [fault] if fault else [])
    assert result.violation is not None
    assert message in result.violation.message
    assert not result.complete
    faults = Counter(line.startswith("FAULT") for line in result.violation.trace)
    assert faults[True] == (fault is not None)


def test_a_trace_describes_each_step() -> None:
    result = explore(broken(DIRECT, "release-at-abort"), [ModelFault.CANCEL_TARGET])
    story = str(result.violation).splitlines()
    assert story[0].endswith("landed in pages that were released")
    assert any("deliver Offer #2 decode/0→prefill/0" in line for line in story)
    assert story[-1].endswith("write 1 to decode/0 pages: land")


def test_the_full_set_has_every_fault_in_every_model_in_any_order() -> None:
    names = [str(case) for case in cases(full=True)]
    assert len(names) == len(set(names)) == len(MODELS) * (1 + len(ModelFault))
    assert all("any order" in name for name in names)


def test_a_push_after_the_report_is_not_misuse() -> None:
    result = explore(replace(DIRECT, heedless=True), [ModelFault.CANCEL_SOURCE])
    assert result.violation is None, str(result.violation)
