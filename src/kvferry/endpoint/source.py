"""A source endpoint: one prefill rank, as an engine holds it. For any thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import RankRecord
from kvferry.endpoint.arguments import deadline_in
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.sockets import ControlServer
from kvferry.endpoint.control.unix import UnixListener, UnixServer
from kvferry.endpoint.costs import default_link_costs
from kvferry.endpoint.loop.channels import SourceChannel
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.loop import CLOSE_S, EndpointLoop
from kvferry.endpoint.loop.probes import PeerProbes
from kvferry.endpoint.loop.sides import SourceRoomEnds, SourceSide
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing, Waitable
from kvferry.endpoint.rank import RankEndpoint
from kvferry.endpoint.runner.runner import SourcePorts, SourceRunner
from kvferry.endpoint.setup import EndpointSetup
from kvferry.ids import Op, Room
from kvferry.plan.cost import LinkCost, LinkCostTable
from kvferry.protocol.events import Event, Open
from kvferry.protocol.source import SourceMachine
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.tags import RoomTag

# Slots that a outbound gathers on a GPU before it has credits for them: one that is posted with the
# next credit, and one that is being filled meanwhile.
GPU_AHEAD_SLOTS = 2


class SourceEndpoint(RankEndpoint[Outgoing]):
    """One prefill rank."""

    writable: ClassVar[bool] = False
    role: ClassVar[str] = "source"

    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        silence_s = config.protocol.silence_s
        self._server = ControlServer(config.host, config.port, key, silence_s)
        undo.callback(self._server.close)
        self._local = UnixServer.open()
        if self._local is None:
            return None
        undo.callback(self._local.close)
        return self._local.listener

    def _announce(
        self, setup: EndpointSetup, config: EndpointConfig, client: DiscoveryClient | None
    ) -> None:
        self.record = _record(setup, self._server.address)
        if client:
            client.register(self.record, config.lease_s)

    def _most_slots(self, config: EndpointConfig) -> int:
        return config.protocol.local_slots

    def _make_owner(self, config: EndpointConfig, key: ClusterKey | None) -> EndpointLoop:
        setup, rooms, observer = self._setup, self._rooms, self._observer
        me = setup.member.peer

        def answer(event: Event) -> None:
            """Take the answer of a port."""
            runner.answer(event)

        self._costs = costs = LinkCostTable(default_link_costs(config, setup))
        measures = config.link_cost is None
        links = TargetLinkTable(
            setup, self._transport_thread, observer, costs, answer, measures=measures
        )
        chooser = Chooser(setup.memory.map, rooms, links, costs, config.mode)
        machine = SourceMachine(setup.identity, _with_slots(config, setup))
        listeners = self._server, self._local
        channel = SourceChannel(me, self._poller, observer, answer, *listeners)

        def tell(op: Op) -> None:
            """In the middle of a turn: a target waits to empty its slot, so all else can wait."""
            if machine.writes.is_followed(op):
                runner.tell(op)
                channel.flush()

        writes = TransportWrites(
            setup=setup,
            rooms=rooms,
            transport_thread=self._transport_thread,
            copier=self._copier,
            links=links,
            chooser=chooser,
            observer=observer,
            answer=answer,
            tell=tell,
        )
        probes, ends = PeerProbes(self._prober), SourceRoomEnds(rooms, chooser)
        runner = SourceRunner(machine, SourcePorts(channel, writes, probes, ends))
        role = SourceSide(runner, self._step_machine, rooms, links, writes, channel, observer)
        self._role = role
        return self._owner_of(runner, role, channel)

    def open(
        self,
        room: Room,
        *,
        deadline_s: float | None = None,
        request: str = "",
        traceparent: str = "",
    ) -> Outgoing:
        """A request begins here. Its pages must stay as they are until it is released.

        ``request`` and ``traceparent`` name whose room it is in logs and in its trace.
        """
        deadline = deadline_in(self._deadline_s if deadline_s is None else deadline_s)
        handle = Outgoing(room, deadline, self._validator, self._step, self._abort)
        handle.tag = RoomTag.of(request, traceparent)
        self._owner.rooms.add(handle)
        self._step(handle, None, _nothing, Open(room, deadline))
        return handle

    def _step(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        """Take this step for a room when what was asked before it is done."""
        self._owner.tell(partial(self._role.ask, handle, after, learn, event))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Leave the discovery service, so that nobody comes any more, and end."""
        if self._client:
            self._client.close()
        return super().close(timeout_s)

    @property
    def link_cost(self) -> LinkCost:
        """What the link that was measured last costs; before that, what is assumed."""
        return self._costs.latest


def _nothing() -> None:
    """Nothing is to be learnt before a room opens."""


def _record(setup: EndpointSetup, control: str) -> RankRecord:
    """As the discovery service shows it to targets."""
    return RankRecord(
        instance=setup.member.name,
        rank=setup.member.rank,
        incarnation=setup.incarnation,
        fingerprint=setup.member.model,
        layout=setup.member.layout,
        transport=setup.transports.name,
        control=control,
    )


def _with_slots(config: EndpointConfig, setup: EndpointSetup) -> ProtocolConfig:
    """The machine hands out the slots that there are."""
    slots, early_gather_slots = setup.slots, config.protocol.early_gather_slots
    if slots is None:
        return config.protocol
    if early_gather_slots is None:
        # A slot of host memory that waits goes cold in the CPU's cache.
        early_gather_slots = 0 if setup.memory.device.is_host else GPU_AHEAD_SLOTS
    return replace(
        config.protocol,
        local_slots=slots.pool.num_slots,
        local_slot_bytes=slots.pool.slot_bytes,
        early_gather_slots=early_gather_slots,
    )
