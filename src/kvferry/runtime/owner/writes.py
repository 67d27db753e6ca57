"""Writes: to a source's driver, the port to its peers' memory.

A small write into mapped memory is made here and now, because handing it to another
thread would cost more. Everything else goes to the mover, or to the copier first, which
fills a slot and passes it on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from math import inf

from kvferry.errors import KvferryError, TransportError
from kvferry.ids import Op, Peer, Session
from kvferry.plan.bind import Binding, Image, Pair, Side, bind
from kvferry.plan.choose import Constants, Path
from kvferry.plan.places import Base
from kvferry.protocol.events import Connect, Event, Fate, Scatter, SendFailed, Sent, Write
from kvferry.protocol.source import SourceMachine
from kvferry.runtime.copier import BulkWrite, Copied, Copier, CopyJob
from kvferry.runtime.metrics import Meter
from kvferry.runtime.mover.calibration import Calibration
from kvferry.runtime.mover.mover import Flight, Mover, Posting, Reached, WriteEnd
from kvferry.runtime.outgoing import Outgoing
from kvferry.runtime.owner.rooms import RoomTable
from kvferry.runtime.owner.staging_policy import Course, Sides, StagingPolicy
from kvferry.runtime.peer_metadata import PeerMetadata
from kvferry.runtime.setup import EndpointSetup
from kvferry.transport.base import Remote

log = logging.getLogger("kvferry.runtime")

# A transport's costs are measured when a peer connects, but not more often than this.
REMEASURE_S = 30.0
# What a write may keep the owner from its other work: some 50 µs.
AT_ONCE_BYTES, AT_ONCE_PIECES = 128 << 10, 64
NOBODY = PeerMetadata("", b"", ("", 0))


class Writes:
    """What is being written, and how each of it goes."""

    def __init__(
        self,
        setup: EndpointSetup,
        rooms: RoomTable[Outgoing],
        mover: Mover,
        copier: Copier,
        meter: Meter,
        *,
        measures: bool,
    ) -> None:
        self._setup = setup
        self._rooms = rooms
        self._mover = mover
        self._copier = copier
        self._meter = meter
        self._measures = measures
        self._measured_at = -inf
        self._metadata: dict[Session, PeerMetadata] = {}
        self._remotes: dict[Session, Remote] = {}
        self._flying: dict[Op, Write] = {}

    def attach(
        self, machine: SourceMachine, policy: StagingPolicy, answer: Callable[[Event], None]
    ) -> None:
        """Whom this writes for, and who hears how it went."""
        self._machine = machine
        self._policy = policy
        self._answer = answer

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
            metadata = PeerMetadata.decode(action.metadata)
        except TransportError as error:
            self.unreached(action.session, str(error))
            metadata = NOBODY
        self._metadata[action.session] = metadata
        self._mover.reach(action.session, metadata.payload)
        now = time.monotonic()
        if self._measurable(metadata) and now >= self._measured_at + REMEASURE_S:
            self._measured_at = now
            self._mover.measure(action.session, self._calibration(metadata), self._policy.constants)

    def unreached(self, session: Session, problem: str) -> None:
        """Writes to that peer will fail with the same words."""
        me = self._setup.member.peer
        log.warning("not-connected endpoint=%s session=%s problem=%s", me, session, problem)

    def reached(self, news: Reached) -> None:
        """A peer's memory is there."""
        if self._setup.transport.writes_at_once and news.session in self._metadata:
            self._remotes[news.session] = news.remote

    def measured(self, constants: Constants) -> None:
        """The transport costs this."""
        self._policy.constants = constants

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start."""
        self._remotes.pop(session, None)
        self._mover.cut(session)

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight."""
        self._remotes.pop(session, None)
        self._metadata.pop(session, None)
        self._mover.forget(session)

    def _measurable(self, metadata: PeerMetadata) -> bool:
        both = self._setup.slots is not None and metadata.staging_region is not None
        return self._measures and both

    def _calibration(self, metadata: PeerMetadata) -> Calibration:
        slots = self._setup.slots
        assert slots is not None
        assert metadata.staging_region is not None
        ours = Base(0, len(self._setup.memory.regions), slots.scratch_offset)
        return Calibration(ours, Base(0, metadata.staging_region, metadata.scratch_offset))

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
        remote = self._remotes.get(session)
        if remote is not None and _is_small(binding):
            self._write_now(posting, remote)
        else:
            self._mover.write(posting)

    def _write_now(self, posting: Posting, remote: Remote) -> None:
        transport, binding = self._setup.transport, posting.binding
        path = Path.RUNS if binding.contiguous else Path.SLICES
        if not transport.maps_peer:
            binding = binding.merged()
        flight = Flight(time.monotonic(), path, binding.num_bytes, binding.num_pieces)
        ended = transport.write_now(remote, posting.op, binding)
        if ended is None:
            self._mover.follow(posting.op, flight)
        elif ended.fate is Fate.BUSY:
            self._mover.write(posting)
        else:
            self.ended(flight.end(ended))

    def scatter(self, action: Scatter) -> None:
        """Never asked for: what comes to a source is its engine's."""
        raise AssertionError(f"a source was asked for {action!r}")

    def _gather(self, action: Write) -> None:
        """Fill the local slot, then write it in bulk."""
        slots, link = self._setup.slots, self._machine.links[action.note.session]
        metadata = self._metadata[link.session]
        assert slots is not None
        assert link.hello is not None
        if metadata.staging_region is None or action.slot is None or action.local_slot is None:
            problem = f"{action.peer} granted a slot that it does not have"
            self.ended(WriteEnd(action.op, Fate.FAILED, problem))
            return
        handle = self._rooms.get(action.room)
        ours = Side(self._setup.memory.map, handle.tables.tables() if handle else {})
        pair = Pair(self._setup.member.rank, action.peer.rank)
        make = partial(bind, link.plan, pair, action.request, ours, Image(), action.blocks)
        from_ = Base(0, len(self._setup.memory.regions), slots.pool.offset(action.local_slot))
        to = Base(0, metadata.staging_region, action.slot * link.hello.staging.slot_bytes)
        into = (slots.address(action.local_slot),)
        then = BulkWrite(link.session, from_, to)
        self._copier.submit(CopyJob(action.op, make, self._setup.addresses, into, then))

    def copied(self, news: Copied) -> None:
        """A gather has failed; one that went well is the mover's by now."""
        self.ended(WriteEnd(news.op, Fate.FAILED, news.problem))

    def ended(self, end: WriteEnd) -> None:
        """A write has ended, or nobody knows whether."""
        action = self._flying.pop(end.op)
        self._meter.wrote(end)
        if end.fate is None:
            handle = self._rooms.get(action.room)
            if handle is not None:
                handle.carried[end.path] = handle.carried.get(end.path, 0) + end.num_bytes
            self._answer(Sent(end.op))
            return
        self._log(action.peer, action, end)
        self._answer(SendFailed(end.op, end.fate))

    def _log(self, peer: Peer, action: Write, end: WriteEnd) -> None:
        log.warning(
            "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
            *(self._setup.member.peer, action.room, peer, end.fate, end.detail),
        )


def _is_small(binding: Binding) -> bool:
    return binding.num_bytes <= AT_ONCE_BYTES and binding.num_pieces <= AT_ONCE_PIECES
