"""Writes: to a source's driver, the port to its peers' memory, whatever transport each has.

A small write into mapped memory is made here and now, because handing it to another
thread would cost more, and so is one of any size that a GPU makes. Everything else goes to
the mover, or to the copier first, which fills a slot and passes it on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from kvferry.errors import KvferryError, TransportError
from kvferry.ids import Op, Peer, Session, SlotIndex
from kvferry.logs.context import about
from kvferry.plan.bind import Binding, Image, Pair, Side, Size
from kvferry.plan.binder import Binders
from kvferry.plan.choose import Path
from kvferry.plan.cost import LinkCosts
from kvferry.plan.places import Base
from kvferry.protocol.events import (
    Connect,
    Event,
    Fate,
    Gather,
    MemoryReached,
    MemoryUnreached,
    Post,
    Scatter,
    SendFailed,
    Sent,
    Write,
)
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.transports import common_transports
from kvferry.runtime.copier import BulkWrite, Copied, CopyJob, Filled
from kvferry.runtime.mover.calibration import SCRATCH_BYTES, Calibration
from kvferry.runtime.mover.mover import (
    Flight,
    Measured,
    Posting,
    Reached,
    Unreached,
    WriteEnd,
)
from kvferry.runtime.outgoing import Outgoing
from kvferry.runtime.owner.ahead import AheadSlot
from kvferry.runtime.owner.outfit import Outfit
from kvferry.runtime.owner.staging_policy import Course, Sides, StagingPolicy
from kvferry.runtime.owner.stories import GATHERED, Took
from kvferry.runtime.owner.underway import Underway
from kvferry.runtime.peer_metadata import PeerMetadata
from kvferry.runtime.telemetry.tags import NOBODYS

log = logging.getLogger("kvferry.runtime")

# What a write may keep the owner from its other work: some 50 µs.
AT_ONCE_BYTES, AT_ONCE_PIECES = 128 << 10, 64


class Writes:
    """What is being written, and how each of it goes."""

    def __init__(self, outfit: Outfit[Outgoing], costs: LinkCosts, *, measures: bool) -> None:
        self._setup = outfit.setup
        self._rooms = outfit.rooms
        self._mover = outfit.mover
        self._copier = outfit.copier
        self._meter = outfit.meter
        self._stories = outfit.stories
        self._costs = costs
        self._measures = measures
        self._metadata: dict[Session, PeerMetadata] = {}
        # Links whose small writes are made at once.
        self._at_once: dict[Session, Reached] = {}
        self._flying: dict[Op, Write | Gather] = {}
        self._underway = Underway()
        self._binders = Binders()
        # When a gather was asked for.
        self._gathering: dict[Op, float] = {}
        # Gathers that have not ended, or of which nobody has said what becomes of them.
        self._ahead: dict[Op, AheadSlot] = {}

    def attach(
        self,
        machine: SourceMachine,
        policy: StagingPolicy,
        answer: Callable[[Event], None],
        tell: Callable[[Op], None],
    ) -> None:
        """Whom this writes for, who hears how it went, and who tells the target at once."""
        self._machine = machine
        self._policy = policy
        self._answer = answer
        self._tell = tell

    def sides_of(self, course: Course) -> Sides:
        """Where a room's pages are, here and at a target; made once for all writes of an offer."""
        handle = self._rooms.get(course.room)
        ours = Side(self._setup.memory.map, handle.tables.tables() if handle else {})
        key = (course.session, course.generation)
        theirs = handle.sides.get(key) if handle else None
        if theirs is None:
            hello = self._machine.links[course.session].hello
            assert hello is not None
            theirs = Side(hello.pools, {t.group: t.as_page_table() for t in course.tables})
            if handle:
                handle.sides[key] = theirs
        return Sides(ours, theirs)

    # ------------------------------------------------------------ peers

    def connect(self, action: Connect) -> None:
        """A target has greeted us: reach its memory while the engine still computes."""
        try:
            self._metadata[action.session] = PeerMetadata.decode(action.metadata)
        except TransportError as error:
            self.unreached(Unreached(action.session, (str(error),)))
        else:
            self._mover.reach(action.session, action.transports)

    def unreached(self, news: Unreached) -> None:
        """A peer's memory can't be reached: the handshake refuses it."""
        me, why = self._setup.member.peer, "; ".join(news.problems)
        log.warning("not-connected endpoint=%s session=%s problem=%s", me, news.session, why)
        self._answer(MemoryUnreached(news.session, news.problems))

    def reached(self, news: Reached) -> None:
        """A peer's memory is there."""
        session, transport = news.session, news.transport
        link, metadata = self._machine.links.get(session), self._metadata.get(session)
        if link is None or metadata is None:
            return  # It was given up meanwhile.
        assert link.hello is not None
        untried = common_transports(self._setup.offers, link.hello.transports).problems
        log.info(
            "connected endpoint=%s peer=%s transport=%s instead_of=%r",
            *(self._setup.member.peer, link.peer, transport.name),
            "; ".join((*news.problems, *untried)),
        )
        self._meter.linked(link.peer, transport.name)
        if transport.writes_at_once:
            self._at_once[session] = news
        self._costs.reached(session, transport.name, metadata.lifeline[0])
        self._answer(MemoryReached(session, transport.name))
        measurable = self._measurable(metadata) and not transport.maps_peer
        if measurable and self._costs.due(session, time.monotonic()):
            calibration = self._calibration(metadata)
            self._mover.measure(session, calibration, self._costs.of(session))

    def measured(self, news: Measured) -> None:
        """A link costs this."""
        self._costs.measured(news.session, news.constants)

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start."""
        self._at_once.pop(session, None)
        self._mover.cut(session)

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight."""
        self._at_once.pop(session, None)
        self._metadata.pop(session, None)
        self._costs.forget(session)
        self._mover.forget(session)

    def _measurable(self, metadata: PeerMetadata) -> bool:
        both = self._setup.slots is not None and metadata.staging_region is not None
        return self._measures and both and metadata.scratch_bytes >= SCRATCH_BYTES

    def _calibration(self, metadata: PeerMetadata) -> Calibration:
        slots = self._setup.slots
        assert slots is not None
        assert metadata.staging_region is not None
        ours = Base(0, len(self._setup.memory.regions), slots.scratch_offset)
        theirs = Base(0, metadata.staging_region, metadata.scratch_offset)
        return Calibration(ours, theirs, min(slots.scratch_bytes, metadata.scratch_bytes))

    # ------------------------------------------------------------ writes

    def write(self, action: Write) -> None:
        """Make a write, or have it made."""
        self._flying[action.op] = action
        if action.slot is not None:
            self._gather(action)
            return
        session = action.note.session
        try:
            binding = self._policy.binding(self._machine.links[session].plan, action)
        except KvferryError as error:
            self.ended(WriteEnd(action.op, Fate.FAILED, str(error)))
            return
        posting = Posting(action.op, session, binding)
        reached = self._at_once.get(session)
        if reached is not None and (reached.transport.writes_elsewhere or is_small(binding.size)):
            self._write_now(posting, reached)
        else:
            self._mover.write(posting)

    def post(self, posting: Posting) -> None:
        """A GPU has filled a slot: have it written. It copies that by itself too."""
        reached = self._at_once.get(posting.session)
        if reached is None:
            self._mover.write(posting)
        else:
            self._write_now(posting, reached)

    def _write_now(self, posting: Posting, reached: Reached) -> None:
        transport, binding = reached.transport, posting.binding
        if not transport.maps_peer and posting.path is None:
            binding = binding.merged()
        started = time.monotonic()
        ended = transport.write_now(reached.remote, posting.op, binding)
        # What it was is worked out while it goes on.
        direct = Path.RUNS if posting.binding.contiguous else Path.SLICES
        flight = Flight(started, posting.path or direct, *binding.size, transport.name)
        if ended is None:
            self._underway.add(posting.op, transport, flight)
        elif ended.fate is Fate.BUSY:
            self._mover.write(posting)
        else:
            self.ended(flight.end(ended))

    def foresee(self, session: Session, binding: Binding) -> None:
        """This may be written soon, as one write, into mapped memory."""
        reached = self._at_once.get(session)
        if reached is not None:
            reached.transport.foresee(reached.remote, binding)

    def ends(self, now: float) -> Iterator[Op]:
        """Take the ends of what was begun here, one by one."""
        for end in self._underway.ended(now):
            self.ended(end)
            yield end.op

    @property
    def has_fresh(self) -> bool:
        """Whether one of these has just begun."""
        return self._underway.has_fresh(time.monotonic())

    def wakeup(self) -> float:
        """When to look at these again."""
        return self._underway.wakeup()

    def scatter(self, action: Scatter) -> None:
        """Never asked for: what comes to a source is its engine's."""
        raise AssertionError(f"a source was asked for {action!r}")

    def _gather(self, action: Write) -> None:
        """Fill the local slot, then write it in bulk."""
        session = action.note.session
        assert action.slot is not None
        assert action.local_slot is not None
        there = self._slot_there(session, action.slot)
        if there is None:
            self._has_no_slot(action)
        else:
            then = BulkWrite(session, self._slot_here(action.local_slot), there)
            self._fill(action, action.local_slot, then)

    def _has_no_slot(self, action: Write | Gather) -> None:
        problem = f"{action.peer} granted a slot that it does not have"
        self.ended(WriteEnd(action.op, Fate.FAILED, problem))

    def _slot_here(self, slot: SlotIndex) -> Base:
        assert self._setup.slots is not None
        return Base(0, len(self._setup.memory.regions), self._setup.slots.pool.offset(slot))

    def _slot_there(self, session: Session, slot: SlotIndex) -> Base | None:
        hello, region = self._machine.links[session].hello, self._metadata[session].staging_region
        assert hello is not None
        return None if region is None else Base(0, region, slot * hello.staging.slot_bytes)

    def _fill(self, action: Write | Gather, slot: SlotIndex, then: BulkWrite) -> None:
        self._gathering[action.op] = time.monotonic()
        slots, link = self._setup.slots, self._machine.links[then.session]
        assert slots is not None
        handle = self._rooms.get(action.room)
        ours = Side(self._setup.memory.map, handle.tables.tables() if handle else {})
        pair = Pair(self._setup.member.rank, action.peer.rank)
        binder = self._binders.of(link.plan, pair, ours.pools, None)
        make = partial(binder.bind, action.request, ours, Image(), action.blocks)
        into = (slots.address(slot),)
        self._copier.submit(CopyJob(action.op, make, self._setup.addresses, into, then))

    def copied(self, news: Copied) -> None:
        """A gather has failed; one that went well is the mover's by now, or filled a slot."""
        self._ahead.pop(news.op, None)
        self.ended(WriteEnd(news.op, Fate.FAILED, news.problem))

    # ------------------------------------------------------------ gathers ahead

    def gather(self, action: Gather) -> None:
        """Fill the local slot; where it is written will be said."""
        self._flying[action.op] = action
        if self._slot_there(action.session, SlotIndex(0)) is None:
            self._has_no_slot(action)
            return
        here = self._slot_here(action.local_slot)
        self._ahead[action.op] = AheadSlot(action.op, action.session, here)
        self._fill(action, action.local_slot, BulkWrite(action.session, here))

    def post_gathered(self, action: Post) -> None:
        """Write a slot, when it is filled."""
        slot = self._ahead.get(action.op)
        if slot is not None:  # Or else its gather has failed, which is being told.
            slot.there = self._slot_there(slot.session, action.slot)
            self._settle(slot)

    def discard(self, op: Op) -> None:
        """Write nothing; say so when the gather has ended."""
        slot = self._ahead.get(op)
        if slot is not None:
            slot.discarded = True
            self._settle(slot)

    def filled(self, news: Filled) -> None:
        """A gather has ended."""
        slot, action = self._ahead[news.op], self._flying[news.op]
        slot.num_bytes = news.num_bytes
        now = time.monotonic()
        took = Took(now - self._gathering.pop(news.op), news.num_bytes, str(Path.STAGED))
        self._tell_gathered(action, now, took)
        self._settle(slot)

    @property
    def _on_host(self) -> bool:
        """Whether a core copies what is written from our slots."""
        slots = self._setup.slots
        return slots is not None and slots.region.device.is_host

    def _settle(self, slot: AheadSlot) -> None:
        """Go on with a slot that is filled, if it is known what becomes of it."""
        if not slot.is_settled:
            return
        del self._ahead[slot.op]
        posting = slot.posting()
        if posting is not None and self._on_host:
            self._mover.write(posting)
        elif posting is not None:
            self.post(posting)
        else:
            del self._flying[slot.op]
            self._answer(SendFailed(slot.op, Fate.BUSY))

    def ended(self, end: WriteEnd) -> None:
        """A write has ended, or nobody knows whether."""
        action = self._flying.pop(end.op)
        asked = self._gathering.pop(end.op, None)
        if end.fate is not None:
            self._meter.wrote(end)
            self._log(action.peer, action, end)
            self._answer(SendFailed(end.op, end.fate))
            return
        self._stories.wrote(action.room, action.peer, end.path, end.num_bytes, end.seconds)
        if self._machine.is_followed(end.op):
            # A target has to empty this slot before the next can be written: all else can wait.
            self._tell(end.op)
        self._meter.wrote(end)
        if asked is not None:
            begun = self._stories.now - end.seconds
            took = Took(begun - asked, end.num_bytes, str(end.path))
            self._tell_gathered(action, begun, took)
        handle = self._rooms.get(action.room)
        if handle is not None:
            handle.carried[end.path] = handle.carried.get(end.path, 0) + end.num_bytes
            handle.num_writes += 1
        self._answer(Sent(end.op))

    def _tell_gathered(self, action: Write | Gather, ended: float, took: Took) -> None:
        self._meter.took("gather", took.seconds)
        self._stories.copied(action.room, GATHERED, action.peer, ended, took)

    def _log(self, peer: Peer, action: Write | Gather, end: WriteEnd) -> None:
        handle = self._rooms.get(action.room)
        with about(*(handle.tag if handle else NOBODYS)):
            log.warning(
                "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
                *(self._setup.member.peer, action.room, peer, end.fate, end.detail),
            )


def is_small(size: Size) -> bool:
    """Whether a write may be made by the owner itself."""
    return size.num_bytes <= AT_ONCE_BYTES and size.num_pieces <= AT_ONCE_PIECES
