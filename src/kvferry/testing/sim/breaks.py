"""Deliberately broken rules. The simulator must catch each of them.

Every broken rule is a mistake that a system of this kind has made. It subclasses one part of a
machine or of a runner, so the product has no code for it. The command line names a rule by its
class name in kebab case, and its docstring is its title. A rule may ask for the faults under which
it does damage; the seed draws all other faults as usual.

``runner_breaks`` has the rules that concern the runner, its ports and its events, ``pull_breaks``
those of pulls.
"""

# The methods are documented where they are overridden from.
# ruff: noqa: D102
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from msgspec.structs import replace

from kvferry.ids import Peer, Serial, SlotIndex
from kvferry.layout.spec import CacheSpec, StateRow
from kvferry.plan.plan import Plan, Request
from kvferry.protocol.admission import SourceAdmission
from kvferry.protocol.credits import AccountKey, CreditBook
from kvferry.protocol.declines import Declines
from kvferry.protocol.events import Action, Event, Finish, Push, Receive
from kvferry.protocol.handshake import SourceLinks, TargetLinks
from kvferry.protocol.inbound import ActiveScatters, InboundTransfer, InboundTransfers, TargetRoom
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Link
from kvferry.protocol.messages import (
    Abort,
    Arrived,
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
from kvferry.protocol.proofs import SourceProofs, TargetProofs
from kvferry.protocol.slots import EarlyGather, LocalSlots
from kvferry.protocol.source import SourceMachine, SourceParts
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine, TargetParts
from kvferry.protocol.writes import WriteQueue
from kvferry.testing.sim.cluster import Machines

C = TypeVar("C")


@dataclass(frozen=True)
class Break:
    """A broken rule: its title, the machines that follow it, the faults that expose it."""

    title: str
    machines: Machines
    faults: dict[str, float]


BREAKS: dict[str, Break] = {}


def broken_rule(where: Callable[[Any], Machines], **faults: float) -> Callable[[C], C]:
    """Register a class or function as a broken rule; ``where`` puts it into the machines."""

    def register(rule: Any) -> Any:
        name = re.sub(r"(?<!^)(?=[A-Z])|_", "-", rule.__name__).lower()
        first, *rest = rule.__doc__.partition("\n")[0].rstrip(".")
        BREAKS[name] = Break("".join((first.lower(), *rest)), where(rule), faults)
        return rule

    return register


def source_part(part: str, **also: Any) -> Callable[[Any], Machines]:
    """Replace a part of the source machine by the rule, and the parts named in ``also``."""
    return lambda rule: Machines(source_parts=SourceParts(**{part: rule, **also}))


def target_part(part: str, **also: Any) -> Callable[[Any], Machines]:
    """Replace a part of the target machine by the rule, and the parts named in ``also``."""
    return lambda rule: Machines(target_parts=TargetParts(**{part: rule, **also}))


def machine(name: str) -> Callable[[Any], Machines]:
    """Replace a field of ``Machines`` by the rule."""
    return lambda rule: Machines(**{name: rule})


def _has_state(spec: CacheSpec) -> bool:
    return any(isinstance(group.kind, StateRow) for group in spec.groups)


# ---------------------------------------------------------------- completion


@broken_rule(target_part("ledger"), duplicate=0.3)
class CountMessages(Ledger):
    """Completion is judged by the number of Close messages."""

    def __init__(self, plan: Plan, target: int, request: Request, digest: bytes = b"") -> None:
        super().__init__(plan, target, request, digest)
        self.num_missing = len(plan.contacts(target))

    def close(self, source: int) -> None:
        self.num_missing -= 1

    @property
    def complete(self) -> bool:
        return self.num_missing <= 0


@broken_rule(target_part("inbounds"))
class SharedKey(InboundTransfers):
    """All sources of a room share one key."""

    def find(self, link: Link, body: RoomMessage) -> InboundTransfer | None:
        found = super().find(link, body)
        return found and found.room.inbounds[min(found.room.inbounds)]


@broken_rule(target_part("ledger"), mixed_up=0.3)
class DigestIgnored(Ledger):
    """Another request's cache of the right length is accepted."""

    def problem(self, close: Close) -> Failure | None:
        failure = super().problem(close)
        differs = failure is not None and failure.code is FailureCode.CONTENT_DIFFERS
        return None if differs else failure


@broken_rule(target_part("proofs"), flip=0.3)
class OneSourceUnproven(TargetProofs):
    """The sums of one source of a room are not compared."""

    def prove(self, room: TargetRoom) -> bool:
        first = room.inbounds[min(room.inbounds)]
        first.proof_begun = first.is_proven = True
        return super().prove(room)


@broken_rule(target_part("ledger"), flip=1e-9)
class CompareBeforeScatter(Ledger):
    """Sums are compared although a scatter of the room has not ended."""

    def missing(self, source: int) -> int:
        return 0


@broken_rule(source_part("proofs"), flip=1e-9, cancel_source=0.3)
class ReleaseWhileProven(SourceProofs):
    """Pages are released although sums of them are being computed."""

    def reads(self, outbound: OutboundTransfer) -> bool:
        return False


@broken_rule(machine("source"))
class MetadataWithState(SourceMachine):
    """Metadata is sent only if the model has state rows."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Finish) and not _has_state(self.layout.spec):
            event = replace(event, metadata=b"")
        return super().handle(event, now)


@broken_rule(target_part("ledger"))
class StateExpected(Ledger):
    """The target waits for a state row although the model has none."""

    def __init__(self, plan: Plan, target: int, request: Request, digest: bytes = b"") -> None:
        super().__init__(plan, target, request, digest)
        self.has_state = _has_state(plan.spec)

    @property
    def complete(self) -> bool:
        return self.has_state and super().complete


class UncheckedScatters(ActiveScatters):
    """Scatters without their invariant check, so that only the damage can show the mistake."""

    def check(self) -> None:
        pass


@broken_rule(target_part("scatters"))
class DoneBeforeScatter(ActiveScatters):
    """A staged block counts as arrived before it is scattered."""

    def begin(self, inbound: InboundTransfer, note: Arrived, slot: SlotIndex) -> None:
        super().begin(inbound, note, slot)
        inbound.room.ledger.add_all(inbound.source, note.blocks)

    def writes(self, room: TargetRoom) -> bool:
        return False


@broken_rule(machine("source"))
class LayerForAll(SourceMachine):
    """The first layer pushed of a chunk counts as the whole chunk."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Push) and event.room in self.rooms:
            if any(one.tokens == event.tokens for one in self.rooms[event.room].pushes):
                return []
            event = replace(event, layers=None)
        return super().handle(event, now)


class UncheckedOutbounds(OutboundTransfers):
    """Outbound transfers without their invariant check."""

    def check(self) -> None:
        pass


@broken_rule(source_part("writes", outbounds=UncheckedOutbounds), slow_write=0.3)
class CloseEarly(WriteQueue):
    """A Close message is sent while writes are in flight."""

    def is_sent(self, outbound: OutboundTransfer) -> bool:
        handed_over = not (outbound.undecided or outbound.direct or outbound.staged)
        if handed_over:
            writes = (self.inflight.writes[op] for op in outbound.inflight)
            outbound.written += [block for write in writes for block in write.blocks]
        return handed_over


# ---------------------------------------------------------------- memory


@broken_rule(target_part("inbounds"), slow_write=0.3, cancel_target=0.3)
class ReleaseAtAbort(InboundTransfers):
    """Target pages are released at abort."""

    def is_quiet(self, room: TargetRoom) -> bool:
        return True


@broken_rule(target_part("links"), slow_write=0.3, cuts=3, stalls=2)
class SilenceIsProof(TargetLinks):
    """Target pages are released because a peer is silent."""

    def lose(self, link: Link, code: FailureCode, message: str = "") -> None:
        super().lose(link, code, message)
        self.gone(link)

    def gone(self, link: Link) -> None:
        if link.state is LinkState.LOST:
            super().gone(link)


@broken_rule(source_part("links"), slow_write=0.3, cancel_target=0.3)
class DrainedAtOnce(SourceLinks):
    """A Drained message is sent while writes are in flight."""

    def send(self, link: Link, body: Body) -> None:
        super().send(link, body)
        if isinstance(body, Abort):
            super().send(link, Drained(body.room, body.generation, body.failure, link.seq_in))


@broken_rule(source_part("writes"), slow_write=0.3, cancel_target=0.3)
class ReleaseWhileWriting(WriteQueue):
    """Source pages are released while a write still reads them."""

    def reads(self, outbound: OutboundTransfer) -> bool:
        return False


class UncheckedSlots(LocalSlots):
    """Local slots without their invariant check."""

    def check(self, in_use: list[SlotIndex]) -> None:
        pass


@broken_rule(source_part("slots"), slow_write=0.3)
class RefillSlot(UncheckedSlots):
    """A local slot is filled again before its write has read it."""

    def allocate(self) -> SlotIndex:
        slot = super().allocate()
        super().free(slot)
        return slot

    def free(self, slot: SlotIndex) -> None:
        pass


def _free_slot(gather: EarlyGather, write: ActiveWrite) -> None:
    slot, write.local_slot = write.local_slot, None
    if slot is not None:
        gather.inflight.slots.free(slot)


@broken_rule(
    source_part("gather", slots=UncheckedSlots), slow_write=0.7, cancel_source=0.3, drop=0.3
)
class RefillDiscarded(EarlyGather):
    """The slot of a discarded gather is filled again before that gather has ended."""

    def discard(self, outbound: OutboundTransfer) -> None:
        for op in outbound.held:
            _free_slot(self, self.inflight.writes[op])
        super().discard(outbound)


@broken_rule(source_part("writes"), drop=0.3, slow_prefill=0.1)
class LoseDiscarded(WriteQueue):
    """Blocks of a discarded gather are never sent."""

    def retry(self, write: ActiveWrite) -> None:
        if not write.is_ahead:
            super().retry(write)


@broken_rule(source_part("gather", slots=UncheckedSlots), slow_write=0.7, drop=0.3)
class RefillTakenBack(EarlyGather):
    """The only slot is taken back and filled again before its gather has ended."""

    def reclaim(self) -> None:
        super().reclaim()
        for write in self.inflight.writes.values():
            if write.is_reclaimed:
                _free_slot(self, write)


@broken_rule(source_part("writes"), drop=0.3)
class LoseTakenBack(WriteQueue):
    """Blocks are never sent after their slot was taken back."""

    def retry(self, write: ActiveWrite) -> None:
        if not write.is_reclaimed:
            super().retry(write)


# ---------------------------------------------------------------- credits


@broken_rule(target_part("credits"), slow_write=0.3)
class Overcommit(CreditBook):
    """A slot is promised twice."""

    def grant(self) -> list[AccountKey]:
        wanted = any(a.granted < a.wanted for a in self.accounts.values())
        promised = [a for a in self.accounts.values() if a.outstanding]
        if not self.free and wanted and promised:
            account = promised[0]
            self.free.append(next(iter(account.outstanding.values())))
        return super().grant()

    def check(self) -> None:
        pass


@broken_rule(target_part("credits", scatters=UncheckedScatters), duplicate_note=0.3)
class DuplicateArrival(CreditBook):
    """A duplicate of an arrival note scatters its slot again."""

    def __init__(self, num_slots: int, window: int) -> None:
        super().__init__(num_slots, window)
        self.seen: dict[tuple[AccountKey, Serial], SlotIndex] = {}

    def use(self, key: AccountKey, serial: Serial) -> SlotIndex | None:
        slot = super().use(key, serial)
        if slot is not None:
            self.seen[key, serial] = slot
        return self.seen.get((key, serial))

    def scattered(self, slot: SlotIndex) -> None:
        if slot in self.scattering:
            super().scattered(slot)


@broken_rule(target_part("credits"), cancel_target=0.3, slow_write=0.3)
class LeakCredits(CreditBook):
    """Credits of an aborted room are never taken back."""

    def settle(self, key: AccountKey) -> None:
        if self.outstanding(key):
            self.stop(key)
        else:
            super().settle(key)


# ---------------------------------------------------------------- peers and time


@broken_rule(target_part("links"), kills=2)
class StaleIncarnation(TargetLinks):
    """A restarted peer is taken for its previous incarnation."""

    def find(self, envelope: Envelope) -> Link | None:
        link = self.by_session.get(envelope.session)
        if link is None or link.peer != envelope.sender:
            return super().find(envelope)
        self.heard(link)
        return None if isinstance(envelope.body, NoSession) else link


@broken_rule(target_part("links"), slow_prefill=0.3)
class CloseBusyLinks(TargetLinks):
    """A link without frames is closed although rooms wait on it."""

    def is_idle(self, link: Link) -> bool:
        return link.state is LinkState.UP and self._outbox.now >= link.used_at + 0.1


class ForgetWarnings(SourceAdmission):
    """Aborts of rooms that are not open yet are forgotten."""

    def warn(self, link: Link, body: Abort, now: float) -> None:
        pass


@broken_rule(source_part("links", admission=ForgetWarnings), delay=0.3, cancel_target=0.3)
class IgnoreOrder(SourceLinks):
    """Frames are handled although later frames have overtaken them."""

    def in_order(self, link: Link, envelope: Envelope) -> bool:
        return True


@broken_rule(source_part("links"), strangers=1)
class AcceptAnyModel(SourceLinks):
    """Peers that serve another model are accepted."""

    def welcome(self, link: Link) -> None:
        assert link.hello is not None
        identity = self.identity
        self.identity = replace(identity, fingerprint=link.hello.fingerprint)
        super().welcome(link)
        self.identity = identity

    def refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        return None


@broken_rule(target_part("declines"))
class DeclineSilently(Declines):
    """Sources are not told that a room was cancelled before its offer."""

    def send(self) -> None:
        for one in list(self.waiting.values()):
            if one.link.state is LinkState.UP:
                self.answered(one.link, one.room, one.generation)


@broken_rule(machine("target"), one_sided=0.3)
class NoDeadline(TargetMachine):
    """A target waits for a room without a deadline."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Receive):
            event = replace(event, wanted=replace(event.wanted, deadline=inf))
        return super().handle(event, now)


@broken_rule(source_part("admission"), one_sided=0.3)
class KeepEarlyOffers(SourceAdmission):
    """Offers for rooms that never open are kept for ever."""

    def early_deadline(self, offer: Offer, now: float) -> float:
        return inf
