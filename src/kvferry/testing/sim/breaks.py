"""Deliberately broken rules. The simulator must notice each of them.

Every break is a mistake that a system of this kind has made, or nearly. They
are subclasses here, so no product code path knows about them. A break may name
faults that make its mistake matter; the rest of a seed is drawn as always.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvferry.ids import Op, Serial, SlotIndex
from kvferry.layout.spec import Slot
from kvferry.plan.plan import Block
from kvferry.protocol.checks import close_problem
from kvferry.protocol.credits import AccountKey, CreditBook
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import Push
from kvferry.protocol.lanes import Lane, SourceRoom, Writing
from kvferry.protocol.legs import Leg, TargetRoom
from kvferry.protocol.messages import (
    Abort,
    Arrived,
    Close,
    Credit,
    Drained,
    Envelope,
    Hello,
    NoSession,
    Refuse,
    RoomMessage,
)
from kvferry.protocol.outcome import Failure
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LegState
from kvferry.protocol.target import TargetMachine
from kvferry.testing.sim.cluster import Machines
from kvferry.testing.sim.drivers import (
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


class CountsMessages(TargetMachine):
    """Done when as many Closes have come as there are sources."""

    def _on_close(self, link: Link, body: Close) -> None:
        self.counts[f"closes of {body.room}"] += 1
        super()._on_close(link, body)

    def _is_complete(self, room: TargetRoom) -> bool:
        return self.counts[f"closes of {room.name}"] >= len(room.legs)


class SharesKey(TargetMachine):
    """All sources report under one key."""

    def _leg(self, link: Link, body: RoomMessage) -> tuple[TargetRoom, Leg] | None:
        room = self.rooms.get(body.room)
        if room is None or room.generation != body.generation:
            return None
        return room, room.legs[min(room.legs)]


class IgnoresDigest(TargetMachine):
    """Takes whatever has the right length for what it has asked for."""

    def _differs(self, room: TargetRoom, body: Close) -> Failure | None:
        return close_problem(body, room.wanted.request.num_tokens, body.digest)


class ExpectsState(TargetMachine):
    """Waits for a state row although the model has none."""

    def _is_complete(self, room: TargetRoom) -> bool:
        has_state = any(isinstance(group.kind, Slot) for group in room.plan.spec.groups)
        return has_state and super()._is_complete(room)


class DoneBeforeScatter(TargetMachine):
    """Takes a staged block for arrived when its note comes, before it is scattered."""

    def _on_arrived(self, link: Link, body: Arrived) -> None:
        super()._on_arrived(link, body)
        found = self._leg(link, body)
        if found and not found[0].failure:
            self._record(found[0], found[1], body.blocks)

    def _end_if_possible(self, room: TargetRoom) -> None:
        waiting, room.scatters = room.scatters, set()
        super()._end_if_possible(room)
        room.scatters = waiting


class MetadataWithState(SourceMachine):
    """Sends the metadata only where there is state to send."""

    def _say_close(self, lane: Lane) -> None:
        finish = lane.room.finish
        assert finish is not None
        has_state = any(isinstance(g.kind, Slot) for g in self.layout.spec.groups)
        if not has_state:
            lane.room.finish = replace(finish, metadata=b"")
        super()._say_close(lane)


class LayerCountsForAll(SourceMachine):
    """Takes the first layer of a chunk for the chunk, computed or not."""

    def _send(self, lane: Lane, push: Push) -> None:
        whole = replace(push, layers=None)
        first = next(one for one in lane.room.pushes if one.tokens == push.tokens)
        if push is first:
            super()._send(lane, whole)


class ClosesEarly(SourceMachine):
    """Says Close when the engine has finished, with writes still in flight."""

    def _close_if_sent(self, lane: Lane) -> None:
        inflight, lane.inflight = lane.inflight, set()
        written = list(lane.written)
        if not lane.direct and not lane.staged:
            lane.written += [b for op in inflight for b in self.writing[op].blocks]
        super()._close_if_sent(lane)
        lane.inflight, lane.written = inflight, written


# ---------------------------------------------------------------- memory


class ReleasesAtAbort(TargetMachine):
    """Frees pages when a room is given up, without waiting for the sources."""

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        super()._fail(room, failure)
        for leg in room.legs.values():
            if leg.state is not LegState.QUIET:
                self._quiet(room, leg)
        self._end_if_possible(room)


class TakesSilenceForProof(TargetMachine):
    """Frees pages when a peer is silent, as if that proved anything."""

    def _link_lost(self, link: Link, failure: Failure) -> None:
        super()._link_lost(link, failure)
        self._link_gone(link)


class DrainsAtOnce(SourceMachine):
    """Answers Drained to an abort while its writes are still in flight."""

    def _fail(self, room: SourceRoom, failure: Failure) -> None:
        lanes = list(room.lanes.values())
        super()._fail(room, failure)
        for lane in lanes:
            self._say(lane.link, Drained(room.name, lane.generation, failure, lane.link.seq_in))


class ReleasesWhileWriting(SourceMachine):
    """Gives pages back to the engine while a write still reads them."""

    def _drain(self, room: SourceRoom) -> None:
        if room.failure is not None:
            for lane in room.lanes.values():
                lane.inflight.clear()
        super()._drain(room)


class RefillsSlot(SourceMachine):
    """Uses a send buffer again before the write has read it."""

    def _write(
        self,
        lane: Lane,
        blocks: tuple[Block, ...],
        credit: Credit | None = None,
        local_slot: SlotIndex | None = None,
    ) -> None:
        super()._write(lane, blocks, credit, local_slot)
        if local_slot is not None:
            self.local_slots.append(local_slot)
            self.writing[Op(self._ops)].local_slot = None


class RefillsDiscarded(SourceMachine):
    """Uses a slot again that was gathered ahead for nothing, before its gather has ended."""

    def _discard_held(self, lane: Lane) -> None:
        for op in lane.held:
            slot, self.writing[op].local_slot = self.writing[op].local_slot, None
            assert slot is not None
            self.local_slots.append(slot)
        super()._discard_held(lane)


class LosesDiscarded(SourceMachine):
    """Forgets what it had gathered ahead when no credit comes for it."""

    def _retry(self, write: Writing) -> None:
        if not write.is_ahead:
            super()._retry(write)


class RefillsTakenBack(SourceMachine):
    """Takes the only slot from who has no credit, before its gather has ended."""

    def _take_back(self) -> None:
        super()._take_back()
        for write in self.writing.values():
            if write.is_taken_back and write.local_slot is not None:
                self.local_slots.append(write.local_slot)
                write.local_slot = None


class LosesTakenBack(SourceMachine):
    """Forgets what it had gathered into a slot that somebody else needed."""

    def _retry(self, write: Writing) -> None:
        if not write.is_taken_back:
            super()._retry(write)


# ---------------------------------------------------------------- credits


class OvercommittedBook(CreditBook):
    """Promises a slot that it has promised before."""

    def grant(self) -> list[AccountKey]:  # noqa: D102
        if not self.free and self._queue and self.num_promised:
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

    def take(self, key: AccountKey, serial: Serial) -> SlotIndex | None:  # noqa: D102
        slot = super().take(key, serial)
        if slot is not None:
            self.seen[key, serial] = slot
        return self.seen.get((key, serial))

    def scattered(self, slot: SlotIndex) -> None:  # noqa: D102
        if slot in self.scattering:
            super().scattered(slot)


class LeakyBook(CreditBook):
    """Never takes back the slots of a room that was given up."""

    def settle(self, key: AccountKey) -> None:  # noqa: D102
        if not self.outstanding(key):
            super().settle(key)


def _with_book(book: type[CreditBook]) -> type[TargetMachine]:
    class WithBook(TargetMachine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.credits = book(self.staging.num_slots, self.config.credits_per_source)

        def _settle(self) -> None:
            for name, source in self.credits.grant():
                room = self.rooms.get(name)
                if room:
                    self._say_grant(room, room.legs[source])

    return WithBook


# ---------------------------------------------------------------- peers and time


class TakesRestartForTheSame(TargetMachine):
    """Takes a peer that has restarted for the one it was before."""

    def _link_of(self, envelope: Envelope) -> Link | None:
        link = self.links.get(envelope.session)
        if link is None or link.peer != envelope.sender:
            return super()._link_of(envelope)
        link.heard_at = self._now
        return None if isinstance(envelope.body, NoSession) else link


class IgnoresOrder(SourceMachine):
    """Acts on frames that later ones have overtaken."""

    def _in_order(self, link: Link, envelope: Envelope) -> bool:
        return True

    def _warn(self, link: Link, body: Abort) -> None:
        """And forgets what was taken back."""


class LetsAnyoneIn(SourceMachine):
    """Does not ask which model the other side serves."""

    def _welcome(self, link: Link) -> None:
        assert link.hello is not None
        mine, self.fingerprint = self.fingerprint, link.hello.fingerprint
        super()._welcome(link)
        self.fingerprint = mine

    def _refusal(self, peer: Any, hello: Hello) -> Refuse | None:
        return None


class DeclinesInSilence(TargetMachine):
    """Tells a source nothing of a room that was given up before it was offered."""

    def _say_declines(self) -> None:
        for one in self.declines.due(self._now, 0.0):
            self.declines.answered(one.link, one.room, one.generation)


class NoDeadline(TargetMachine):
    """Waits for ever."""

    def _tick_rooms(self) -> None:
        saved = [(room, room.deadline) for room in self.rooms.values()]
        for room, _ in saved:
            room.deadline = float("inf")
        super()._tick_rooms()
        for room, deadline in saved:
            room.deadline = deadline


class KeepsEarlyOffers(SourceMachine):
    """Keeps offers for rooms that never open."""

    def _expire(self, room: SourceRoom) -> None:
        if room.known_to_engine:
            super()._expire(room)
        else:
            room.deadline = float("inf")


# ---------------------------------------------------------------- the list


SLOW_ABORTS = {"slow_write": 0.3, "cancel_target": 0.3}
STAGED = {"slow_write": 0.3}

BREAKS: dict[str, Break] = {
    "count-messages": Break(
        "completion by message count", Machines(target=CountsMessages), {"duplicate": 0.3}
    ),
    "shared-key": Break("one key shared by all sources", Machines(target=SharesKey)),
    "digest-ignored": Break(
        "another request's cache is taken", Machines(target=IgnoresDigest), {"mixed_up": 0.3}
    ),
    "metadata-with-state": Break("metadata gated on state", Machines(source=MetadataWithState)),
    "state-expected": Break(
        "state expected although the list is empty", Machines(target=ExpectsState)
    ),
    "done-before-scatter": Break(
        "done before the scatter has ended", Machines(target=DoneBeforeScatter)
    ),
    "layer-for-all": Break(
        "one layer of a chunk taken for all of it", Machines(source=LayerCountsForAll)
    ),
    "close-early": Break(
        "closed with writes in flight", Machines(source=ClosesEarly), {"slow_write": 0.3}
    ),
    "release-at-abort": Break(
        "target pages released at abort", Machines(target=ReleasesAtAbort), SLOW_ABORTS
    ),
    "silence-is-proof": Break(
        "target pages released because a peer is silent",
        Machines(target=TakesSilenceForProof),
        {"slow_write": 0.3, "cuts": 3, "stalls": 2},
    ),
    "drained-at-once": Break(
        "Drained sent with writes in flight", Machines(source=DrainsAtOnce), SLOW_ABORTS
    ),
    "release-while-writing": Break(
        "source pages released while being read",
        Machines(source=ReleasesWhileWriting),
        SLOW_ABORTS,
    ),
    "refill-slot": Break(
        "send buffer refilled before it was read", Machines(source=RefillsSlot), STAGED
    ),
    "refill-discarded": Break(
        "slot refilled before its gather has ended",
        Machines(source=RefillsDiscarded),
        {"slow_write": 0.7, "cancel_source": 0.3, "drop": 0.3},
    ),
    "lose-discarded": Break(
        "what was gathered for nothing is never sent",
        Machines(source=LosesDiscarded),
        {"drop": 0.3, "slow_prefill": 0.1},
    ),
    "refill-taken-back": Break(
        "the only slot refilled while it is gathered into",
        Machines(source=RefillsTakenBack),
        {"slow_write": 0.7, "drop": 0.3},
    ),
    "lose-taken-back": Break(
        "what was gathered into somebody else's slot is never sent",
        Machines(source=LosesTakenBack),
        {"drop": 0.3},
    ),
    "overcommit": Break(
        "credits overcommitted", Machines(target=_with_book(OvercommittedBook)), STAGED
    ),
    "duplicate-arrival": Break(
        "duplicate arrival counted",
        Machines(target=_with_book(ForgivingBook)),
        {"duplicate_note": 0.3},
    ),
    "leak-credits": Break(
        "credits of an aborted room never returned",
        Machines(target=_with_book(LeakyBook)),
        {"cancel_target": 0.3, "slow_write": 0.3},
    ),
    "stale-incarnation": Break(
        "stale incarnation accepted", Machines(target=TakesRestartForTheSame), {"kills": 2}
    ),
    "ignore-order": Break(
        "frames acted on that later ones have overtaken",
        Machines(source=IgnoresOrder),
        {"delay": 0.3, "cancel_target": 0.3},
    ),
    "let-anyone-in": Break(
        "another model is served", Machines(source=LetsAnyoneIn), {"strangers": 1}
    ),
    "forget-doubt": Break(
        "a write of unknown fate taken for ended",
        Machines(sessions=ForgetsDoubt),
        {"write_unknown": 0.3},
    ),
    "bury-the-living": Break(
        "one life's end taken for the end of all",
        Machines(sessions=BuriesTheLiving),
        {"kills": 4, "slow_write": 0.7},
    ),
    "leave-in-the-middle": Break(
        "others told of an end with memory still held",
        Machines(source_driver=SourceLeavesInTheMiddle, target_driver=TargetLeavesInTheMiddle),
        {"leaves": 2, "slow_write": 0.3},
    ),
    "count-own-sleep": Break(
        "peers called silent for the time in which this process did not run",
        Machines(source=SourceCountsOwnSleep, target=TargetCountsOwnSleep),
        {"stalls": 6, "one_sided": 0.5, "drop": 0.1},
    ),
    "time-before-frames": Break(
        "the clock looked at before what has come",
        Machines(source_driver=SourceTakesTimeFirst, target_driver=TargetTakesTimeFirst),
        {"stalls": 2},
    ),
    "ask-nobody": Break(
        "a lost session whose process nobody asks after",
        Machines(ports=asks_nobody),
        {"kills": 2, "write_unknown": 0.1},
    ),
    "suspect-the-busy": Break(
        "back-pressure taken for a sign of death",
        Machines(source_driver=SuspectsTheBusy),
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
        Machines(source_driver=SourceOversleeps, target_driver=TargetOversleeps),
    ),
    "decline-in-silence": Break(
        "a source not told that its room was given up", Machines(target=DeclinesInSilence)
    ),
    "no-deadline": Break("no deadline", Machines(target=NoDeadline), {"one_sided": 0.3}),
    "keep-early-offers": Break(
        "early offers never expire", Machines(source=KeepsEarlyOffers), {"one_sided": 0.3}
    ),
}
