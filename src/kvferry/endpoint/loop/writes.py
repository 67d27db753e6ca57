"""TransportWrites: to a source's runner, the port to its peers' memory, whatever transport each
has.

A small write into mapped memory is made here and now, because handing it to another
thread would cost more, and so is one of any size that a GPU makes. Everything else goes to
the transport_thread, or to the copier first, which fills a slot and passes it on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.in_flight import WritesInFlight
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import Reached, TransportThread
from kvferry.errors import KvferryError
from kvferry.ids import Op, Session, SlotIndex
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import Base
from kvferry.protocol.events import (
    Choose,
    Chosen,
    Connect,
    Event,
    Gather,
    Post,
    SendFailed,
    Sent,
    Write,
    WriteFate,
)
from kvferry.telemetry.logs.context import about
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import Moment
from kvferry.telemetry.tags import NOBODYS

log = logging.getLogger("kvferry.endpoint")


class TransportWrites:
    """TransportWrites of a source, by the thread that makes each.

    ``answer`` hears how writes ended, and ``tell``, before all else, of each that ended well.
    """

    def __init__(  # noqa: PLR0913 - all that it uses, by keyword
        self,
        *,
        setup: EndpointSetup,
        rooms: RoomTable[Outgoing],
        transport_thread: TransportThread,
        copier: Copier,
        links: TargetLinkTable,
        chooser: Chooser,
        observer: Observer,
        answer: Callable[[Event], None],
        tell: Callable[[Op], None],
    ) -> None:
        self._setup = setup
        self._rooms = rooms
        self._transport_thread = transport_thread
        self._copier = copier
        self._links = links
        self._chooser = chooser
        self._observer = observer
        self._answer = answer
        self._tell = tell
        self._underway = WritesInFlight()
        # Gathers that have not ended, or of which nobody has said what becomes of them.
        self._ahead: dict[Op, WriteJob] = {}

    # ------------------------------------------------------------ peers

    def connect(self, action: Connect) -> None:
        """Reach a target's memory."""
        self._links.connect(action)

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start."""
        self._links.cut(session)

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight."""
        self._links.forget(session)

    def choose(self, action: Choose) -> None:
        """Bind the blocks with the room's own pages, and answer with the faster mode of each."""
        staged = self._chooser.choose(action.transfer, action.blocks)
        self._answer(Chosen(action.ticket, staged))

    # ------------------------------------------------------------ writes

    def write(self, action: Write) -> None:
        """Make a write, or have it made."""
        job, link = WriteJob(action), self._links[action.transfer.session]
        if action.slot is not None:
            assert action.local_slot is not None
            job.there = link.slot(action.slot)
            self._gather(job, action.local_slot)
            return
        try:
            job.binding = self._chooser.binding(action)
        except KvferryError as error:
            self._fail(job, str(error))
            return
        reached = link.at_once
        if reached is not None and (reached.transport.write_now_is_async or job.is_small()):
            self._write_now(job, reached)
        else:
            self._transport_thread.write(job)

    def _post(self, job: WriteJob) -> None:
        """A slot is filled: have it written. A GPU, if it filled the slot, writes it too."""
        slots, reached = self._setup.slots, self._links[job.session].at_once
        assert slots is not None
        if reached is None or slots.region.device.is_host:
            self._transport_thread.write(job)
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
        elif ended.fate is WriteFate.BUSY:
            self._transport_thread.write(job)
        else:
            job.end(ended)
            self._ended(job)

    def go_on(self, job: WriteJob) -> None:
        """The transport_thread or the copier has done its part of a job."""
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

    def _gather(self, job: WriteJob, slot: SlotIndex) -> None:
        """Have the local slot filled. What becomes of it is in the job, or will be said."""
        action, transfer, slots = job.action, job.action.transfer, self._setup.slots
        assert slots is not None
        if self._links[transfer.session].slot(SlotIndex(0)) is None:
            self._fail(job, f"{transfer.peer} granted a slot that it does not have")
            return
        try:
            job.bind = self._chooser.gathering(transfer, action.blocks)
        except KvferryError as error:
            self._fail(job, str(error))
            return
        job.mode, job.asked = TransferMode.STAGED, time.monotonic()
        job.sources, job.targets = self._setup.addresses, (slots.address(slot),)
        job.here = Base(0, len(self._setup.memory.regions), slots.pool.offset(slot))
        if job.is_ahead:
            self._ahead[job.op] = job
        self._copier.submit(job)

    # ------------------------------------------------------------ gathers ahead

    def gather(self, action: Gather) -> None:
        """Fill the local slot; where it is written will be said."""
        self._gather(WriteJob(action), action.local_slot)

    def post_gathered(self, action: Post) -> None:
        """Write a slot, when it is filled."""
        job = self._ahead.get(action.op)
        if job is not None:  # Or else its gather has failed, which is being told.
            job.there = self._links[job.session].slot(action.slot)
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
            self._answer(SendFailed(job.op, WriteFate.BUSY))
        else:
            job.aim()
            self._post(job)

    def _ended(self, job: WriteJob) -> None:
        """A write has ended, or nobody knows whether."""
        now = time.monotonic()
        if job.fate is not None:
            self._observer.write(job, now)
            self._log(job)
            self._answer(SendFailed(job.op, job.fate))
            return
        self._tell(job.op)
        self._observer.write(job, now)
        if job.asked is not None:
            self._tell_gathered(job, now - job.seconds)
        handle = self._rooms.get(job.action.transfer.room)
        if handle is not None:
            handle.carried[job.mode] = handle.carried.get(job.mode, 0) + job.num_bytes
            handle.num_writes += 1
        self._answer(Sent(job.op))

    def _tell_gathered(self, job: WriteJob, at: float) -> None:
        assert job.asked is not None
        seconds, job.asked = at - job.asked, None
        room, peer = job.action.transfer.room, job.action.transfer.peer
        self._observer.copy(room, peer, Moment.GATHERED, at, seconds, job.num_bytes)

    def _log(self, job: WriteJob) -> None:
        room, peer = job.action.transfer.room, job.action.transfer.peer
        handle = self._rooms.get(room)
        with about(*(handle.tag if handle else NOBODYS)):
            log.warning(
                "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
                *(self._setup.member.peer, room, peer, job.fate, job.detail),
            )
