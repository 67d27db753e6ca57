"""Scatters: to a target's driver, the ports to the copier and to memory that others write."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kvferry.errors import KvferryError
from kvferry.ids import Peer, Session
from kvferry.layout.intervals import Span
from kvferry.plan.bind import Binding, Image, Pair
from kvferry.plan.binder import Binder, Binders
from kvferry.plan.plan import Block, Request
from kvferry.protocol.events import Cancel, Connect, Event, Scatter, Scattered
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.target import TargetMachine
from kvferry.runtime.incoming import Incoming
from kvferry.runtime.jobs import ScatterJob
from kvferry.runtime.local import LocalDoor
from kvferry.runtime.owner.outfit import Outfit
from kvferry.runtime.owner.stories import SCATTERED, Took
from kvferry.runtime.peer_metadata import PeerMetadata

log = logging.getLogger("kvferry.runtime")


class Scatters:
    """Staging slots whose bytes are on their way into pages, and the sources that write here."""

    def __init__(self, outfit: Outfit[Incoming]) -> None:
        self._setup = outfit.setup
        self._rooms = outfit.rooms
        self._mover = outfit.mover
        self._copier = outfit.copier
        self._meter = outfit.meter
        self._stories = outfit.stories
        self._binders = Binders()

    def attach(
        self,
        machine: TargetMachine,
        answer: Callable[[Event], None],
        join: Callable[[Peer, LocalDoor], None],
    ) -> None:
        """Whom this scatters for, who hears how it went, and who goes to doors on this host."""
        self._machine = machine
        self._answer = answer
        self._join = join

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages."""
        slots, handle = self._setup.slots, self._rooms.get(action.room)
        assert slots is not None
        assert handle is not None
        plan = self._machine.rooms[action.room].plan
        pair = Pair(action.source.rank, self._setup.member.rank)
        binder = self._binders.of(plan, pair, None, self._setup.memory.map)
        make = partial(self._bound, handle, binder, action)
        from_ = (slots.address(action.slot),)
        handle.latest[action.source] = action.op
        then = partial(self._foresee, handle, binder, action, from_)
        self._copier.submit(ScatterJob(action, make, from_, self._setup.addresses, then))

    def _bound(self, handle: Incoming, binder: Binder, action: Scatter) -> Binding:
        blocks, binding = handle.foreseen.pop(action.source, ((), None))
        if binding is not None and blocks == action.blocks:
            return binding
        return binder.bind(action.request, Image(), handle.side, action.blocks)

    def _foresee(
        self, handle: Incoming, binder: Binder, action: Scatter, from_: tuple[int, ...]
    ) -> None:
        """Bind what the same source will probably send next: as many tokens, behind these."""
        if self._rooms.get(action.room) is not handle or handle.latest[action.source] != action.op:
            return
        if len(action.blocks) != 1:
            return
        following = _after(binder, action.request, action.blocks[0])
        if following is not None:
            with suppress(KvferryError):  # What is wrong with it is told when it has come.
                binding = binder.bind(action.request, Image(), handle.side, following)
                self._copier.foresee(binding, from_, self._setup.addresses)
                handle.foreseen[action.source] = following, binding

    def copied(self, job: ScatterJob) -> None:
        """Well or not, it is over and touches nothing any more."""
        room, now = job.action.room, time.monotonic()
        took_s = now - job.begun
        self._stories.copied(room, SCATTERED, job.action.source, now, Took(took_s))
        self._meter.took("scatter", took_s)
        if job.problem:
            log.error("scatter-failed room=%r problem=%r", room, job.problem)
            failure = Failure.of(FailureCode.TRANSPORT, f"a scatter failed: {job.problem}")
            self._answer(Cancel(room, failure))
        self._answer(Scattered(job.op))

    # ------------------------------------------------------------ memory of others

    def connect(self, action: Connect) -> None:
        """Sources write here, by what they chose; nothing of theirs is reached."""
        (offer,) = action.transports
        log.info(
            "written-by endpoint=%s peer=%s transport=%s",
            *(self._setup.member.peer, action.peer, offer.name),
        )
        self._meter.linked(action.peer, offer.name)
        self._mover.let_write(action.session, offer.name)
        told = PeerMetadata.read(action.metadata)
        if told is not None and told.door is not None:
            self._join(action.peer, told.door)

    def forget(self, session: Session) -> None:
        """It is written by nobody any more."""
        self._mover.forget(session)


def _after(binder: Binder, request: Request, block: Block) -> tuple[Block, ...] | None:
    tokens = block.tokens
    for owed in binder.plan.blocks(*binder.pair, request):
        if owed.group == block.group and owed.layers.covers(block.layers):
            behind = Span(tokens.end, tokens.end + len(tokens)).intersect(owed.tokens)
            return (replace(block, tokens=behind),) if len(behind) else None
    return None
