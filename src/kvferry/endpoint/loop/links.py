"""Links of a source to its targets' memory: connected, measured and released."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.endpoint.link_costs import Calibration
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.endpoint.setup import SCRATCH_BYTES, EndpointSetup
from kvferry.endpoint.transport_thread import Reached, TransportThread
from kvferry.ids import Peer, Session, SlotIndex
from kvferry.plan.bind import Binding
from kvferry.plan.cost import LinkCostTable
from kvferry.plan.places import Base
from kvferry.protocol.events import Connect, Event, MemoryReached
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


@dataclass(slots=True, eq=False)
class TargetLinkTable:
    """Links to all targets whose Hello was accepted, until no write to them is in flight."""

    setup: EndpointSetup
    transport_thread: TransportThread
    observer: Observer
    costs: LinkCostTable
    answer: Callable[[Event], None]
    measures: bool  # the cost of new links
    _links: dict[Session, TargetLink] = field(default_factory=dict)

    def __getitem__(self, session: Session) -> TargetLink:
        return self._links[session]

    def connect(self, action: Connect) -> None:
        """Connect to a target's memory, while the engine still computes."""
        assert action.hello is not None
        session, metadata = action.session, PeerMetadata.decode(action.metadata)
        if metadata is None:
            text = "the peer's metadata is invalid; run the same kvferry on both sides"
            log.warning(
                "not-connected endpoint=%s session=%s error=%s", self.setup.me, session, text
            )
            self.answer(MemoryReached(session, "", (text,)))
        else:
            self._links[session] = TargetLink(action.peer, action.hello, metadata)
            self.transport_thread.reach(session, action.transports)

    def reached(self, result: Reached) -> None:
        """Use a connected target, and measure its link if that is due."""
        session, transport = result.session, result.transport
        link = self._links.get(session)
        if link is None:
            return  # The session was given up meanwhile.
        untried = common_transports(self.setup.identity.transports, link.hello.transports).problems
        log.info(
            "connected endpoint=%s peer=%s transport=%s instead_of=%r",
            *(self.setup.me, link.peer, transport.name),
            "; ".join((*result.problems, *untried)),
        )
        self.observer.link_up(link.peer, transport.name)
        if transport.supports_write_now:
            link.inline = result
        self.costs.add(session, transport.name, link.metadata.liveness_port[0])
        self.answer(MemoryReached(session, transport.name))
        calibration = None if transport.maps_peer else self._calibration(link.metadata)
        if calibration is not None and self.costs.start_if_due(session, time.monotonic()):
            self.transport_thread.measure(session, calibration, self.costs.of(session))

    def _calibration(self, peer: PeerMetadata) -> Calibration | None:
        """Return the writes that measure a link; None if either side has no scratch memory."""
        slots, region = self.setup.slots, peer.staging_region
        if not self.measures or slots is None or region is None:
            return None
        if peer.scratch_bytes < SCRATCH_BYTES:
            return None
        local = Base(0, len(self.setup.memory.regions), slots.scratch_offset)
        remote = Base(0, region, peer.scratch_offset)
        return Calibration(local, remote, min(slots.scratch_bytes, peer.scratch_bytes))

    def cut(self, session: Session) -> None:
        """Let no more writes of a session start."""
        link = self._links.get(session)
        if link is not None:
            link.inline = None
        self.transport_thread.cut(session)

    def forget(self, session: Session) -> None:
        """Release a session that has no write in flight."""
        self._links.pop(session, None)
        self.costs.forget(session)
        self.transport_thread.forget(session)
