"""Data port of a target's runner: scatters staging slots into pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.jobs import ScatterJob
from kvferry.endpoint.loop.proofs import ContentProofs
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import TransportThread
from kvferry.errors import KvferryError
from kvferry.ids import Peer, Session
from kvferry.layout.intervals import Span
from kvferry.plan.bind import Binding, BindingTemplate, RankPair
from kvferry.plan.binding_cache import PairPools
from kvferry.plan.plan import Block
from kvferry.protocol.events import Cancel, Connect, Event, Prove, Scatter, Scattered
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import StepKind

log = logging.getLogger("kvferry.endpoint")


@dataclass(slots=True, eq=False, kw_only=True)
class StagedScatters:
    """Scatters of one target, and the sources that write into its memory.

    It binds in advance what a source probably sends next. ``connect_unix`` opens a Unix channel to
    a source's listener if it is on this host.
    """

    setup: EndpointSetup
    rooms: RoomTable[Incoming]
    transport_thread: TransportThread
    copier: Copier
    observer: Observer
    answer: Callable[[Event], None]
    connect_unix: Callable[[Peer, UnixListener], None]
    proofs: ContentProofs

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages, and answer ``Proven``, once."""
        self.proofs.prove(action)

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages."""
        slots, handle = self.setup.slots, self.rooms.get(action.room)
        assert slots is not None
        assert handle is not None
        sources, targets = (slots.address(action.slot),), self.setup.addresses
        handle.last_scatter[action.source] = action.op
        when_idle = partial(self._prebind, handle, action, sources)
        prebound = self.rooms.bindings.drop(action.room, (action.source, action.blocks))
        job = ScatterJob(action, lambda: prebound or Binding(()), sources, targets, when_idle)
        if prebound is None:
            try:
                template = self._template(action, action.blocks)
            except KvferryError as error:
                job.fail(str(error))
                self.copied(job)
                return
            job.bind = partial(template.bind, None, handle.request.page_tables)
        self.copier.submit(job)

    def _template(self, action: Scatter, blocks: tuple[Block, ...]) -> BindingTemplate:
        pair = RankPair(action.source.rank, self.setup.me.rank)
        pools = PairPools(action.plan, pair, None, self.setup.memory.map)
        return self.rooms.bindings.template(pools, action.request, blocks)

    def _prebind(self, handle: Incoming, action: Scatter, sources: tuple[int, ...]) -> None:
        """Bind what the source probably sends next: as many tokens, behind the last ones."""
        is_last = handle.last_scatter[action.source] == action.op
        if self.rooms.get(action.room) is not handle or not is_last:
            return
        blocks = self._next_blocks(action)
        if blocks:
            with suppress(KvferryError):  # If the blocks do come, scattering them reports it.
                binding = self._template(action, blocks).bind(None, handle.request.page_tables)
                self.copier.prebind(binding, sources, self.setup.addresses)
                self.rooms.bindings.keep(action.room, (action.source, blocks), binding)

    def _next_blocks(self, action: Scatter) -> tuple[Block, ...]:
        if len(action.blocks) != 1:
            return ()
        (block,), rank = action.blocks, self.setup.me.rank
        tokens = block.tokens
        for owed in action.plan.blocks(action.source.rank, rank, action.request):
            if owed.group == block.group and owed.layers.covers(block.layers):
                behind = Span(tokens.end, tokens.end + len(tokens)).intersect(owed.tokens)
                return (replace(block, tokens=behind),) if len(behind) else ()
        return ()

    def copied(self, job: ScatterJob) -> None:
        """Answer with the result of a scatter, which touches no memory any more."""
        room, now = job.action.room, time.monotonic()
        self.observer.copy(room, job.action.source, StepKind.SCATTERED, now, now - job.begun)
        if job.problem:
            log.error("scatter-failed room=%r error=%r", room, job.problem)
            failure = Failure.of(FailureCode.TRANSPORT, f"a scatter failed: {job.problem}")
            self.answer(Cancel(room, failure))
        self.answer(Scattered(job.action.op))

    def connect(self, action: Connect) -> None:
        """Note that a source writes here, by the transport that it chose."""
        (offer,) = action.transports
        log.info(
            "written-by endpoint=%s peer=%s transport=%s", *(self.setup.me, action.peer, offer.name)
        )
        self.observer.link_up(action.peer, offer.name)
        self.transport_thread.accept_writes(action.session, offer.name)
        metadata = PeerMetadata.decode(action.metadata)
        if metadata is not None and metadata.listener is not None:
            self.connect_unix(action.peer, metadata.listener)

    def forget(self, session: Session) -> None:
        """Release the resources of a session whose source writes nothing here any more."""
        self.transport_thread.forget(session)
