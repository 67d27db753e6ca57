"""The source endpoint: one prefill rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import RankRecord
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.sockets import ControlServer
from kvferry.endpoint.control.unix import UnixListener, UnixServer
from kvferry.endpoint.link_costs import default_link_costs
from kvferry.endpoint.lookups import Holds, PrefixLookups
from kvferry.endpoint.loop.channels import SourceChannel
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.loop import CLOSE_S
from kvferry.endpoint.loop.proofs import ContentProofs
from kvferry.endpoint.loop.sides import SourceSide
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing, PendingStep
from kvferry.endpoint.rank import RankEndpoint
from kvferry.endpoint.runner.runner import SourcePorts, SourceRunner
from kvferry.endpoint.setup import EndpointSetup
from kvferry.ids import Op, Room
from kvferry.plan.cost import LinkCost, LinkCostTable
from kvferry.plan.places import PageTable
from kvferry.protocol.events import Event, Open
from kvferry.protocol.source import SourceMachine
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.steps import RoomTag

# Slots per transfer that a GPU gathers before there are credits for them: one to post with the next
# credit, and one to fill meanwhile.
GPU_EARLY_SLOTS = 2


class SourceEndpoint(RankEndpoint[Outgoing]):
    """Endpoint of one prefill rank: sends rooms to the targets that ask for them.

    It listens on ``config.host`` and registers in the discovery service. See ``RankEndpoint`` for
    its arguments. ``record`` is its registration.
    """

    writable: ClassVar[bool] = False
    role: ClassVar[str] = "source"
    _side: SourceSide

    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        silence_s = config.protocol.silence_s
        self._server = ControlServer(config.host, config.port, key, silence_s)
        undo.callback(self._server.close)
        self._unix_server = UnixServer.open()
        if self._unix_server is None:
            return None
        undo.callback(self._unix_server.close)
        return self._unix_server.listener

    def _register(
        self, setup: EndpointSetup, config: EndpointConfig, client: DiscoveryClient | None
    ) -> None:
        self.record = RankRecord(
            instance=setup.me.instance,
            rank=setup.me.rank,
            incarnation=setup.identity.incarnation,
            fingerprint=setup.identity.fingerprint,
            layout=setup.identity.layout,
            transport=setup.transports.name,
            control=self._server.address,
        )
        if client:
            client.register(self.record, config.lease_s)

    def _make_side(self, key: ClusterKey | None) -> SourceSide:
        setup, config, rooms, observer = self._setup, self._config, self._rooms, self._observer

        def answer(event: Event) -> None:
            runner.answer(event)

        self._costs = costs = LinkCostTable(default_link_costs(config, setup))
        measures = config.link_cost is None
        links = TargetLinkTable(setup, self._transport_thread, observer, costs, answer, measures)
        chooser = Chooser(setup.memory.map, rooms, links, costs, config.mode)
        machine = SourceMachine(setup.identity, _protocol_config(config, setup))
        channel = SourceChannel(
            *(setup.me, self._poller, observer, answer, self._server, self._unix_server)
        )

        def send_note(op: Op) -> None:
            """Send a note in the middle of a turn if the target waits to reuse its slot."""
            if machine.writes.is_followed(op):
                runner.send_note(op)
                channel.flush()

        def tables_of(room: Room) -> Mapping[str, PageTable]:
            handle = rooms.get(room)
            return handle.tables.tables() if handle else {}

        writes = TransportWrites(
            setup=setup,
            rooms=rooms,
            transport_thread=self._transport_thread,
            copier=self._copier,
            links=links,
            chooser=chooser,
            observer=observer,
            answer=answer,
            send_note=send_note,
            proofs=ContentProofs(
                setup=setup,
                copier=self._copier,
                sum_cells=self._sum_cells,
                answer=answer,
                tables_of=tables_of,
            ),
        )
        self._lookups = PrefixLookups(setup.me, self._inbox.put)
        rooms.look_up = self._lookups.look_up
        runner = SourceRunner(machine, SourcePorts(channel, writes, self._prober, rooms))
        return SourceSide(runner, rooms, channel, observer, links, writes)

    def open(
        self,
        room: Room,
        *,
        deadline_s: float | None = None,
        request: str = "",
        traceparent: str = "",
    ) -> Outgoing:
        """Open a room and return its handle. Returns at once.

        ``room``: the id that the target's engine has for the same transfer.
        ``deadline_s``: seconds from now after which the room fails; None takes the configured.
        ``request``, ``traceparent``: the request's id and W3C trace context, for logs and traces.

        The engine must not change pages that it pushes until the handle is ``released``.
        Raises ``InputError`` for an invalid argument, and ``Misuse`` if the room is open already or
        the endpoint is closing.
        """
        deadline = self._deadline(deadline_s)
        handle = Outgoing(room, deadline, self._validator, self._submit, self._abort)
        handle.tag = RoomTag.of(request, traceparent)
        self._rooms.add(handle)
        self._submit(handle, PendingStep(Open(room, deadline)))
        return handle

    def _submit(self, handle: Outgoing, step: PendingStep) -> None:
        self._loop.submit(partial(self._side.submit, handle, step))

    def on_pull(self, holds: Holds) -> None:
        """Let targets pull what this instance has cached. Call it on the layout's lead rank.

        ``holds`` looks up the longest prefix of a sequence that every rank of the instance holds
        (``PrefixQuery``), and returns its number of tokens: a multiple of 16, or 0. Before it
        returns anything but 0, it makes sure that no rank evicts the prefix, and that every rank
        opens the query's room, pushes the prefix, and closes the room with the digest of the
        engine's own chain at that length. The prefix is pinned until every rank's handle is
        ``released``. ``holds`` runs on a thread of its own, one call at a time, and is called once
        for each room. If it raises, the instance holds nothing.
        """
        self._lookups.answer_with(holds)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Leave the discovery service, so that no new target comes, and close the endpoint."""
        self._lookups.close()
        if self._client:
            self._client.close()
        return super().close(timeout_s)

    @property
    def link_cost(self) -> LinkCost:
        """Cost of the link that was measured last; the assumed cost before any was."""
        return self._costs.latest


def _protocol_config(config: EndpointConfig, setup: EndpointSetup) -> ProtocolConfig:
    """Return the machine's configuration with the actual number of slots."""
    slots, early_gather_slots = setup.slots, config.protocol.early_gather_slots
    if slots is None:
        return config.protocol
    if early_gather_slots is None:
        # On the host, a slot that waits falls out of the CPU's cache.
        early_gather_slots = 0 if setup.memory.device.is_host else GPU_EARLY_SLOTS
    return replace(
        config.protocol,
        local_slots=slots.pool.num_slots,
        local_slot_bytes=slots.pool.slot_bytes,
        early_gather_slots=early_gather_slots,
    )
