"""Links of a source to its targets' memory: connected, measured and released."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.endpoint.link_costs import Calibration
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import SCRATCH_BYTES, EndpointSetup
from kvferry.endpoint.transport_thread import Measured, Reached, TransportThread, Unreached
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
    """A connected target. ``inline``: its memory, if the loop may make writes itself."""

    peer: Peer
    hello: Hello
    metadata: PeerMetadata
    inline: Reached | None = None

    def slot(self, index: SlotIndex) -> Base | None:
        """Return the address of a staging slot; None if the target has no staging."""
        region = self.metadata.staging_region
        return None if region is None else Base(0, region, index * self.hello.staging.slot_bytes)

    def prebind(self, binding: Binding) -> None:
        """Let the transport prepare a write that is likely to come soon."""
        if self.inline is not None:
            self.inline.transport.prebind(self.inline.remote, binding)


class TargetLinkTable:
    """Links to all targets whose Hello was accepted, until no write to them is in flight."""

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
        """Connect to a target's memory, while the engine still computes."""
        assert action.hello is not None
        metadata = PeerMetadata.decode(action.metadata)
        if metadata is None:
            self.handle(
                Unreached(
                    action.session,
                    ("the peer's metadata is invalid; run the same kvferry on both sides",),
                )
            )
        else:
            self._links[action.session] = TargetLink(action.peer, action.hello, metadata)
            self._transport_thread.reach(action.session, action.transports)

    def handle(self, result: Reached | Unreached | Measured) -> None:
        """Handle a result of the transport thread."""
        match result:
            case Reached():
                self._reached(result)
            case Unreached(session=session, problems=problems):
                log.warning(
                    "not-connected endpoint=%s session=%s error=%s",
                    *(self._setup.member.peer, session, "; ".join(problems)),
                )
                self._answer(MemoryUnreached(session, problems))
            case Measured(session=session, link_cost=link_cost):
                self._costs.record(session, link_cost)

    def _reached(self, result: Reached) -> None:
        session, transport = result.session, result.transport
        link = self._links.get(session)
        if link is None:
            return  # The session was given up meanwhile.
        untried = common_transports(self._setup.offers, link.hello.transports).problems
        log.info(
            "connected endpoint=%s peer=%s transport=%s instead_of=%r",
            *(self._setup.member.peer, link.peer, transport.name),
            "; ".join((*result.problems, *untried)),
        )
        self._observer.link_up(link.peer, transport.name)
        if transport.supports_write_now:
            link.inline = result
        self._costs.add(session, transport.name, link.metadata.liveness_port[0])
        self._answer(MemoryReached(session, transport.name))
        calibration = None if transport.maps_peer else self._calibration(link.metadata)
        if calibration is not None and self._costs.start_if_due(session, time.monotonic()):
            self._transport_thread.measure(session, calibration, self._costs.of(session))

    def _calibration(self, peer: PeerMetadata) -> Calibration | None:
        """Return the writes that measure a link; None if either side has no scratch memory."""
        slots, region = self._setup.slots, peer.staging_region
        if not self._measures or slots is None or region is None:
            return None
        if peer.scratch_bytes < SCRATCH_BYTES:
            return None
        local = Base(0, len(self._setup.memory.regions), slots.scratch_offset)
        remote = Base(0, region, peer.scratch_offset)
        return Calibration(local, remote, min(slots.scratch_bytes, peer.scratch_bytes))

    def cut(self, session: Session) -> None:
        """Let no more writes of a session start."""
        link = self._links.get(session)
        if link is not None:
            link.inline = None
        self._transport_thread.cut(session)

    def forget(self, session: Session) -> None:
        """Release a session that has no write in flight."""
        self._links.pop(session, None)
        self._costs.forget(session)
        self._transport_thread.forget(session)
