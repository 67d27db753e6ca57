"""Deliberately broken rules. The simulator must notice each of them.

Every break is a mistake that a system of this kind has made, or nearly. Each replaces a part
of a machine or a runner through its interface, so no product code path knows about it. A
break may name faults that make its mistake matter; the rest of a seed is drawn as always.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace

from kvferry.ids import Peer, Serial, SlotIndex
from kvferry.layout.spec import CacheSpec, StateRow
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.admission import SourceAdmission
from kvferry.protocol.credits import AccountKey, CreditBook
from kvferry.protocol.declines import Declined, Declines
from kvferry.protocol.events import Action, Event, Finish, Push, Receive
from kvferry.protocol.handshake import SourceLinks, TargetLinks
from kvferry.protocol.inbound import ActiveScatters, InboundTransfer, InboundTransfers, TargetRoom
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Link
from kvferry.protocol.messages import (
    Abort,
    Body,
    Close,
    Drained,
    Envelope,
    Hello,
    NoSession,
    Offer,
    Refuse,
    RoomMessage,
)
from kvferry.protocol.outbound import ActiveWrite, OutboundTransfer, OutboundTransfers
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.slots import EarlyGather, LocalSlots
from kvferry.protocol.source import SourceMachine, SourceParts
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine, TargetParts
from kvferry.protocol.writes import WriteQueue
from kvferry.testing.sim.cluster import Machines
from kvferry.testing.sim.runner_breaks import (
    BuriesTheLiving,
    ForgetsDoubt,
    KeepsAnEnd,
    ProvesTooEarly,
    SourceCountsOwnSleep,
    SourceLeavesInTheMiddle,
    SourceOversleeps,
    SourceTakesTimeFirst,
    SuspectsTheBusy,
    TargetCountsOwnSleep,
    TargetLeavesInTheMiddle,
    TargetOversleeps,
    TargetTakesTimeFirst,
    asks_nobody,
    notes_first,
)


@dataclass(frozen=True)
class Break:
    """A broken rule: what it is, the machines that follow it, faults that expose it."""

    title: str
    machines: Machines
    faults: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- completion


class CountsMessages(Ledger):
    """Done when as many Closes have come as there are sources."""

    def __init__(self, plan: Plan, target: int, request: Request, digest: bytes = b"") -> None:
        super().__init__(plan, target, request, digest)
        self.num_missing = len(plan.contacts(target))

    def close(self, source: int) -> None:  # noqa: D102
        self.num_missing -= 1

    @property
    def complete(self) -> bool:  # noqa: D102
        return self.num_missing <= 0


class SharesKey(InboundTransfers):
    """All sources report under one key."""

    def find(self, link: Link, body: RoomMessage) -> tuple[TargetRoom, InboundTransfer] | None:  # noqa: D102
        found = super().find(link, body)
        return found and (found[0], found[0].inbounds[min(found[0].inbounds)])


class IgnoresDigest(Ledger):
    """Takes whatever has the right length for what it has asked for."""

    def problem(self, close: Close) -> Failure | None:  # noqa: D102
        failure = super().problem(close)
        differs = failure is not None and failure.code is FailureCode.CONTENT_DIFFERS
        return None if differs else failure


class ExpectsState(Ledger):
    """Waits for a state row although the model has none."""

    def __init__(self, plan: Plan, target: int, request: Request, digest: bytes = b"") -> None:
        super().__init__(plan, target, request, digest)
        self.has_state = _has_state(plan.spec)

    @property
    def complete(self) -> bool:  # noqa: D102
        return self.has_state and super().complete


class DoneBeforeScatter(ActiveScatters):
    """Takes a staged block for arrived when its note comes, before it is scattered."""

    def begin(
        self,
        room: TargetRoom,
        inbound: InboundTransfer,
        blocks: tuple[Block, ...],
        slot: SlotIndex,
        serial: Serial,
    ) -> None:
        """Record it at once."""
        super().begin(room, inbound, blocks, slot, serial)
        room.ledger.add_all(inbound.source, blocks)

    def writes(self, room: TargetRoom) -> bool:
        """Wait for none."""
        return False


class MetadataWithState(SourceMachine):
    """Sends the metadata only where there is state to send."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        if isinstance(event, Finish) and not _has_state(self.layout.spec):
            event = replace(event, metadata=b"")
        return super().handle(event, now)


class LayerCountsForAll(SourceMachine):
    """Takes the first layer of a chunk for the chunk, computed or not."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        if isinstance(event, Push) and event.room in self.rooms:
            if any(one.tokens == event.tokens for one in self.rooms[event.room].pushes):
                return []
            event = replace(event, layers=None)
        return super().handle(event, now)


class ClosesEarly(WriteQueue):
    """Says Close when the engine has finished, with writes still in flight."""

    def is_sent(self, outbound: OutboundTransfer) -> bool:
        """Whether everything was handed over."""
        handed_over = not (outbound.undecided or outbound.direct or outbound.staged)
        if handed_over:
            writes = (self.inflight.writes[op] for op in outbound.inflight)
            outbound.written += [block for write in writes for block in write.blocks]
        return handed_over


class UncheckedOutbound(OutboundTransfers):
    """OutboundTransfers that nobody counts."""

    def check(self) -> None:
        """Silenced, so that only the damage can give it away."""


# ---------------------------------------------------------------- memory


class ReleasesAtAbort(InboundTransfers):
    """Frees pages when a room is given up, without waiting for the sources."""

    def is_quiet(self, room: TargetRoom) -> bool:
        """Always."""
        return True


class TakesSilenceForProof(TargetLinks):
    """Frees pages when a peer is silent, as if that proved anything."""

    def lose(self, link: Link, code: FailureCode, message: str = "") -> None:  # noqa: D102
        super().lose(link, code, message)
        self.gone(link)

    def gone(self, link: Link) -> None:
        """Once is enough."""
        if link.state is LinkState.LOST:
            super().gone(link)


class DrainsAtOnce(SourceLinks):
    """Answers Drained to an abort while its writes are still in flight."""

    def send(self, link: Link, body: Body) -> None:  # noqa: D102
        super().send(link, body)
        if isinstance(body, Abort):
            super().send(link, Drained(body.room, body.generation, body.failure, link.seq_in))


class ReleasesWhileWriting(WriteQueue):
    """Gives pages back to the engine while a write still reads them."""

    def reads(self, outbound: OutboundTransfer) -> bool:
        """Whether it reads is not asked."""
        return False


class Unchecked(LocalSlots):
    """Slots that nobody counts."""

    def check(self, in_use: list[SlotIndex]) -> None:
        """Silenced, so that only the damage can give it away."""


class RefillsSlot(Unchecked):
    """Uses a send buffer again before the write has read it."""

    def allocate(self) -> SlotIndex:  # noqa: D102
        slot = super().allocate()
        super().free(slot)
        return slot

    def free(self, slot: SlotIndex) -> None:
        """It was never taken."""


class RefillsDiscarded(EarlyGather):
    """Uses a slot again that was gathered ahead for nothing, before its gather has ended."""

    def discard(self, outbound: OutboundTransfer) -> None:  # noqa: D102
        for op in outbound.held:
            _give_slot_back(self, self.inflight.writes[op])
        super().discard(outbound)


def _give_slot_back(gather: EarlyGather, write: ActiveWrite) -> None:
    slot, write.local_slot = write.local_slot, None
    if slot is not None:
        gather.slots.free(slot)


class LosesDiscarded(WriteQueue):
    """Forgets what it had gathered ahead when no credit comes for it."""

    def retry(self, write: ActiveWrite) -> None:  # noqa: D102
        if not write.is_ahead:
            super().retry(write)


class RefillsTakenBack(EarlyGather):
    """Takes the only slot from who has no credit, before its gather has ended."""

    def reclaim(self) -> None:  # noqa: D102
        super().reclaim()
        for write in self.inflight.writes.values():
            if write.is_reclaimed:
                _give_slot_back(self, write)


class LosesTakenBack(WriteQueue):
    """Forgets what it had gathered into a slot that somebody else needed."""

    def retry(self, write: ActiveWrite) -> None:  # noqa: D102
        if not write.is_reclaimed:
            super().retry(write)


# ---------------------------------------------------------------- credits


class OvercommittedBook(CreditBook):
    """Promises a slot that it has promised before."""

    def grant(self) -> list[AccountKey]:  # noqa: D102
        wanted = any(a.granted < a.wanted for a in self.accounts.values())
        if not self.free and wanted and self.num_promised:
            account = next(a for a in self.accounts.values() if a.outstanding)
            self.free.append(next(iter(account.outstanding.values())))
        return super().grant()

    def check(self) -> None:
        """Silenced, so that only the damage can give it away."""


class ForgivingBook(CreditBook):
    """Hands out a slot again for every copy of its note."""

    def __init__(self, num_slots: int, window: int) -> None:
        super().__init__(num_slots, window)
        self.seen: dict[tuple[AccountKey, Serial], SlotIndex] = {}

    def use(self, key: AccountKey, serial: Serial) -> SlotIndex | None:  # noqa: D102
        slot = super().use(key, serial)
        if slot is not None:
            self.seen[key, serial] = slot
        return self.seen.get((key, serial))

    def scattered(self, slot: SlotIndex) -> None:  # noqa: D102
        if slot in self.scattering:
            super().scattered(slot)


class UncheckedScatters(ActiveScatters):
    """ActiveScatters that nobody counts."""

    def check(self) -> None:
        """Silenced, so that only the damage can give it away."""


class LeakyBook(CreditBook):
    """Never takes back the slots of a room that was given up."""

    def settle(self, key: AccountKey) -> None:  # noqa: D102
        if self.outstanding(key):
            self.stop(key)
        else:
            super().settle(key)


# ---------------------------------------------------------------- peers and time


class TakesRestartForTheSame(TargetLinks):
    """Takes a peer that has restarted for the one it was before."""

    def find(self, envelope: Envelope) -> Link | None:  # noqa: D102
        link = self.by_session.get(envelope.session)
        if link is None or link.peer != envelope.sender:
            return super().find(envelope)
        self.heard(link)
        return None if isinstance(envelope.body, NoSession) else link


class IgnoresOrder(SourceLinks):
    """Acts on frames that later ones have overtaken."""

    def in_order(self, link: Link, envelope: Envelope) -> bool:
        """Any order will do."""
        return True


class ForgetsWarnings(SourceAdmission):
    """Forgets what was taken back."""

    def warn(self, link: Link, body: Abort, now: float) -> None:  # noqa: D102
        pass


class LetsAnyoneIn(SourceLinks):
    """Does not ask which model the other side serves."""

    def welcome(self, link: Link) -> None:  # noqa: D102
        assert link.hello is not None
        mine, theirs = self.identity, link.hello.fingerprint
        self.identity = replace(mine, fingerprint=theirs)
        super().welcome(link)
        self.identity = mine

    def refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        """Refuse nobody."""
        return None


class DeclinesInSilence(Declines):
    """Tells a source nothing of a room that was given up before it was offered."""

    def due(self, now: float, resend_s: float) -> list[Declined]:  # noqa: D102
        for one in super().due(now, 0.0):
            self.answered(one.link, one.room, one.generation)
        return []


class NoDeadline(TargetMachine):
    """Waits for ever."""

    def handle(self, event: Event, now: float) -> list[Action]:  # noqa: D102
        if isinstance(event, Receive):
            event = replace(event, wanted=replace(event.wanted, deadline=inf))
        return super().handle(event, now)


class KeepsEarlyOffers(SourceAdmission):
    """Keeps offers for rooms that never open."""

    def early_deadline(self, offer: Offer, now: float) -> float:
        """No end."""
        return inf


# ---------------------------------------------------------------- the list


def _has_state(spec: CacheSpec) -> bool:
    return any(isinstance(group.kind, StateRow) for group in spec.groups)


def _source(**parts: Any) -> Machines:
    return Machines(source_parts=SourceParts(**parts))


def _target(**parts: Any) -> Machines:
    return Machines(target_parts=TargetParts(**parts))


SLOW_ABORTS = {"slow_write": 0.3, "cancel_target": 0.3}
STAGED = {"slow_write": 0.3}

BREAKS: dict[str, Break] = {
    "count-messages": Break(
        "completion by message count", _target(ledger=CountsMessages), {"duplicate": 0.3}
    ),
    "shared-key": Break("one key shared by all sources", _target(inbounds=SharesKey)),
    "digest-ignored": Break(
        "another request's cache is taken", _target(ledger=IgnoresDigest), {"mixed_up": 0.3}
    ),
    "metadata-with-state": Break("metadata gated on state", Machines(source=MetadataWithState)),
    "state-expected": Break(
        "state expected although the list is empty", _target(ledger=ExpectsState)
    ),
    "done-before-scatter": Break(
        "done before the scatter has ended", _target(scatters=DoneBeforeScatter)
    ),
    "layer-for-all": Break(
        "one layer of a chunk taken for all of it", Machines(source=LayerCountsForAll)
    ),
    "close-early": Break(
        "closed with writes in flight",
        _source(writes=ClosesEarly, outbounds=UncheckedOutbound),
        {"slow_write": 0.3},
    ),
    "release-at-abort": Break(
        "target pages released at abort", _target(inbounds=ReleasesAtAbort), SLOW_ABORTS
    ),
    "silence-is-proof": Break(
        "target pages released because a peer is silent",
        _target(links=TakesSilenceForProof),
        {"slow_write": 0.3, "cuts": 3, "stalls": 2},
    ),
    "drained-at-once": Break(
        "Drained sent with writes in flight", _source(links=DrainsAtOnce), SLOW_ABORTS
    ),
    "release-while-writing": Break(
        "source pages released while being read",
        _source(writes=ReleasesWhileWriting),
        SLOW_ABORTS,
    ),
    "refill-slot": Break(
        "send buffer refilled before it was read", _source(slots=RefillsSlot), STAGED
    ),
    "refill-discarded": Break(
        "slot refilled before its gather has ended",
        _source(gather=RefillsDiscarded, slots=Unchecked),
        {"slow_write": 0.7, "cancel_source": 0.3, "drop": 0.3},
    ),
    "lose-discarded": Break(
        "what was gathered for nothing is never sent",
        _source(writes=LosesDiscarded),
        {"drop": 0.3, "slow_prefill": 0.1},
    ),
    "refill-taken-back": Break(
        "the only slot refilled while it is gathered into",
        _source(gather=RefillsTakenBack, slots=Unchecked),
        {"slow_write": 0.7, "drop": 0.3},
    ),
    "lose-taken-back": Break(
        "what was gathered into somebody else's slot is never sent",
        _source(writes=LosesTakenBack),
        {"drop": 0.3},
    ),
    "overcommit": Break("credits overcommitted", _target(credits=OvercommittedBook), STAGED),
    "duplicate-arrival": Break(
        "duplicate arrival counted",
        _target(credits=ForgivingBook, scatters=UncheckedScatters),
        {"duplicate_note": 0.3},
    ),
    "leak-credits": Break(
        "credits of an aborted room never returned",
        _target(credits=LeakyBook),
        {"cancel_target": 0.3, "slow_write": 0.3},
    ),
    "stale-incarnation": Break(
        "stale incarnation accepted", _target(links=TakesRestartForTheSame), {"kills": 2}
    ),
    "ignore-order": Break(
        "frames acted on that later ones have overtaken",
        _source(links=IgnoresOrder, admission=ForgetsWarnings),
        {"delay": 0.3, "cancel_target": 0.3},
    ),
    "let-anyone-in": Break(
        "another model is served", _source(links=LetsAnyoneIn), {"strangers": 1}
    ),
    "forget-doubt": Break(
        "a write of unknown fate taken for ended",
        Machines(sessions=ForgetsDoubt),
        {"write_unknown": 0.3},
    ),
    "confirm_dead-the-living": Break(
        "one life's end taken for the end of all",
        Machines(sessions=BuriesTheLiving),
        {"kills": 4, "slow_write": 0.7},
    ),
    "leave-in-the-middle": Break(
        "others told of an end with memory still held",
        Machines(source_runner=SourceLeavesInTheMiddle, target_runner=TargetLeavesInTheMiddle),
        {"leaves": 2, "slow_write": 0.3},
    ),
    "count-own-sleep": Break(
        "peers called silent for the time in which this process did not run",
        Machines(source=SourceCountsOwnSleep, target=TargetCountsOwnSleep),
        {"stalls": 6, "one_sided": 0.5, "drop": 0.1},
    ),
    "time-before-frames": Break(
        "the clock looked at before what has come",
        Machines(source_runner=SourceTakesTimeFirst, target_runner=TargetTakesTimeFirst),
        {"stalls": 2},
    ),
    "ask-nobody": Break(
        "a lost session whose process nobody asks after",
        Machines(ports=asks_nobody),
        {"kills": 2, "write_unknown": 0.1},
    ),
    "start_probing-the-busy": Break(
        "back-pressure taken for a sign of death",
        Machines(source_runner=SuspectsTheBusy),
        {"busy": 0.3},
    ),
    "keep-an-end": Break("the end of a write not told", Machines(source=KeepsAnEnd)),
    "note-first": Break(
        "a note sent before its data", Machines(ports=notes_first), {"slow_write": 0.3}
    ),
    "proof-in-flight": Break(
        "a session proven quiet with writes in flight",
        Machines(sessions=ProvesTooEarly),
        {"slow_write": 0.7, "cuts": 4, "stalls": 2},
    ),
    "oversleep": Break(
        "a timer of the machine slept through",
        Machines(source_runner=SourceOversleeps, target_runner=TargetOversleeps),
    ),
    "decline-in-silence": Break(
        "a source not told that its room was given up", _target(declines=DeclinesInSilence)
    ),
    "no-deadline": Break("no deadline", Machines(target=NoDeadline), {"one_sided": 0.3}),
    "keep-early-offers": Break(
        "early offers never expire", _source(admission=KeepsEarlyOffers), {"one_sided": 0.3}
    ),
}
