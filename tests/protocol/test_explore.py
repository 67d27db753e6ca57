"""Every interleaving of a small model keeps the promises, and a broken rule is noticed."""

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
from kvferry.protocol.events import Action, Event, Report, Sent
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
from kvferry.testing.explore import (
    CHUNKED,
    DIRECT,
    MODELS,
    STAGED,
    Case,
    ExploredModel,
    ModelFault,
    cases,
    explore,
)
from kvferry.testing.explore.model import AHEAD, METADATA
from kvferry.testing.explore.snapshot import copy_of, key_of
from kvferry.testing.sim.breaks import (
    DrainsAtOnce,
    IgnoresDigest,
    NoDeadline,
    ReleasesAtAbort,
    ReleasesWhileWriting,
    TakesSilenceForProof,
    Unchecked,
)
from kvferry.testing.sim.runner_breaks import (
    ForgetsDoubt,
    ProvesTooEarly,
    Through,
    asks_nobody,
    notes_first,
)

QUICK = list(cases())


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_world_keeps_the_promises(case: Case) -> None:
    result = case.run()
    assert result.violation is None, str(result.violation)
    assert result.complete
    assert result.terminals > 0


def test_every_kind_of_fault_is_explored() -> None:
    assert {fault for case in QUICK for fault in case.faults} == set(ModelFault)


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


class FreesSlotsAtAbort(CreditBook):
    """S4: credits of a failed room are taken back without proof."""

    def stop(self, key: AccountKey) -> None:
        self.settle(key)


class CountsMessages(Ledger):
    """C6: done when as many notes have come as there were pushes."""

    num_notes = 0

    def add_all(self, source: int, blocks: Iterable[Block]) -> None:
        super().add_all(source, blocks)
        self.num_notes += 1

    @property
    def complete(self) -> bool:
        return self.num_notes >= len(CHUNKED.pushes)


class LeadsWithMetadata(TargetMachine):
    """Knows the metadata before any Close."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        for room in self.rooms.values():
            room.metadata = METADATA
        return actions


class TrustsClose(Ledger):
    """Done at Close, though a slot has not been scattered yet."""

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


class KeepsLegs(TargetLinks):
    """L8: a room whose source is gone is kept for ever."""

    def gone(self, link: Link) -> None:
        link.state = LinkState.GONE
        self._unlink(link)


class SaysCloseOnce(OutboundTransfers):
    """C7: a lost Close is not repeated."""

    def repeat_close(self, outbound: OutboundTransfer) -> None:
        if outbound.sent_at != inf:
            super().repeat_close(outbound)
        outbound.sent_at = inf


class SharesLocalSlot(Unchecked):
    """S3: a local slot is filled again before the write has read it."""

    def __len__(self) -> int:
        return max(1, super().__len__())

    def allocate(self) -> SlotIndex:
        return super().allocate() if super().__len__() else SlotIndex(0)


class ForgetsDiscarded(WriteQueue):
    """S7: pages are released although a gather for nothing still reads them."""

    def reads(self, outbound: OutboundTransfer) -> bool:
        writes = (self.inflight.writes[op] for op in outbound.inflight)
        return any(not write.is_ahead for write in writes)


class SharesTheOnlySlot(EarlyGather):
    """Whoever has a credit fills the slot that is taken back, before its gather has ended."""

    def reclaim(self) -> None:
        super().reclaim()
        for write in self.inflight.writes.values():
            if write.is_reclaimed and not self.slots:
                assert write.local_slot is not None
                self.slots.free(write.local_slot)


class DiscardsTwice(Through):
    """A gather is discarded twice."""

    def discard(self, op: Op) -> None:
        self.port.discard(op)
        self.port.discard(op)


def discards_twice(ports: Any) -> Any:
    return ports._replace(data=DiscardsTwice(ports.data))


class ForgetsAnEnd(SourceMachine):
    """The machine is not told of the first write that has ended."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if event == Sent(Op(1)) else super().handle(event, now)


def source(model: ExploredModel, **parts: Any) -> ExploredModel:
    return replace(model, source_parts=SourceParts(**parts))


def target(model: ExploredModel, **parts: Any) -> ExploredModel:
    return replace(model, target_parts=TargetParts(**parts))


COUNTED = replace(target(CHUNKED, ledger=CountsMessages), target=LeadsWithMetadata)
ONLY_SLOT = MODELS["only-slot"]

BROKEN: list[tuple[ExploredModel, ModelFault | None, str]] = [
    (
        target(DIRECT, inbounds=ReleasesAtAbort),
        ModelFault.CANCEL_TARGET,
        "pages that were released",
    ),
    (target(STAGED, credits=FreesSlotsAtAbort), ModelFault.CANCEL_TARGET, "not promised to it"),
    (COUNTED, ModelFault.DUPLICATE, "never came"),
    (target(STAGED, ledger=TrustsClose), None, "never came"),
    (
        target(DIRECT, links=TakesSilenceForProof),
        ModelFault.KILL_SOURCE,
        "pages that were released",
    ),
    (replace(DIRECT, target=NoDeadline), ModelFault.ABSENT, "nothing by its deadline"),
    (target(DIRECT, links=IgnoresLateClose), ModelFault.DROP, "not everybody is Done"),
    (
        replace(DIRECT, target=ReportsTwice),
        ModelFault.CANCEL_TARGET,
        "reports a room that is FAILED",
    ),
    (target(MODELS["cached"], links=KeepsLegs), ModelFault.KILL_SOURCE, "never ends"),
    (source(DIRECT, writes=ReleasesWhileWriting), ModelFault.CANCEL_SOURCE, "is in flight"),
    (source(DIRECT, links=DrainsAtOnce), ModelFault.CANCEL_TARGET, "pages that were released"),
    (source(DIRECT, outbounds=SaysCloseOnce), ModelFault.DROP, "not everybody is Done"),
    (source(STAGED, slots=SharesLocalSlot), None, "which is in flight"),
    (source(AHEAD, writes=ForgetsDiscarded), ModelFault.CANCEL_SOURCE, "is in flight"),
    (source(ONLY_SLOT, gather=SharesTheOnlySlot, slots=Unchecked), None, "which is in flight"),
    (replace(AHEAD, ports=discards_twice), ModelFault.CANCEL_SOURCE, "nothing was gathered for it"),
    (target(MODELS["mixed"], ledger=IgnoresDigest), None, "with another request's cache"),
    (replace(DIRECT, sessions=ForgetsDoubt), ModelFault.UNKNOWN, "is in flight"),
    (replace(DIRECT, source=ForgetsAnEnd), None, "never ends"),
    (replace(STAGED, ports=notes_first), None, "but its slot holds None"),
    (replace(DIRECT, sessions=ProvesTooEarly), ModelFault.CUT, "is in flight"),
    (replace(DIRECT, ports=asks_nobody), ModelFault.KILL_SOURCE, "never ends"),
]


@pytest.mark.parametrize(("model", "fault", "message"), BROKEN)
def test_a_broken_rule_is_noticed(
    model: ExploredModel, fault: ModelFault | None, message: str
) -> None:
    result = explore(model, [fault] if fault else [])
    assert result.violation is not None
    assert message in result.violation.message
    assert not result.complete
    faults = Counter(line.startswith("FAULT") for line in result.violation.trace)
    assert faults[True] == (fault is not None)


def test_a_trace_reads_as_a_story() -> None:
    result = explore(target(DIRECT, inbounds=ReleasesAtAbort), [ModelFault.CANCEL_TARGET])
    story = str(result.violation).splitlines()
    assert story[0].endswith("landed in pages that were released")
    assert any("deliver Offer #2 decode/0→prefill/0" in line for line in story)
    assert story[-1].endswith("write 1 to decode/0 pages: land")


def test_the_full_set_has_every_fault_in_every_model_in_any_order() -> None:
    names = [str(case) for case in cases(full=True)]
    assert len(names) == len(set(names)) == len(MODELS) * (1 + len(ModelFault))
    assert all("any order" in name for name in names)


def test_a_push_that_crosses_the_report_is_not_misuse() -> None:
    result = explore(replace(DIRECT, heedless=True), [ModelFault.CANCEL_SOURCE])
    assert result.violation is None, str(result.violation)
