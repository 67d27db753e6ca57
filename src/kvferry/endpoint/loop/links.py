"""Links of a source to its targets' memory: connected, measured and released."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.endpoint.calibration import SCRATCH_BYTES, Calibration
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import Measured, Reached, TransportThread, Unreached
from kvferry.errors import TransportError
from kvferry.ids import Peer, Session, SlotIndex
from kvferry.plan.bind import Binding
from kvferry.plan.cost import LinkCostTable
from kvferry.plan.places import Base
from kvferry.protocol.events import Connect, Event, MemoryReached, MemoryUnreached
from kvferry.protocol.messages import Hello
from kvferry.protocol.transports import common_transports
from kvferry.telemetry.observer import Observer

log = logging.getLogger("kvferry.endpoint")


@dataclass(slots=True)
class TargetLink:
    """A target that has greeted us. ``at_once``: what its small writes are made by, if they are."""

    peer: Peer
    hello: Hello
    metadata: PeerMetadata
    at_once: Reached | None = None

    def slot(self, index: SlotIndex) -> Base | None:
        """Where one of its staging slots is; None if it has none."""
        region = self.metadata.staging_region
        return None if region is None else Base(0, region, index * self.hello.staging.slot_bytes)

    def prebind(self, binding: Binding) -> None:
        """This may be written soon, as one write, into mapped memory."""
        if self.at_once is not None:
            self.at_once.transport.prebind(self.at_once.remote, binding)


class TargetLinkTable:
    """Every target that has greeted us, until nothing of its session is in flight."""

    def __init__(
        self,
        setup: EndpointSetup,
        transport_thread: TransportThread,
        observer: Observer,
        costs: LinkCostTable,
        answer: Callable[[Event], None],
        *,
        measures: bool,
    ) -> None:
        self._setup = setup
        self._transport_thread = transport_thread
        self._observer = observer
        self._costs = costs
        self._answer = answer
        self._measures = measures
        self._links: dict[Session, TargetLink] = {}

    def __getitem__(self, session: Session) -> TargetLink:
        return self._links[session]

    def connect(self, action: Connect) -> None:
        """A target has greeted us: reach its memory while the engine still computes."""
        assert action.hello is not None
        try:
            metadata = PeerMetadata.decode(action.metadata)
        except TransportError as error:
            self.hear(Unreached(action.session, (str(error),)))
        else:
            self._links[action.session] = TargetLink(action.peer, action.hello, metadata)
            self._transport_thread.reach(action.session, action.transports)

    def hear(self, news: Reached | Unreached | Measured) -> None:
        """Take news of a link from the transport_thread."""
        match news:
            case Reached():
                self._reached(news)
            case Unreached(session=session, problems=problems):
                me, why = self._setup.member.peer, "; ".join(problems)
                log.warning("not-connected endpoint=%s session=%s problem=%s", me, session, why)
                self._answer(MemoryUnreached(session, problems))
            case Measured(session=session, link_cost=link_cost):
                self._costs.record(session, link_cost)

    def _reached(self, news: Reached) -> None:
        session, transport = news.session, news.transport
        link = self._links.get(session)
        if link is None:
            return  # It was given up meanwhile.
        untried = common_transports(self._setup.offers, link.hello.transports).problems
        log.info(
            "connected endpoint=%s peer=%s transport=%s instead_of=%r",
            *(self._setup.member.peer, link.peer, transport.name),
            "; ".join((*news.problems, *untried)),
        )
        self._observer.link_up(link.peer, transport.name)
        if transport.writes_at_once:
            link.at_once = news
        self._costs.add(session, transport.name, link.metadata.liveness_port[0])
        self._answer(MemoryReached(session, transport.name))
        calibration = None if transport.maps_peer else self._calibration(link.metadata)
        if calibration is not None and self._costs.start_if_due(session, time.monotonic()):
            self._transport_thread.measure(session, calibration, self._costs.of(session))

    def _calibration(self, theirs: PeerMetadata) -> Calibration | None:
        """Writes that measure a link; None where there is no memory for them, or no wish."""
        ours, region = self._setup.slots, theirs.staging_region
        if not self._measures or ours is None or region is None:
            return None
        if theirs.scratch_bytes < SCRATCH_BYTES:
            return None
        from_ = Base(0, len(self._setup.memory.regions), ours.scratch_offset)
        into = Base(0, region, theirs.scratch_offset)
        return Calibration(from_, into, min(ours.scratch_bytes, theirs.scratch_bytes))

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start."""
        link = self._links.get(session)
        if link is not None:
            link.at_once = None
        self._transport_thread.cut(session)

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight."""
        self._links.pop(session, None)
        self._costs.forget(session)
        self._transport_thread.forget(session)
