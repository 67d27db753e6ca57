"""Data port of a source's runner: makes writes into targets' memory, or has them made.

The loop itself makes small writes into mapped memory, because passing them to another thread would
cost more, and writes of any size that a GPU makes. The transport thread makes all others. A staged
write first goes to the copier, which fills its slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.proofs import ContentProofs
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.poll_backoff import MIN_SLEEP_S, backoff_s
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
    Prove,
    Write,
    WriteEnded,
    WriteFate,
)
from kvferry.telemetry.logs.context import about
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import NO_TAG, StepKind
from kvferry.transports.base import Transport

log = logging.getLogger("kvferry.endpoint")

# A GPU writes a slot of some ten megabytes in less.
RECENT_S = 300e-6


class InlineWrites:
    """Asynchronous writes that the loop has started itself, and polls until they are over.

    Each is polled often at first and then less often (``poll_backoff``). Another thread would need
    two hand-offs, each longer than most writes take.
    """

    def __init__(self) -> None:
        # The transport of each write, and when to poll it next.
        self._writes: dict[WriteJob, tuple[Transport, float]] = {}

    def add(self, job: WriteJob, transport: Transport) -> None:
        """Poll this write from now on."""
        self._writes[job] = transport, job.started + MIN_SLEEP_S

    def ended(self, now: float) -> Iterator[WriteJob]:
        """Poll the writes that are due, and yield those that have ended."""
        for job, (transport, due) in list(self._writes.items()):
            if due > now:
                continue
            ended = transport.check_write(job.op)
            if ended is None:
                self._writes[job] = transport, now + backoff_s(now - job.started)
            else:
                del self._writes[job]
                job.end(ended)
                yield job

    def has_recent(self, now: float) -> bool:
        """Return whether a write has started so recently that it will be over soon."""
        return any(now < job.started + RECENT_S for job in self._writes)

    def wakeup(self) -> float:
        """Return when the next poll is due."""
        return min((due for _, due in self._writes.values()), default=inf)


@dataclass(slots=True, eq=False, kw_only=True)
class TransportWrites:
    """Writes of one source.

    ``answer`` gets the end of each write. ``send_note`` is called first for each that succeeded.
    """

    setup: EndpointSetup
    rooms: RoomTable[Outgoing]
    transport_thread: TransportThread
    copier: Copier
    links: TargetLinkTable
    chooser: Chooser
    observer: Observer
    answer: Callable[[Event], None]
    send_note: Callable[[Op], None]
    proofs: ContentProofs
    inline: InlineWrites = field(default_factory=InlineWrites)
    # Early gathers that are not finished, or were neither posted nor discarded.
    early: dict[Op, WriteJob] = field(default_factory=dict)

    def connect(self, action: Connect) -> None:
        """Connect to a target's memory."""
        self.links.connect(action)

    def cut(self, session: Session) -> None:
        """Fail writes of a session that have not started, and all later ones."""
        self.links.cut(session)

    def forget(self, session: Session) -> None:
        """Release the resources of a session that has no write in flight."""
        self.links.forget(session)

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages, and answer ``Proven``, once."""
        self.proofs.prove(action)

    def choose(self, action: Choose) -> None:
        """Bind blocks to the room's pages, and answer with the faster mode of each."""
        staged = self.chooser.choose(action.transfer, action.blocks)
        self.answer(Chosen(action.ticket, staged))

    def write(self, action: Write) -> None:
        """Start a write."""
        job, link = WriteJob(action), self.links[action.transfer.session]
        if action.slot is not None:
            assert action.local_slot is not None
            job.remote = link.slot(action.slot)
            self._gather(job, action.local_slot)
            return
        try:
            job.binding = self.chooser.binding(action)
        except KvferryError as error:
            self._fail(job, str(error))
            return
        reached = link.inline
        if reached is not None and (reached.transport.write_now_is_async or job.is_small()):
            self._write_inline(job, reached)
        else:
            self.transport_thread.write(job)

    def _post(self, job: WriteJob) -> None:
        """Write a filled slot. If a GPU has filled it, the same GPU writes it."""
        slots, reached = self.setup.slots, self.links[job.session].inline
        assert slots is not None
        if reached is None or slots.region.device.is_host:
            self.transport_thread.write(job)
        else:
            self._write_inline(job, reached)

    def _write_inline(self, job: WriteJob, reached: Reached) -> None:
        transport = reached.transport
        job.start(transport)
        ended = transport.write_now(reached.remote, job.op, job.binding)
        # Describe the job while the write runs.
        job.describe(transport)
        if ended is None:
            self.inline.add(job, transport)
        elif ended.fate is WriteFate.BUSY:
            self.transport_thread.write(job)
        else:
            job.end(ended)
            self._ended(job)

    def resume(self, job: WriteJob) -> None:
        """Go on with a job that the transport thread or the copier has returned."""
        if job.is_over:
            self.early.pop(job.op, None)
            self._ended(job)
        elif job.is_early:
            job.filled = True
            self._observe_gather(job, time.monotonic())
            self._settle(job)
        else:
            self._post(job)

    def _fail(self, job: WriteJob, problem: str) -> None:
        job.fail(problem)
        self._ended(job)

    def poll(self, now: float) -> Iterator[Op]:
        """Take the ends of writes that the loop has made, one at a time."""
        for job in self.inline.ended(now):
            self._ended(job)
            yield job.op

    def _gather(self, job: WriteJob, slot: SlotIndex) -> None:
        """Have a local slot filled with the job's blocks."""
        action, transfer, slots = job.action, job.action.transfer, self.setup.slots
        assert slots is not None
        if self.links[transfer.session].slot(SlotIndex(0)) is None:
            self._fail(job, f"{transfer.peer} granted a slot that it does not have")
            return
        try:
            job.bind = self.chooser.gather_binder(transfer, action.blocks)
        except KvferryError as error:
            self._fail(job, str(error))
            return
        job.mode, job.gather_began = TransferMode.STAGED, time.monotonic()
        job.sources, job.targets = self.setup.addresses, (slots.address(slot),)
        job.local = Base(0, len(self.setup.memory.regions), slots.pool.offset(slot))
        if job.is_early:
            self.early[job.op] = job
        self.copier.submit(job)

    def gather(self, action: Gather) -> None:
        """Fill a local slot. ``post_gathered`` or ``discard`` follows, once."""
        self._gather(WriteJob(action), action.local_slot)

    def post_gathered(self, action: Post) -> None:
        """Write a gathered slot as soon as it is filled."""
        job = self.early.get(action.op)
        if job is not None:  # Else the gather has failed, and that answer is on its way.
            job.remote = self.links[job.session].slot(action.slot)
            self._settle(job)

    def discard(self, op: Op) -> None:
        """Do not write a gathered slot. Answer ``BUSY`` when the gather has ended."""
        job = self.early.get(op)
        if job is not None:
            job.discarded = True
            self._settle(job)

    def _settle(self, job: WriteJob) -> None:
        """Post or discard an early gather once it is filled and its use is known."""
        if not job.filled or not (job.discarded or job.remote):
            return
        del self.early[job.op]
        if job.discarded:
            self.answer(WriteEnded(job.op, WriteFate.BUSY))
        else:
            job.bind_bulk()
            self._post(job)

    def _ended(self, job: WriteJob) -> None:
        """Answer with a job's result; its fate may be unknown."""
        now = time.monotonic()
        if job.fate is not None:
            self.observer.write(job, now)
            self._log_failure(job)
            self.answer(WriteEnded(job.op, job.fate))
            return
        self.send_note(job.op)
        self.observer.write(job, now)
        if job.gather_began is not None:
            self._observe_gather(job, now - job.seconds)
        handle = self.rooms.get(job.action.transfer.room)
        if handle is not None:
            handle.carried[job.mode] = handle.carried.get(job.mode, 0) + job.num_bytes
            handle.num_writes += 1
        self.answer(WriteEnded(job.op))

    def _observe_gather(self, job: WriteJob, at: float) -> None:
        assert job.gather_began is not None
        seconds, job.gather_began = at - job.gather_began, None
        room, peer = job.action.transfer.room, job.action.transfer.peer
        self.observer.copy(room, peer, StepKind.GATHERED, at, seconds, job.num_bytes)

    def _log_failure(self, job: WriteJob) -> None:
        room, peer = job.action.transfer.room, job.action.transfer.peer
        handle = self.rooms.get(room)
        with about(*(handle.tag if handle else NO_TAG)):
            log.warning(
                "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
                *(self.setup.me, room, peer, job.fate, job.detail),
            )
