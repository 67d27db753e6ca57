"""One rank's endpoint: what sources and targets have in common, as an engine sees them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry

from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.backend import HttpDiscovery
from kvferry.discovery.http.reporter import StatusReporter
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.copy_thread import Copier, CopyThread
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.liveness.port import Address
from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.loop.channels import Channel
from kvferry.endpoint.loop.gpu_copies import GpuCopies
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.loop import CLOSE_S, EndpointLoop
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.sides import LoopSide
from kvferry.endpoint.runner.runner import MachineRunner, PeerGone
from kvferry.endpoint.setup import EndpointSetup, Member, set_up
from kvferry.endpoint.transport_thread import TransportThread
from kvferry.ids import Peer, Room
from kvferry.layout.layout import Layout
from kvferry.layout.spec import StateRow
from kvferry.memory.copy.devices import copier_on
from kvferry.memory.page_tables import PageTableValidator
from kvferry.memory.pools import Memory, PoolArrays
from kvferry.protocol.events import Event
from kvferry.protocol.outcome import Status
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.endpoint import EndpointTelemetry
from kvferry.telemetry.metrics import EndpointStats
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.reports import EndpointView, ReportRequest
from kvferry.telemetry.steps import RoomTrace
from kvferry.telemetry.views import ViewedLoop
from kvferry.transports.base import Transport
from kvferry.transports.transport_set import TransportSet

log = logging.getLogger("kvferry.endpoint")

H = TypeVar("H", bound=Handle)
T = TypeVar("T")


class RankEndpoint(ABC, Generic[H]):
    """One rank's end of every transfer that it takes part in. For any thread.

    ``pools`` are arrays by group, tensor and layer, or a ``Memory``. ``model`` is
    what both sides must agree on beside the layout, such as a checkpoint's hash.
    ``transport`` is ``auto``, for the best that each peer can be reached by; one or several by
    name; or what pools were allocated from (``make_transports``). ``observer`` receives the
    endpoint's events beside its own metrics and traces.
    """

    # Whether peers write into the pools.
    writable: ClassVar[bool]
    # As views and traces name it.
    role: ClassVar[str]

    def __init__(  # noqa: PLR0913 - what an engine has to say, by keyword
        self,
        layout: Layout,
        pools: Memory | PoolArrays,
        *,
        name: str,
        rank: int = 0,
        model: str,
        transport: str | Transport | TransportSet = "auto",
        discovery: str | Discovery | None = None,
        key: ClusterKey | None = None,
        config: EndpointConfig | None = None,
        registry: CollectorRegistry | None = None,
        observer: Observer | None = None,
    ) -> None:
        config = config or EndpointConfig()
        member = Member(name, rank, layout, model)
        with ExitStack() as undo:
            listener = self._listen(config, key, undo)
            setup = set_up(
                *(member, pools, transport, config),
                writable=self.writable,
                most_slots=self._most_slots(config),
                listener=listener,
            )
            undo.callback(setup.close)
            self._telemetry = EndpointTelemetry(
                _fixed_view(setup, self.role),
                registry,
                observer,
                transport=setup.transports.name,
                metrics=config.metrics,
                trace_events=config.trace_events,
            )
            client = DiscoveryClient(discovery, key) if discovery else None
            if client:
                undo.callback(client.close)
            self._announce(setup, config, client)
            undo.pop_all()
        self._setup = setup
        self._client = client
        self._deadline_s = config.deadline_s
        self._validator = PageTableValidator(layout, rank, setup.memory.map)
        held, lacked = setup.transports.names, setup.transports.lacked
        log.info(
            "transports endpoint=%s held=%s lacked=%r",
            *(member.peer, ",".join(held), "; ".join(f"{a}: {b}" for a, b in lacked.items())),
        )
        self._observer = self._telemetry.observer
        me, self._inbox, self._poller = member.peer, Inbox[object](), Poller()
        self._rooms: RoomTable[H] = RoomTable(me, self._observer)
        self._transport_thread = TransportThread(
            setup.transports, self._inbox.put, f"kvferry-transport-{me}"
        )
        self._copier = self._make_copier()
        self._prober = Prober(self._inbox.put, f"kvferry-prober-{me}")
        self._owner = self._make_owner(config, key)
        self._transport_thread.start()
        self._owner.start()
        self._telemetry.start(self._traced)
        self._reporter: StatusReporter | None = None
        if client and config.trace_events and isinstance(client.discovery, HttpDiscovery):
            url, life = str(client.discovery), setup.incarnation
            self._reporter = StatusReporter(url, key, member.peer, life, self.view)

    @abstractmethod
    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        """Start the listeners that peers connect to; return the one for this host."""

    def _announce(
        self, setup: EndpointSetup, config: EndpointConfig, client: DiscoveryClient | None
    ) -> None:
        """Register where others look for this rank, if they do."""

    @abstractmethod
    def _most_slots(self, config: EndpointConfig) -> int:
        """How many slots may be handed out."""

    def _make_copier(self) -> Copier:
        device, me = self._setup.memory.device, self._setup.member.peer
        if device.is_host:
            return CopyThread(f"kvferry-copy-{me}", self._inbox.put, self._transport_thread.write)
        return GpuCopies(copier_on(device))

    @abstractmethod
    def _make_owner(self, config: EndpointConfig, key: ClusterKey | None) -> EndpointLoop:
        """Join the parts to a runner that has not begun."""

    def _owner_of(
        self, runner: MachineRunner[Any, Any], role: LoopSide, channel: Channel[Any]
    ) -> EndpointLoop:
        return EndpointLoop(
            *(runner, role, channel),
            setup=self._setup,
            rooms=self._rooms,
            inbox=self._inbox,
            poller=self._poller,
            transport_thread=self._transport_thread,
            copier=self._copier,
            observer=self._observer,
        )

    def _step_machine(self, event: Event) -> None:
        """Let the machine take an engine's event, on the owner's thread."""
        self._owner.step(event)

    @property
    def stats(self) -> EndpointStats:
        """What was carried and how, since the start."""
        return self._telemetry.stats

    @property
    def staging_bytes(self) -> int:
        """What its staging slots take."""
        return self._setup.staging_bytes

    @property
    def liveness_port(self) -> Address:
        """Where peers ask whether this life of the endpoint goes on."""
        return self._setup.metadata.address

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Where many rooms stand, for a scheduler's loop; None once they are released."""
        return self._owner.rooms.statuses(rooms)

    def view(self, wishes: ReportRequest = ReportRequest()) -> Future[EndpointView]:  # noqa: B008 - frozen
        """How the endpoint is, made on its owner's thread; with the traces that are wished for."""
        owner = self._owner

        def make() -> EndpointView:
            machine, rooms = owner.runner.machine, list(owner.rooms)
            tables = machine.num_quarantined, machine.links.values()
            return self._telemetry.view(ViewedLoop(rooms, *tables, owner.clocks.offset), wishes)

        return self._looked(make)

    def _traced(self, rooms: list[Room]) -> Future[list[RoomTrace]]:
        """The traces of rooms, made on the owner's thread."""
        traces = self._telemetry.traces
        return self._looked(lambda: traces.of(rooms) if traces else [])

    def _looked(self, make: Callable[[], T]) -> Future[T]:
        """What is made on the owner's thread, which nobody who leaves meanwhile may disturb."""
        made: Future[T] = Future()

        def look() -> None:
            if not made.set_running_or_notify_cancel():
                return
            try:
                made.set_result(make())
            except Exception as error:
                made.set_exception(error)

        self._owner.tell(look)
        return made

    def trace(self, room: Room, timeout_s: float = 5.0) -> RoomTrace | None:
        """The steps of one of the last rooms, by this process's monotonic clock."""
        traces = self.view(ReportRequest(rooms=(str(room),))).result(timeout_s).traces
        return traces[0] if traces else None

    def declare_dead(self, peer: Peer, incarnation: int) -> None:
        """The caller knows that this life of a peer is over, such as after a power cut.

        Releases what waits for it. Never say this of a process that may only be stopped.
        """
        self._owner.tell(PeerGone(peer, incarnation))

    def _abort(self, handle: H) -> None:
        self._owner.tell(lambda: self._owner.cancel(handle))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort what goes on, end the threads, and say whether all memory is free.

        False: a peer may still write or read the pools. Keep them until the process ends.
        """
        self._telemetry.close_spans()
        free = self._owner.close(timeout_s)
        self._prober.close()
        self._telemetry.close()
        if self._reporter:
            self._reporter.close()
        if self._client:
            # Last: until then the owner may want to stop watching an instance.
            self._client.close()
        return free

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _fixed_view(setup: EndpointSetup, role: str) -> EndpointView:
    """Constant part of an endpoint's view."""
    member = setup.member
    return EndpointView(
        instance=member.name,
        rank=member.rank,
        role=role,
        incarnation=setup.incarnation,
        clock=0.0,
        wall=0.0,
        transport=",".join(setup.transports.names),
        sharding=str(member.layout),
        num_ranks=member.layout.num_ranks,
        staging_bytes=setup.staging_bytes,
        pages=num_pages(setup),
        layout=member.layout,
    )


def num_pages(setup: EndpointSetup) -> int:
    """How many pages the pools have."""
    groups = {group.name: group for group in setup.member.layout.spec.groups}
    paged = [
        placement.num_pages
        for placement in setup.memory.map.placements
        if not isinstance(groups[placement.group].kind, StateRow)
    ]
    return max(paged, default=0)
