"""One rank's endpoint: what sources and targets have in common, as an engine sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry

from kvferry.ids import Peer, Room
from kvferry.keys import ClusterKey
from kvferry.layout.layout import Layout
from kvferry.observe.steps import RoomStory
from kvferry.observe.views import EndpointView, Wishes
from kvferry.protocol.events import Event
from kvferry.protocol.outcome import Status
from kvferry.rendezvous.client import RendezvousClient
from kvferry.rendezvous.discovery import Discovery
from kvferry.rendezvous.http_discovery import HttpDiscovery
from kvferry.rendezvous.reporting import StatusReporter
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.driver.driver import PeerGone
from kvferry.runtime.handles import Handle
from kvferry.runtime.life.lifeline import Address
from kvferry.runtime.local import LocalDoor
from kvferry.runtime.memory import Memory, PoolArrays
from kvferry.runtime.owner.loop import CLOSE_S, Aborted, Owner
from kvferry.runtime.owner.outfit import Outfit, outfit_of
from kvferry.runtime.owner.telling import Teller
from kvferry.runtime.owner.views import endpoint_view
from kvferry.runtime.setup import EndpointSetup, Member, set_up
from kvferry.runtime.tables import Shelf
from kvferry.runtime.telemetry.metrics import Meter, Stats
from kvferry.runtime.telemetry.tracing import SpanThread, find_tracer
from kvferry.transport.base import Transport
from kvferry.transport.several import TransportSet

H = TypeVar("H", bound=Handle)
T = TypeVar("T")


class RankEndpoint(ABC, Generic[H]):
    """One rank's end of every transfer that it takes part in. For any thread.

    ``pools`` are arrays by group, tensor and layer, or a ``Memory``. ``model`` is
    what both sides must agree on beside the layout, such as a checkpoint's hash.
    ``transport`` is ``auto``, for the best that each peer can be reached by; one or several by
    name; or what pools were allocated from (``make_transports``).
    """

    # Whether peers write into the pools.
    writable: ClassVar[bool]
    # As views and stories name it.
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
        rendezvous: str | Discovery | None = None,
        key: ClusterKey | None = None,
        config: EndpointConfig | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        config = config or EndpointConfig()
        member = Member(name, rank, layout, model)
        with ExitStack() as undo:
            door = self._listen(config, key, undo)
            setup = set_up(
                *(member, pools, transport, config),
                writable=self.writable,
                most_slots=self._most_slots(config),
                door=door,
            )
            undo.callback(setup.close)
            meter = Meter(str(member.peer), setup.transports.name, registry)
            client = RendezvousClient(rendezvous, key) if rendezvous else None
            if client:
                undo.callback(client.close)
            self._announce(setup, config, client)
            undo.pop_all()
        self._setup = setup
        self._client = client
        self._deadline_s = config.deadline_s
        self._shelf = Shelf(layout, rank, setup.memory.map)
        self._owner = self._own(outfit_of(setup, config, key, client, meter))
        self._owner.outfit.mover.start()
        self._owner.start()
        tracer = find_tracer() if config.story_steps else None
        name = f"kvferry-spans-{member.peer}"
        self._spans = SpanThread(tracer, self._ended_since, name) if tracer else None
        self._reporter: StatusReporter | None = None
        if client and config.story_steps and isinstance(client.discovery, HttpDiscovery):
            url, life = str(client.discovery), setup.incarnation
            self._reporter = StatusReporter(url, key, member.peer, life, self.view)

    @abstractmethod
    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> LocalDoor | None:
        """Open what others knock at, before anything else is taken; the door for this host's."""

    def _announce(
        self, setup: EndpointSetup, config: EndpointConfig, client: RendezvousClient | None
    ) -> None:
        """Register where others look for this rank, if they do."""

    @abstractmethod
    def _most_slots(self, config: EndpointConfig) -> int:
        """How many slots may be handed out."""

    @abstractmethod
    def _own(self, outfit: Outfit[H]) -> Owner:
        """Join everything to a driver that has not begun."""

    def _take(self, event: Event) -> None:
        """What ports answer with, on the owner's thread."""
        self._owner.take(event)

    @property
    def stats(self) -> Stats:
        """What was carried and how, since the start."""
        return self._owner.outfit.meter.stats

    @property
    def staging_bytes(self) -> int:
        """What its staging slots take."""
        return self._setup.staging_bytes

    @property
    def lifeline(self) -> Address:
        """Where peers ask whether this life of the endpoint goes on."""
        return self._setup.metadata.address

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Where many rooms stand, for a scheduler's loop; None once they are released."""
        return self._owner.rooms.statuses(rooms)

    def view(self, wishes: Wishes = Wishes()) -> Future[EndpointView]:  # noqa: B008 - frozen
        """How the endpoint is, made on its owner's thread; with the stories that are wished for."""
        return self._looked(lambda: endpoint_view(self._owner, self.role, wishes))

    def _ended_since(self, since: float) -> Future[list[RoomStory]]:
        """The stories of what has ended since then, made on the owner's thread."""
        stories, teller = self._owner.stories, Teller(str(self._owner.me), self.role)
        return self._looked(lambda: stories.ended_since(teller, since))

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

        self._owner.look(look)
        return made

    def story(self, room: Room, timeout_s: float = 5.0) -> RoomStory | None:
        """The steps of one of the last rooms, by this process's monotonic clock."""
        stories = self.view(Wishes(rooms=(str(room),))).result(timeout_s).stories
        return stories[0] if stories else None

    def vouch_gone(self, peer: Peer, incarnation: int) -> None:
        """The caller knows that this life of a peer is over, such as after a power cut.

        Releases what waits for it. Never say this of a process that may only be stopped.
        """
        self._owner.tell(PeerGone(peer, incarnation))

    def _abort(self, handle: H) -> None:
        self._owner.tell(Aborted(handle))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort what goes on, end the threads, and say whether all memory is free.

        False: a peer may still write or read the pools. Keep them until the process ends.
        """
        if self._spans:
            self._spans.close()
        free = self._owner.close(timeout_s)
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
