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
from kvferry.ids import Op, Session, SlotIndex
from kvferry.logs.context import about
from kvferry.plan.bind import Binding, Image, Pair, Side, Size
from kvferry.plan.binder import Binders
from kvferry.plan.choose import Path
from kvferry.plan.cost import LinkCosts
from kvferry.plan.places import Base
from kvferry.protocol.events import (
    Choose,
    Chosen,
    Connect,
    Event,
    Fate,
    Gather,
    MemoryReached,
    MemoryUnreached,
    Post,
    SendFailed,
    Sent,
    TransferRequest,
    Write,
)
from kvferry.protocol.messages import Hello
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.transports import common_transports
from kvferry.runtime.jobs import WriteJob
from kvferry.runtime.mover.calibration import SCRATCH_BYTES, Calibration
from kvferry.runtime.mover.mover import Measured, Reached, Unreached
from kvferry.runtime.outgoing import Outgoing
from kvferry.runtime.owner.outfit import Outfit
from kvferry.runtime.owner.staging_policy import Sides, StagingPolicy
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
        self._hellos: dict[Session, Hello] = {}
        # Links whose small writes are made at once.
        self._at_once: dict[Session, Reached] = {}
        self._underway = Underway()
        self._binders = Binders()
        # Gathers that have not ended, or of which nobody has said what becomes of them.
        self._ahead: dict[Op, WriteJob] = {}

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

    def choose(self, action: Choose) -> None:
        """Bind the blocks with the room's own pages, and answer with the faster mode of each."""
        stages, transfer = self._policy.stages, action.transfer
        staged = tuple(stages(transfer, block) for block in action.blocks)
        self._answer(Chosen(action.ticket, staged))

    def sides_of(self, transfer: TransferRequest) -> Sides:
        """Where a room's pages are, here and at a target; made once for all writes of an offer."""
        handle = self._rooms.get(transfer.room)
        ours = Side(self._setup.memory.map, handle.tables.tables() if handle else {})
        key = (transfer.session, transfer.generation)
        theirs = handle.sides.get(key) if handle else None
        if theirs is None:
            pools = self._hellos[transfer.session].pools
            theirs = Side(pools, {t.group: t.as_page_table() for t in transfer.tables})
            if handle:
                handle.sides[key] = theirs
        return Sides(ours, theirs)

    # ------------------------------------------------------------ peers

    def connect(self, action: Connect) -> None:
        """A target has greeted us: reach its memory while the engine still computes."""
        assert action.hello is not None
        self._hellos[action.session] = action.hello
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
        self._hellos.pop(session, None)
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
        session = action.transfer.session
        job = WriteJob(action, session)
        if action.slot is not None:
            assert action.local_slot is not None
            job.there = self._slot_there(session, action.slot)
            self._gather(job, action.local_slot)
            return
        try:
            job.binding = self._policy.binding(action)
        except KvferryError as error:
            self._fail(job, str(error))
            return
        reached = self._at_once.get(session)
        if reached is not None and (
            reached.transport.writes_elsewhere or is_small(job.binding.size)
        ):
            self._write_now(job, reached)
        else:
            self._mover.write(job)

    def _post(self, job: WriteJob) -> None:
        """A slot is filled: have it written. A GPU, if it filled the slot, writes it too."""
        slots, reached = self._setup.slots, self._at_once.get(job.session)
        assert slots is not None
        if reached is None or slots.region.device.is_host:
            self._mover.write(job)
        else:
            self._write_now(job, reached)

    def _write_now(self, job: WriteJob, reached: Reached) -> None:
        transport = reached.transport
        binding = job.start(transport)
        ended = transport.write_now(reached.remote, job.op, binding)
        # What it was is worked out while it goes on.
        job.describe(binding)
        if ended is None:
            self._underway.add(job, transport)
        elif ended.fate is Fate.BUSY:
            self._mover.write(job)
        else:
            job.end(ended)
            self._ended(job)

    def go_on(self, job: WriteJob) -> None:
        """The mover or the copier has done its part of a job."""
        if job.is_over:
            self._ahead.pop(job.op, None)
            self._ended(job)
        elif job.is_ahead:
            self._filled(job)
        else:
            self._post(job)

    def _fail(self, job: WriteJob, problem: str) -> None:
        job.fail(problem)
        self._ended(job)

    def foresee(self, session: Session, binding: Binding) -> None:
        """This may be written soon, as one write, into mapped memory."""
        reached = self._at_once.get(session)
        if reached is not None:
            reached.transport.foresee(reached.remote, binding)

    def ends(self, now: float) -> Iterator[Op]:
        """Take the ends of what was begun here, one by one."""
        for job in self._underway.ended(now):
            self._ended(job)
            yield job.op

    @property
    def has_fresh(self) -> bool:
        """Whether one of these has just begun."""
        return self._underway.has_fresh(time.monotonic())

    def wakeup(self) -> float:
        """When to look at these again."""
        return self._underway.wakeup()

    def _slot_here(self, slot: SlotIndex) -> Base:
        assert self._setup.slots is not None
        return Base(0, len(self._setup.memory.regions), self._setup.slots.pool.offset(slot))

    def _slot_there(self, session: Session, slot: SlotIndex) -> Base | None:
        region, slot_bytes = self._metadata[session].staging_region, self._hellos[session].staging
        return None if region is None else Base(0, region, slot * slot_bytes.slot_bytes)

    def _gather(self, job: WriteJob, slot: SlotIndex) -> None:
        """Have the local slot filled. What becomes of it is in the job, or will be said."""
        action, transfer, slots = job.action, job.action.transfer, self._setup.slots
        if self._slot_there(job.session, SlotIndex(0)) is None:
            self._fail(job, f"{transfer.peer} granted a slot that it does not have")
            return
        assert slots is not None
        handle = self._rooms.get(transfer.room)
        ours = Side(self._setup.memory.map, handle.tables.tables() if handle else {})
        pair = Pair(transfer.source, transfer.peer.rank)
        binder = self._binders.of(transfer.plan, pair, ours.pools, None)
        job.path, job.asked = Path.STAGED, time.monotonic()
        job.bind = partial(binder.bind, transfer.request, ours, Image(), action.blocks)
        job.sources, job.targets = self._setup.addresses, (slots.address(slot),)
        job.here = self._slot_here(slot)
        if job.is_ahead:
            self._ahead[job.op] = job
        self._copier.submit(job)

    # ------------------------------------------------------------ gathers ahead

    def gather(self, action: Gather) -> None:
        """Fill the local slot; where it is written will be said."""
        self._gather(WriteJob(action, action.transfer.session), action.local_slot)

    def post_gathered(self, action: Post) -> None:
        """Write a slot, when it is filled."""
        job = self._ahead.get(action.op)
        if job is not None:  # Or else its gather has failed, which is being told.
            job.there = self._slot_there(job.session, action.slot)
            self._settle(job)

    def discard(self, op: Op) -> None:
        """Write nothing; say so when the gather has ended."""
        job = self._ahead.get(op)
        if job is not None:
            job.discarded = True
            self._settle(job)

    def _filled(self, job: WriteJob) -> None:
        """A gather has ended that was made ahead."""
        job.filled = True
        self._tell_gathered(job, time.monotonic())
        self._settle(job)

    def _settle(self, job: WriteJob) -> None:
        """Go on with a slot that is filled, if it is known what becomes of it."""
        if not job.filled or not (job.discarded or job.there):
            return
        del self._ahead[job.op]
        if job.discarded:
            self._answer(SendFailed(job.op, Fate.BUSY))
        else:
            job.aim()
            self._post(job)

    def _ended(self, job: WriteJob) -> None:
        """A write has ended, or nobody knows whether."""
        room, peer = job.action.transfer.room, job.action.transfer.peer
        if job.fate is not None:
            self._meter.wrote(job)
            self._log(job)
            self._answer(SendFailed(job.op, job.fate))
            return
        self._stories.wrote(room, peer, job.path, job.num_bytes, job.seconds)
        if self._machine.is_followed(job.op):
            # A target has to empty this slot before the next can be written: all else can wait.
            self._tell(job.op)
        self._meter.wrote(job)
        if job.asked is not None:
            self._tell_gathered(job, self._stories.now - job.seconds)
        handle = self._rooms.get(room)
        if handle is not None:
            handle.carried[job.path] = handle.carried.get(job.path, 0) + job.num_bytes
            handle.num_writes += 1
        self._answer(Sent(job.op))

    def _tell_gathered(self, job: WriteJob, ended: float) -> None:
        assert job.asked is not None
        took = Took(ended - job.asked, job.num_bytes, str(job.path))
        job.asked = None
        self._meter.took("gather", took.seconds)
        transfer = job.action.transfer
        self._stories.copied(transfer.room, GATHERED, transfer.peer, ended, took)

    def _log(self, job: WriteJob) -> None:
        room, peer = job.action.transfer.room, job.action.transfer.peer
        handle = self._rooms.get(room)
        with about(*(handle.tag if handle else NOBODYS)):
            log.warning(
                "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
                *(self._setup.member.peer, room, peer, job.fate, job.detail),
            )


def is_small(size: Size) -> bool:
    """Whether a write may be made by the owner itself."""
    return size.num_bytes <= AT_ONCE_BYTES and size.num_pieces <= AT_ONCE_PIECES
