"""Base class of source and target endpoints."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import ClassVar, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry

from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.reporter import StatusReporter, follow_status_service
from kvferry.discovery.static import StaticDiscovery
from kvferry.endpoint.arguments import deadline_in
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.copy_thread import Copier, CopyThread
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.liveness.port import Address
from kvferry.endpoint.liveness.prober import Prober
from kvferry.endpoint.loop.gpu_copies import GpuCopies
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.loop import CLOSE_S, EndpointLoop
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.sides import LoopSide
from kvferry.endpoint.runner.runner import PeerGone
from kvferry.endpoint.setup import EndpointSetup, new_incarnation, set_up
from kvferry.endpoint.transport_thread import TransportThread
from kvferry.ids import Peer, Room
from kvferry.layout.layout import Layout
from kvferry.layout.spec import StateRow
from kvferry.memory.checksum.devices import sums_in
from kvferry.memory.copy.devices import copier_on
from kvferry.memory.page_tables import PageTableValidator
from kvferry.memory.pools import Memory, PoolArrays
from kvferry.protocol.links import Identity
from kvferry.protocol.outcome import Status
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.endpoint import EndpointTelemetry
from kvferry.telemetry.metrics import EndpointStats
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.status import EndpointStatus, ReportRequest
from kvferry.telemetry.steps import RoomTrace
from kvferry.transports.base import Transport
from kvferry.transports.transport_set import TransportSet

log = logging.getLogger("kvferry.endpoint")

H = TypeVar("H", bound=Handle)
T = TypeVar("T")


class RankEndpoint(ABC, Generic[H]):
    """Endpoint of one rank. Any thread may call it; also a context manager that closes it.

    ``layout``: how the instance shards and pages its cache, the same at each of its ranks.
    ``pools``: this rank's cache: arrays by group, tensor and layer, or a ``Memory``.
    ``name``, ``rank``: the instance's name, unique in the cluster, and the rank's index.
    ``model``: what peers must have in common beside the layout, such as a checkpoint's hash.
    ``transport``: ``"auto"`` for the best transport to each peer, one or several names with commas,
    or the transports that the pools were allocated from (``make_transports``).
    ``discovery``: the discovery service, or its URL. ``key``: the cluster's key.
    ``registry``: where Prometheus metrics are registered. ``observer``: receives the endpoint's
    events, beside its own metrics and traces.

    Raises ``InputError`` or ``TransportError`` if the arguments or the environment do not fit.
    """

    # Whether peers write into the pools.
    writable: ClassVar[bool]
    role: ClassVar[str]

    def __init__(  # noqa: PLR0913 - settings of an endpoint, by keyword
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
        identity = Identity(Peer(name, rank), new_incarnation(), layout, model)
        with ExitStack() as undo:
            listener = self._listen(config, key, undo)
            setup = set_up(
                *(identity, pools, transport, config), writable=self.writable, listener=listener
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
            self._register(setup, config, client)
            undo.pop_all()
        self._setup = setup
        self._client = client
        self._config = config
        self._validator = PageTableValidator(layout, rank, setup.memory.map)
        held, lacked = setup.transports.names, setup.transports.lacked
        log.info(
            "transports endpoint=%s held=%s lacked=%r",
            *(setup.me, ",".join(held), "; ".join(f"{a}: {b}" for a, b in lacked.items())),
        )
        self._start_threads(key)
        self._reporter: StatusReporter | None = None
        if client and config.trace_events and not isinstance(client.discovery, StaticDiscovery):
            self._reporter = StatusReporter(key, setup.me, setup.identity.incarnation, self.view)
            follow_status_service(client, self._reporter.report_to)

    @abstractmethod
    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        """Start the sockets that peers connect to. Return the one for this host."""

    def _register(
        self, setup: EndpointSetup, config: EndpointConfig, client: DiscoveryClient | None
    ) -> None:
        """Register this rank in the discovery service, where it has one and peers look it up."""

    def _start_threads(self, key: ClusterKey | None) -> None:
        setup, me = self._setup, self._setup.me
        self._observer = self._telemetry.observer
        self._inbox, self._poller = Inbox(), Poller()
        put = self._inbox.put
        self._rooms: RoomTable[H] = RoomTable(me, self._observer)
        self._transport_thread = TransportThread(setup.transports, put, me)
        device = setup.memory.device
        self._copier: Copier = (
            CopyThread(f"kvferry-copy-{me}", put, self._transport_thread.write)
            if device.is_host
            else GpuCopies(copier_on(device))
        )
        self._sum_cells = sums_in(setup.memory, setup.identity.layout.spec)
        self._prober = Prober(put, f"kvferry-prober-{me}")
        self._side = self._make_side(key)
        self._loop = EndpointLoop(
            side=self._side,
            setup=setup,
            inbox=self._inbox,
            poller=self._poller,
            transport_thread=self._transport_thread,
            copier=self._copier,
            observer=self._observer,
        )
        self._transport_thread.start()
        self._loop.start()
        self._telemetry.start(self._traces_of)

    @abstractmethod
    def _make_side(self, key: ClusterKey | None) -> LoopSide:
        """Make the machine, its runner and its ports."""

    def _deadline(self, deadline_s: float | None) -> float:
        return deadline_in(self._config.deadline_s if deadline_s is None else deadline_s)

    @property
    def stats(self) -> EndpointStats:
        """Counts since the start: rooms, bytes and writes by mode and transport, failures."""
        return self._telemetry.stats

    @property
    def staging_bytes(self) -> int:
        """Size of all staging slots together."""
        return self._setup.staging_bytes

    @property
    def liveness_port(self) -> Address:
        """Address that peers probe to find out whether this incarnation is alive."""
        return self._setup.liveness_port.address

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Return the status of many rooms at once; None for a room that is released."""
        return self._rooms.statuses(rooms)

    def view(self, request: ReportRequest = ReportRequest()) -> Future[EndpointStatus]:  # noqa: B008 - frozen
        """Return a view of the endpoint, made on its loop thread, with the requested traces."""
        loop = self._loop

        def make() -> EndpointStatus:
            machine, rooms = loop.runner.machine, list(loop.rooms)
            tables = machine.num_quarantined, machine.links.values()
            return self._telemetry.view(rooms, *tables, loop.clocks.offset, request)

        return self._on_loop(make)

    def _traces_of(self, rooms: list[Room]) -> Future[list[RoomTrace]]:
        return self._on_loop(lambda: self._telemetry.traces.traces(rooms))

    def _on_loop(self, make: Callable[[], T]) -> Future[T]:
        """Call ``make`` on the loop thread. The future may be cancelled."""
        made: Future[T] = Future()

        def call() -> None:
            if not made.set_running_or_notify_cancel():
                return
            try:
                made.set_result(make())
            except Exception as error:
                made.set_exception(error)

        self._loop.submit(call)
        return made

    def trace(self, room: Room, timeout_s: float = 5.0) -> RoomTrace | None:
        """Return the trace of a recent room, with times of ``time.monotonic``; None if unknown.

        Waits for the loop thread. Raises ``TimeoutError`` after ``timeout_s`` seconds.
        """
        traces = self.view(ReportRequest(rooms=(str(room),))).result(timeout_s).traces
        return traces[0] if traces else None

    def declare_dead(self, peer: Peer, incarnation: int) -> None:
        """State that an incarnation of a peer is dead, such as after a power cut.

        The endpoint then releases memory that waits for this proof. A wrong statement corrupts
        memory: never make it about a process that may only be stopped.
        """
        self._loop.submit(PeerGone(peer, incarnation))

    def _abort(self, handle: H) -> None:
        self._loop.submit(lambda: self._loop.cancel(handle))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort all rooms, stop the threads, and return whether all memory is free.

        Waits at most ``timeout_s`` seconds for the rooms to be released. False: a peer may still
        read or write the pools, so keep them until the process ends.
        """
        self._telemetry.close_spans()
        free = self._loop.close(timeout_s)
        self._prober.close()
        self._telemetry.close()
        if self._reporter:
            self._reporter.close()
        if self._client:
            # Last: the loop unwatches instances until it ends.
            self._client.close()
        return free

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fixed_view(setup: EndpointSetup, role: str) -> EndpointStatus:
    """Return the part of an endpoint's view that does not change."""
    me, layout = setup.me, setup.identity.layout
    rows = {group.name for group in layout.spec.groups if isinstance(group.kind, StateRow)}
    paged = [each for each in setup.memory.map.placements if each.group not in rows]
    return EndpointStatus(
        instance=me.instance,
        rank=me.rank,
        role=role,
        incarnation=setup.identity.incarnation,
        clock=0.0,
        wall=0.0,
        transport=",".join(setup.transports.names),
        staging_bytes=setup.staging_bytes,
        pages=max((each.num_pages for each in paged), default=0),
        layout=layout,
    )
