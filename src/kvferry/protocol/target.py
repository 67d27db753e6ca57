"""The target machine: offers pages to sources, and knows when a room is complete.

A room is done when the ledger covers the plan and every source that was told
of it has said Close. A room that fails reports so at once; its pages are
released when every leg is quiet and every scatter has ended, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.config import ProtocolConfig
from kvferry.digest import MAX_DIGEST
from kvferry.errors import Misuse, Refused
from kvferry.fingerprint import difference
from kvferry.ids import Generation, Op, Peer, Room, SlotIndex
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block
from kvferry.protocol.checks import close_problem
from kvferry.protocol.credits import CreditBook
from kvferry.protocol.cutting import image_bytes
from kvferry.protocol.declines import Declined, Declines
from kvferry.protocol.endpoint import Identity, Link
from kvferry.protocol.events import (
    Cancel,
    Decline,
    Event,
    Receive,
    Release,
    Report,
    Scatter,
    Scattered,
)
from kvferry.protocol.handshake import Greeter
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.legs import Leg, Scattering, TargetRoom
from kvferry.protocol.messages import (
    MAX_CREDITS,
    MAX_PAGES,
    MAX_REMAINING_S,
    MAX_TABLES,
    MIN_REMAINING_S,
    Abort,
    Accept,
    Arrived,
    Body,
    Close,
    Complete,
    Credit,
    Drained,
    Grant,
    Nudge,
    Offer,
    RoomMessage,
    Staging,
    Want,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode, Status
from kvferry.protocol.states import LEG, LegState, LegStep, LinkState, advance


class TargetMachine(Greeter):
    """Every room of one target rank."""

    def __init__(
        self, identity: Identity, config: ProtocolConfig, pools: PoolMap, staging: Staging
    ) -> None:
        super().__init__(identity, config, pools, staging)
        self.rooms: dict[Room, TargetRoom] = {}
        self.scattering: dict[Op, Scattering] = {}
        self.credits = CreditBook(staging.num_slots, config.credits_per_source)
        self.declines = Declines(config.max_early_rooms)
        self._generations = 0
        self._ops = 0

    def _take(self, event: Event) -> None:
        match event:
            case Receive():
                self._on_receive(event)
            case Scattered():
                self._on_scattered(event)
            case Cancel():
                self._on_cancel(event)
            case Decline():
                self._on_decline(event)
            case _:
                super()._take(event)

    def _take_message(self, link: Link, body: Body) -> None:
        match body:
            case Arrived():
                self._on_arrived(link, body)
            case Close():
                self._on_close(link, body)
            case Accept():
                self._on_accept(link, body)
            case Want():
                self._on_want(link, body)
            case Abort():
                self._on_abort(link, body)
            case Drained():
                self._on_drained(link, body)
            case _:
                super()._take_message(link, body)

    # ------------------------------------------------------------ what a caller sees

    def status(self, name: Room) -> Status | None:
        """Where a room stands; None if it has ended or never was."""
        room = self.rooms.get(name)
        if room is None:
            return None
        if room.failure:
            return Status.FAILED
        if any(leg.state is LegState.CONNECTING for leg in room.legs.values()):
            return Status.CONNECTING
        return Status.MOVING if room.ledger.begun else Status.WAITING

    @property
    def num_quarantined(self) -> int:
        """Failed rooms whose pages wait for proof from a peer that is lost."""
        if not self._any_lost:
            return 0
        return sum(room.failure is not None and self._waits(room) for room in self.rooms.values())

    def _waits(self, room: TargetRoom) -> bool:
        return any(
            leg.state is LegState.DRAINING and leg.link.state is LinkState.LOST
            for leg in room.legs.values()
        )

    # ------------------------------------------------------------ from the engine

    def _on_receive(self, event: Receive) -> None:
        if event.room in self.rooms:
            raise Misuse(f"room {event.room!r} is already being received; use another id")
        wanted = event.wanted
        if len(wanted.tables) > MAX_TABLES or any(len(t.pages) > MAX_PAGES for t in wanted.tables):
            raise Misuse(
                f"a room has at most {MAX_TABLES} tables of {MAX_PAGES} pages; use larger ones"
            )
        if len(wanted.digest) > MAX_DIGEST:
            raise Misuse(f"a digest has at most {MAX_DIGEST} bytes, not {len(wanted.digest)}")
        failure = self._no_room_for(event)
        if failure:
            self._do(Report(event.room, failure))
            self._do(Release(event.room))
            return
        plan = self._plan_with(event.prefill.layout)
        self._generations += 1
        room = TargetRoom(
            wanted,
            generation=Generation(self._generations),
            prefill=event.prefill,
            plan=plan,
            deadline=wanted.deadline,
            ledger=Ledger(plan, self.me.rank, wanted.request),
        )
        self.rooms[room.name] = room
        for source in plan.contacts(self.me.rank):
            link = self._link_to(Peer(event.prefill.name, source), plan)
            room.legs[source] = Leg(source, link, self._now)
            if link.state is LinkState.UP:
                self._offer(room, room.legs[source])

    def _no_room_for(self, event: Receive) -> Failure | None:
        """Why this room can't even begin."""
        if event.deadline <= self._now:
            return Failure.of(FailureCode.DEADLINE, "the deadline had passed at the start")
        if len(self.rooms) >= self.config.max_rooms:
            return Failure.of(FailureCode.TOO_MANY_ROOMS, f"{len(self.rooms)} rooms are open here")
        if self.num_quarantined >= self.config.max_quarantined_rooms:
            text = f"{self.num_quarantined} failed rooms wait for proof from lost peers"
            return Failure.of(FailureCode.QUARANTINE_FULL, text)
        if event.prefill.fingerprint != self.fingerprint:
            text = difference(event.prefill.fingerprint, self.fingerprint)
            return Failure.of(FailureCode.REFUSED, text)
        try:
            self._plan_with(event.prefill.layout)
        except Refused as refused:
            return Failure.of(FailureCode.REFUSED, str(refused))
        return None

    def _on_cancel(self, event: Cancel) -> None:
        room = self.rooms.get(event.room)
        if room:
            given_up = Failure.of(FailureCode.ABORTED, "given up at decode")
            self._fail(room, event.failure or given_up)

    def _on_decline(self, event: Decline) -> None:
        if event.room in self.rooms:
            raise Misuse(f"room {event.room!r} is being received; abort it instead")
        try:
            plan = self._plan_with(event.prefill.layout)
        except Refused:
            # That instance could not have sent anything here.
            return
        failure = Failure.of(FailureCode.ABORTED, "not wanted at decode")
        self._generations += 1
        for source in plan.contacts(self.me.rank):
            link = self._link_to(Peer(event.prefill.name, source), plan)
            generation = Generation(self._generations)
            self.declines.add(Declined(link, event.room, generation, failure))
        self._say_declines()

    def _say_declines(self) -> None:
        for one in self.declines.due(self._now, self.config.resend_s):
            one.said_at = self._now
            self._say(one.link, Abort(one.room, one.generation, one.failure, accepted=False))

    def _on_scattered(self, event: Scattered) -> None:
        done = self.scattering.pop(event.op, None)
        if done is None:
            self.counts["late"] += 1
            return
        self.credits.scattered(done.slot)
        done.room.scatters.discard(event.op)
        for block in done.blocks:
            done.room.ledger.add(done.source, block)
        self._end_if_possible(done.room)

    # ------------------------------------------------------------ legs

    def _link_up(self, link: Link) -> None:
        for room, leg in self._legs_of(link):
            if leg.state is LegState.CONNECTING:
                self._offer(room, leg)
        self._say_declines()

    def _legs_of(self, link: Link) -> Iterator[tuple[TargetRoom, Leg]]:
        for room in list(self.rooms.values()):
            for leg in room.legs.values():
                if leg.link is link:
                    yield room, leg

    def _step(self, leg: Leg, step: LegStep) -> None:
        leg.state = advance(LEG, leg.state, step)

    def _offer(self, room: TargetRoom, leg: Leg) -> None:
        if leg.state is LegState.CONNECTING:
            self._step(leg, LegStep.LINKED)
        self._tell(
            leg,
            Offer(
                room.name,
                room.generation,
                room.wanted.request,
                room.wanted.tables,
                min(max(MIN_REMAINING_S, room.deadline - self._now), MAX_REMAINING_S),
            ),
        )
        leg.offer_seq = leg.link.seq_out

    def _give_up(self, room: TargetRoom, leg: Leg) -> None:
        assert room.failure is not None
        accepted = leg.accepted
        self._tell(leg, Abort(room.name, room.generation, room.failure, accepted))

    def _tell(self, leg: Leg, body: Offer | Nudge | Complete | Abort) -> None:
        leg.said_at = self._now
        self._say(leg.link, body)

    def _leg(self, link: Link, body: RoomMessage) -> tuple[TargetRoom, Leg] | None:
        """The leg that a message is about, if this attempt at the room is still on."""
        room = self.rooms.get(body.room)
        if room is None or room.generation != body.generation:
            self.counts["late"] += 1
            return None
        leg = room.legs.get(link.peer.rank)
        if leg is None or leg.link is not link:
            return None
        leg.accepted = True
        return room, leg

    def _on_accept(self, link: Link, body: Accept) -> None:
        found = self._leg(link, body)
        if found:
            self._heard(found[1])

    def _heard(self, leg: Leg) -> None:
        if leg.state is not LegState.QUIET:
            self._step(leg, LegStep.ACCEPTED)

    def _on_want(self, link: Link, body: Want) -> None:
        found = self._leg(link, body)
        if not found or found[0].failure:
            return
        room, leg = found
        self._heard(leg)
        self.credits.want((room.name, leg.source), body.total, len(room.legs))
        self._say_grant(room, leg)

    def _say_grant(self, room: TargetRoom, leg: Leg) -> None:
        outstanding = self.credits.outstanding((room.name, leg.source))
        promised = tuple(Credit(serial, slot) for serial, slot in outstanding.items())
        if promised:
            self._say(leg.link, Grant(room.name, room.generation, promised[:MAX_CREDITS]))

    def _on_arrived(self, link: Link, body: Arrived) -> None:
        found = self._leg(link, body)
        if not found or found[0].failure:
            return
        room, leg = found
        if not self._credible(room, leg, body):
            text = f"{link.peer} sent what it does not owe, or more than a slot holds"
            self._fail(room, Failure.of(FailureCode.BAD_NOTE, text))
            return
        self._heard(leg)
        if body.serial is None:
            self._record(room, leg, body.blocks)
            return
        slot = self.credits.take((room.name, leg.source), body.serial)
        if slot is not None:
            self._scatter(room, leg, body, slot)

    def _credible(self, room: TargetRoom, leg: Leg, body: Arrived) -> bool:
        if not all(room.ledger.owes(leg.source, block) for block in body.blocks):
            return False
        if body.serial is None:
            return True
        size = image_bytes(room.plan, leg.source, self.me.rank, room.wanted.request, body.blocks)
        return size <= self.staging.slot_bytes

    def _record(self, room: TargetRoom, leg: Leg, blocks: Iterable[Block]) -> None:
        for block in blocks:
            room.ledger.add(leg.source, block)
        self._end_if_possible(room)

    def _scatter(self, room: TargetRoom, leg: Leg, body: Arrived, slot: SlotIndex) -> None:
        assert body.serial is not None
        self._ops += 1
        op = Op(self._ops)
        room.scatters.add(op)
        self.scattering[op] = Scattering(room, leg.source, body.blocks, slot)
        what = room.plan, room.wanted.request, body.blocks
        self._do(Scatter(op, room.name, leg.link.peer, *what, slot, body.serial))

    def _on_close(self, link: Link, body: Close) -> None:
        found = self._leg(link, body)
        if found is None:
            # The room ended here, and that was heard neither time. Say it again.
            self._say(link, Complete(body.room, body.generation))
            return
        room, leg = found
        if room.failure or leg.state is LegState.QUIET:
            return
        problem = self._differs(room, body)
        if problem:
            self._fail(room, problem)
        elif not all(room.ledger.owes(leg.source, block) for block in body.written):
            self._fail(
                room, Failure.of(FailureCode.BAD_NOTE, f"{link.peer} wrote what it did not owe")
            )
        else:
            self._step(leg, LegStep.CLOSED)
            leg.vouched = True
            if body.metadata is not None:
                room.metadata = body.metadata
            self._record(room, leg, body.written)

    def _differs(self, room: TargetRoom, body: Close) -> Failure | None:
        return close_problem(body, room.wanted.request.num_tokens, room.wanted.digest)

    def _on_abort(self, link: Link, body: Abort) -> None:
        found = self._leg(link, body)
        if found:
            self._fail(found[0], body.failure)

    def _on_drained(self, link: Link, body: Drained) -> None:
        found = self._leg(link, body)
        if not found:
            self.declines.answered(link, body.room, body.generation)
            return
        room, leg = found
        if self._proves(leg, body):
            self._quiet(room, leg)
        self._fail(room, body.failure)

    def _proves(self, leg: Leg, body: Drained) -> bool:
        """Whether no Offer of ours can reach the source after it said this."""
        return body.heard >= leg.offer_seq

    # ------------------------------------------------------------ ends

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        """Report the failure, tell every source, and wait for their proof."""
        if room.failure is None:
            room.failure = failure
            self._do(Report(room.name, failure))
            for leg in room.legs.values():
                self._decline_unoffered(room, leg)
                self._step(leg, LegStep.FAIL)
                if leg.link.state is LinkState.GONE:
                    self._quiet(room, leg)
                elif leg.state is LegState.DRAINING:
                    self._give_up(room, leg)
                self.credits.stop((room.name, leg.source))
        self._end_if_possible(room)

    def _decline_unoffered(self, room: TargetRoom, leg: Leg) -> None:
        """Have a source that never had an offer told, once it can be reached."""
        if leg.state is LegState.CONNECTING and leg.link.state is LinkState.GREETING:
            assert room.failure is not None
            self.declines.add(Declined(leg.link, room.name, room.generation, room.failure))

    def _quiet(self, room: TargetRoom, leg: Leg) -> None:
        """Proof: this source writes nothing more for this room."""
        self._step(leg, LegStep.QUIET)
        self.credits.settle((room.name, leg.source))

    def _end_if_possible(self, room: TargetRoom) -> None:
        if room.scatters or self.rooms.get(room.name) is not room:
            return
        if room.failure is None:
            if self._is_complete(room):
                self._complete(room)
        elif all(leg.state is LegState.QUIET for leg in room.legs.values()):
            self._forget(room)

    def _is_complete(self, room: TargetRoom) -> bool:
        all_closed = all(leg.state is LegState.CLOSED for leg in room.legs.values())
        return all_closed and room.ledger.complete

    def _complete(self, room: TargetRoom) -> None:
        for leg in room.legs.values():
            self._tell(leg, Complete(room.name, room.generation))
        self._do(Report(room.name, Done(room.metadata)))
        self._forget(room)

    def _forget(self, room: TargetRoom) -> None:
        for leg in room.legs.values():
            self.credits.settle((room.name, leg.source))
        del self.rooms[room.name]
        for leg in room.legs.values():
            self._drop_if_unneeded(leg.link)
        self._do(Release(room.name))

    def _link_lost(self, link: Link, failure: Failure) -> None:
        self.declines.lost(link)
        for room, leg in self._legs_of(link):
            # A source that has closed, and from which nothing is missing, may go.
            if leg.state is not LegState.CLOSED or room.ledger.missing(leg.source):
                self._fail(room, failure)

    def _link_gone(self, link: Link) -> None:
        for room, leg in self._legs_of(link):
            if room.failure:
                self._quiet(room, leg)
                self._end_if_possible(room)

    def _link_needed(self, link: Link) -> bool:
        return any(leg.state is not LegState.QUIET for _, leg in self._legs_of(link))

    def _settle(self) -> None:
        for name, source in self.credits.grant():
            room = self.rooms[name]
            self._say_grant(room, room.legs[source])

    # ------------------------------------------------------------ time

    def _tick_rooms(self) -> None:
        self._say_declines()
        for room in list(self.rooms.values()):
            if room.failure is None and self._now >= room.deadline:
                self._fail(room, Failure.of(FailureCode.DEADLINE, self._still_missing(room)))
            for leg in room.legs.values():
                if self._now >= self._repeat_at(leg):
                    self._repeat(room, leg)

    def _still_missing(self, room: TargetRoom) -> str:
        late = [
            f"{leg.link.peer} ({leg.state})"
            for leg in room.legs.values()
            if leg.state is not LegState.CLOSED or room.ledger.missing(leg.source)
        ]
        return f"still waiting for {', '.join(late)}"

    def _repeat_at(self, leg: Leg) -> float:
        match leg.state:
            case LegState.OFFERED | LegState.DRAINING:
                return leg.said_at + self.config.resend_s
            case LegState.ACCEPTED | LegState.CLOSED:
                return leg.said_at + self.config.nudge_s
            case LegState.CONNECTING | LegState.QUIET:
                return float("inf")

    def _repeat(self, room: TargetRoom, leg: Leg) -> None:
        """Say again what may have been lost."""
        if leg.state is LegState.OFFERED:
            self._offer(room, leg)
        elif leg.state is LegState.DRAINING:
            self._give_up(room, leg)
        else:
            serials = tuple(self.credits.outstanding((room.name, leg.source)))[:MAX_CREDITS]
            self._tell(leg, Nudge(room.name, room.generation, serials))

    def _room_timers(self) -> Iterable[float]:
        yield from self.declines.timers(self.config.resend_s)
        for room in self.rooms.values():
            if room.failure is None:
                yield room.deadline
            for leg in room.legs.values():
                if leg.state not in (LegState.CONNECTING, LegState.QUIET):
                    yield self._repeat_at(leg)
