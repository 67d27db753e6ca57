"""A source endpoint: one prefill rank, as an engine holds it. For any thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.discovery.client import RendezvousClient
from kvferry.discovery.records import RankRecord
from kvferry.endpoint.arguments import deadline_in
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.sockets import ControlServer
from kvferry.endpoint.control.unix import LocalDoor, LocalServer
from kvferry.endpoint.costs import endpoint_constants
from kvferry.endpoint.loop.channels import SourceChannel
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.links import Links
from kvferry.endpoint.loop.loop import CLOSE_S, Owner
from kvferry.endpoint.loop.roles import SourceRole, SourceRooms
from kvferry.endpoint.loop.suspects import Suspects
from kvferry.endpoint.loop.writes import Writes
from kvferry.endpoint.outgoing import Outgoing, Waitable
from kvferry.endpoint.rank import RankEndpoint
from kvferry.endpoint.runner.runner import SourceDriver, SourcePorts
from kvferry.endpoint.setup import EndpointSetup
from kvferry.ids import Op, Room
from kvferry.plan.cost import Constants, LinkCosts
from kvferry.protocol.events import Event, Open
from kvferry.protocol.source import SourceMachine
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.tags import RoomTag

# Slots that a lane gathers on a GPU before it has credits for them: one that is posted with the
# next credit, and one that is being filled meanwhile.
GPU_AHEAD_SLOTS = 2


class SourceEndpoint(RankEndpoint[Outgoing]):
    """One prefill rank."""

    writable: ClassVar[bool] = False
    role: ClassVar[str] = "source"

    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> LocalDoor | None:
        silence_s = config.protocol.silence_s
        self._server = ControlServer(config.host, config.port, key, silence_s)
        undo.callback(self._server.close)
        self._local = LocalServer.open()
        if self._local is None:
            return None
        undo.callback(self._local.close)
        return self._local.door

    def _announce(
        self, setup: EndpointSetup, config: EndpointConfig, client: RendezvousClient | None
    ) -> None:
        self.record = _record(setup, self._server.address)
        if client:
            client.register(self.record, config.lease_s)

    def _most_slots(self, config: EndpointConfig) -> int:
        return config.protocol.local_slots

    def _make_owner(self, config: EndpointConfig, key: ClusterKey | None) -> Owner:
        setup, rooms, observer = self._setup, self._rooms, self._observer
        me = setup.member.peer

        def answer(event: Event) -> None:
            """Take the answer of a port."""
            driver.answer(event)

        self._costs = costs = LinkCosts(endpoint_constants(config, setup))
        measures = config.constants is None
        links = Links(setup, self._mover, observer, costs, answer, measures=measures)
        chooser = Chooser(setup.memory.map, rooms, links, costs, config.path)
        machine = SourceMachine(setup.identity, _with_slots(config, setup))
        doors = self._server, self._local
        channel = SourceChannel(me, self._poller, observer, answer, *doors)

        def tell(op: Op) -> None:
            """In the middle of a turn: a target waits to empty its slot, so all else can wait."""
            if machine.writes.is_followed(op):
                driver.tell(op)
                channel.flush()

        writes = Writes(
            setup=setup,
            rooms=rooms,
            mover=self._mover,
            copier=self._copier,
            links=links,
            chooser=chooser,
            observer=observer,
            answer=answer,
            tell=tell,
        )
        suspects, ends = Suspects(self._prober), SourceRooms(rooms, chooser)
        driver = SourceDriver(machine, SourcePorts(channel, writes, suspects, ends))
        role = SourceRole(driver, self._step_machine, rooms, links, writes, channel, observer)
        self._role = role
        return self._owner_of(driver, role, channel)

    def open(
        self,
        room: Room,
        *,
        deadline_s: float | None = None,
        request: str = "",
        traceparent: str = "",
    ) -> Outgoing:
        """A request begins here. Its pages must stay as they are until it is released.

        ``request`` and ``traceparent`` name whose room it is in logs and in its story.
        """
        deadline = deadline_in(self._deadline_s if deadline_s is None else deadline_s)
        handle = Outgoing(room, deadline, self._shelf, self._step, self._abort)
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
        """Leave the rendezvous, so that nobody comes any more, and end."""
        if self._client:
            self._client.close()
        return super().close(timeout_s)

    @property
    def constants(self) -> Constants:
        """What the link that was measured last costs; before that, what is assumed."""
        return self._costs.latest


def _nothing() -> None:
    """Nothing is to be learnt before a room opens."""


def _record(setup: EndpointSetup, control: str) -> RankRecord:
    """As the rendezvous shows it to targets."""
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
    slots, ahead_slots = setup.slots, config.protocol.ahead_slots
    if slots is None:
        return config.protocol
    if ahead_slots is None:
        # A slot of host memory that waits goes cold in the CPU's cache.
        ahead_slots = 0 if setup.memory.device.is_host else GPU_AHEAD_SLOTS
    return replace(
        config.protocol,
        local_slots=slots.pool.num_slots,
        local_slot_bytes=slots.pool.slot_bytes,
        ahead_slots=ahead_slots,
    )
