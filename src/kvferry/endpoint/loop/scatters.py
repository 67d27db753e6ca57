"""StagedScatters: to a target's runner, the ports to the copier and to memory that others write."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.jobs import ScatterJob
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import TransportThread
from kvferry.errors import KvferryError
from kvferry.ids import Peer, Room, Session
from kvferry.layout.intervals import Span
from kvferry.plan.bind import Binding, BindingTemplate, RankPair
from kvferry.plan.binding_cache import BindingCache, PairPools
from kvferry.plan.plan import Block
from kvferry.protocol.events import Cancel, Connect, Event, Scatter, Scattered
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import Moment

log = logging.getLogger("kvferry.endpoint")


class StagedScatters:
    """Staging slots whose bytes are on their way into pages, and the sources that write here."""

    def __init__(
        self,
        *,
        setup: EndpointSetup,
        rooms: RoomTable[Incoming],
        transport_thread: TransportThread,
        copier: Copier,
        observer: Observer,
        answer: Callable[[Event], None],
        join: Callable[[Peer, UnixListener], None],
    ) -> None:
        self._setup = setup
        self._rooms = rooms
        self._transport_thread = transport_thread
        self._copier = copier
        self._observer = observer
        self._answer = answer
        # Goes to listeners on this host.
        self._join = join
        # Also holds the binding that a source will probably need next.
        self._cache = BindingCache()

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages."""
        slots, handle = self._setup.slots, self._rooms.get(action.room)
        assert slots is not None
        assert handle is not None
        from_, into = (slots.address(action.slot),), self._setup.addresses
        handle.latest[action.source] = action.op
        then = partial(self._prebind, handle, action, from_)
        prebound = self._cache.drop(action.room, (action.source, action.blocks))
        job = ScatterJob(action, lambda: prebound or Binding(()), from_, into, then)
        if prebound is None:
            try:
                template = self._template(action, action.blocks)
            except KvferryError as error:
                job.fail(str(error))
                self.copied(job)
                return
            job.bind = partial(template.bind, None, handle.wanted.page_tables)
        self._copier.submit(job)

    def _template(self, action: Scatter, blocks: tuple[Block, ...]) -> BindingTemplate:
        pair = RankPair(action.source.rank, self._setup.member.rank)
        pools = PairPools(action.plan, pair, None, self._setup.memory.map)
        return self._cache.template(pools, action.request, blocks)

    def _prebind(self, handle: Incoming, action: Scatter, from_: tuple[int, ...]) -> None:
        """Bind what the same source will probably send next: as many tokens, behind these."""
        if self._rooms.get(action.room) is not handle or handle.latest[action.source] != action.op:
            return
        following = self._after(action)
        if following:
            with suppress(KvferryError):  # What is wrong with it is told when it has come.
                binding = self._template(action, following).bind(None, handle.wanted.page_tables)
                self._copier.prebind(binding, from_, self._setup.addresses)
                self._cache.keep(action.room, (action.source, following), binding)

    def _after(self, action: Scatter) -> tuple[Block, ...]:
        if len(action.blocks) != 1:
            return ()
        (block,), me = action.blocks, self._setup.member.rank
        tokens = block.tokens
        for owed in action.plan.blocks(action.source.rank, me, action.request):
            if owed.group == block.group and owed.layers.covers(block.layers):
                behind = Span(tokens.end, tokens.end + len(tokens)).intersect(owed.tokens)
                return (replace(block, tokens=behind),) if len(behind) else ()
        return ()

    def release(self, room: Room) -> None:
        """A room's memory is its engine's again."""
        self._cache.forget(room)

    def copied(self, job: ScatterJob) -> None:
        """Well or not, it is over and touches nothing any more."""
        room, now = job.action.room, time.monotonic()
        self._observer.copy(room, job.action.source, Moment.SCATTERED, now, now - job.begun)
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
        self._observer.link_up(action.peer, offer.name)
        self._transport_thread.let_write(action.session, offer.name)
        told = PeerMetadata.read(action.metadata)
        if told is not None and told.listener is not None:
            self._join(action.peer, told.listener)

    def expect(self, expecting: bool, *, soon: bool = False) -> None:
        """Whether sources may write here, so that helping them along is worth a little time."""
        self._transport_thread.expect(expecting, soon=soon)

    def forget(self, session: Session) -> None:
        """It is written by nobody any more."""
        self._transport_thread.forget(session)
