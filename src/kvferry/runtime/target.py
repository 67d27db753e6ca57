"""A target endpoint: one decode rank.

``TargetEndpoint`` is what an engine holds and may be used from any thread. The
owner behind it has the machine, finds prefill instances, and lets the copier
scatter what arrives in slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from prometheus_client import CollectorRegistry

from kvferry.digest import checked_digest
from kvferry.errors import InputError
from kvferry.ids import Peer, Room
from kvferry.layout.layout import Layout
from kvferry.plan.bind import Binding, Image, Pair, Side, bind
from kvferry.plan.plan import Request
from kvferry.protocol.codec import encode
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import (
    Action,
    Barred,
    Cancel,
    Disconnect,
    Disconnected,
    Instance,
    Receive,
    Scatter,
    Scattered,
    Send,
)
from kvferry.protocol.legs import TargetRoom
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine
from kvferry.rendezvous.client import RendezvousClient
from kvferry.rendezvous.records import InstanceView
from kvferry.runtime.bundles import bundle
from kvferry.runtime.card import Card
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.control import LINGER_MS, ControlClient, new_context
from kvferry.runtime.copier import CopyJob, copier_for
from kvferry.runtime.ground import Ground, Member, lay_ground
from kvferry.runtime.inbox import Inbox
from kvferry.runtime.incoming import Asked, Incoming, bad_pages
from kvferry.runtime.keys import ClusterKey, bindable
from kvferry.runtime.memory import Memory, PoolArrays
from kvferry.runtime.metrics import Meter
from kvferry.runtime.mover import Mover
from kvferry.runtime.owner import Owner, Parts
from kvferry.runtime.rank import RankEndpoint
from kvferry.runtime.tables import Pages, Rows, Shelf
from kvferry.transport.base import Transport

log = logging.getLogger("kvferry.runtime")

MAX_SLOTS = 1 << 16
# A connection may fail once in the middle of a restart; a wrong key fails every time.
SHUT_AFTER = 3


class TargetEndpoint(RankEndpoint["_TargetOwner"]):
    """One decode rank.

    ``pools`` are arrays by group, tensor and layer, or a ``Memory``. ``model`` is
    what both sides must agree on beside the layout, such as a checkpoint's hash.
    """

    def __init__(  # noqa: PLR0913 - what an engine has to say, by keyword
        self,
        layout: Layout,
        pools: Memory | PoolArrays,
        *,
        name: str,
        rank: int = 0,
        model: str,
        transport: str | Transport = "shm",
        rendezvous: str | None = None,
        key: ClusterKey | None = None,
        config: EndpointConfig | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        config = config or EndpointConfig()
        member = Member(name, rank, layout, model)
        bindable(config.host, 0, key)
        with ExitStack() as undo:
            ground = lay_ground(
                member, pools, transport, config, writable=True, most_slots=MAX_SLOTS
            )
            undo.callback(ground.close)
            meter = Meter(str(member.peer), ground.transport.name, registry)
            client = RendezvousClient(rendezvous, key) if rendezvous else None
            undo.pop_all()
        super().__init__(_TargetOwner(ground, config, client, key, meter), client)
        self._deadline_s = config.deadline_s
        self._pools = ground.memory.map
        self._shelf = Shelf(layout, rank, self._pools)

    def receive(  # noqa: PLR0913 - what an engine has to say, by keyword
        self,
        room: Room,
        *,
        prefill: str | InstanceView,
        tokens: int,
        prefix: int = 0,
        pages: Pages,
        states: Rows | None = None,
        deadline_s: float | None = None,
        digest: bytes = b"",
    ) -> Incoming:
        """Have a request's cache written into these pages by that prefill instance.

        ``pages`` are all of the request's, or only those behind the ``prefix``
        that is cached here already. They are held until the room is released.
        ``digest`` says what this request is (``kvferry.digest_of``): the room fails
        unless every source says that it has computed just that.
        """
        if isinstance(prefill, str) and self._client is None:
            raise InputError("finding an instance by its name takes a rendezvous; pass its URL")
        request = Request(tokens, prefix)
        tables = self._shelf.tables(request, pages, states)
        seconds = self._deadline_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + seconds
        asked = Asked(prefill, request, tables, deadline, checked_digest(digest))
        side = Side(self._pools, {table.group: table.as_page_table() for table in tables})
        handle = Incoming(room, asked, side, self._owner.abort)
        self._owner.receive(handle)
        return handle


class _TargetOwner(Owner[Incoming]):
    """The thread of a target."""

    machine: TargetMachine

    def __init__(
        self,
        ground: Ground,
        config: EndpointConfig,
        directory: RendezvousClient | None,
        key: ClusterKey | None,
        meter: Meter,
    ) -> None:
        name = str(ground.member.peer)
        super().__init__(
            Parts(
                TargetMachine(ground.identity, config.protocol, ground.memory.map, ground.staging),
                Inbox(),
                ground.lifeline,
                Mover(ground.transport, self, f"kvferry-mover-{name}"),
                copier_for(ground.memory.device, f"kvferry-copier-{name}", self.thread_broke),
                meter,
                config.tick_s,
                config.stalled_s,
                ground.staging_bytes,
            )
        )
        self._ground = ground
        self._directory = directory
        self._key = key
        self._context = new_context()
        self._views: dict[str, InstanceView] = {}
        self._watches: dict[str, Callable[[InstanceView | None], None]] = {}
        self._asked_for: dict[str, dict[Room, Incoming]] = {}
        self._clients: dict[Peer, tuple[str, ControlClient]] = {}
        self._outbox: dict[ControlClient, list[bytes]] = {}
        self._rooms: dict[Room, TargetRoom] = {}
        self._mover.start()
        self._thread.start()

    # ------------------------------------------------------------ from the engine

    def receive(self, handle: Incoming) -> None:
        """On any thread."""
        self._add(handle)
        self._inbox.put(partial(self._receive, handle))

    def abort(self, handle: Incoming) -> None:
        """On any thread."""
        self._abort(handle)

    def _receive(self, handle: Incoming) -> None:
        prefill = handle.asked.prefill
        self._mover.expect(True, soon=True)
        if isinstance(prefill, InstanceView):
            self._views[prefill.name] = prefill
            self._begin(handle, prefill)
        elif prefill in self._views:
            self._begin(handle, self._views[prefill])
        else:
            self._resolve(prefill, handle)

    def _begin(self, handle: Incoming, view: InstanceView) -> None:
        asked = handle.asked
        instance = Instance(view.name, view.fingerprint, view.layout)
        wanted = asked.request, asked.tables, asked.deadline, asked.digest
        self._step(Receive(handle.room, instance, *wanted))
        room = self.machine.rooms.get(handle.room)
        if room:
            self._rooms[handle.room] = room

    def _cancel(self, handle: Incoming) -> None:
        if self._waits_for_instance(handle):
            self._never_began(handle, FailureCode.ABORTED, "given up at decode")
        else:
            super()._cancel(handle)

    # ------------------------------------------------------------ finding instances

    def _resolve(self, name: str, handle: Incoming) -> None:
        """Wait until the instance is complete, or the room's deadline."""
        assert self._directory is not None
        waiting = self._asked_for.setdefault(name, {})
        waiting[handle.room] = handle
        if name not in self._watches:
            self._watches[name] = partial(self._told_view, name)
            self._directory.watch(name, self._watches[name])

    def _told_view(self, name: str, view: InstanceView | None) -> None:
        """On the rendezvous client's thread."""
        self._inbox.put(partial(self._take_view, name, view))

    def _take_view(self, name: str, view: InstanceView | None) -> None:
        """An instance is complete, has changed, or has ended."""
        if name not in self._watches:
            # Said while we stopped listening. It would never be taken back.
            return
        if view is None:
            self._views.pop(name, None)
        else:
            self._views[name] = view
            for handle in self._asked_for.pop(name, {}).values():
                self._begin(handle, view)
        self._doubt(name, view)

    def _doubt(self, name: str, view: InstanceView | None) -> None:
        """Ask after ranks that the rendezvous no longer has in the life that we know."""
        lives = {Peer(name, rank.rank): rank.incarnation for rank in view.ranks} if view else {}
        self._ask_after(
            lambda link: link.peer.instance == name and lives.get(link.peer) != link.incarnation
        )

    def _waits_for_instance(self, handle: Incoming) -> bool:
        waiting = self._asked_for.get(str(handle.asked.prefill), {})
        return waiting.get(handle.room) is handle

    def _expire_unresolved(self, now: float) -> None:
        for name, waiting in list(self._asked_for.items()):
            for handle in list(waiting.values()):
                if now >= handle.asked.deadline:
                    text = f"instance {name!r} is not at the rendezvous with all its ranks"
                    self._never_began(handle, FailureCode.UNREACHABLE, text)

    def _never_began(self, handle: Incoming, code: FailureCode, text: str) -> None:
        name = str(handle.asked.prefill)
        del self._asked_for[name][handle.room]
        if not self._asked_for[name]:
            del self._asked_for[name]
        self._report(handle.room, Failure.of(code, text))
        self._release(handle.room)

    def _forget_ended(self) -> None:
        """Instances come and go; what is kept of one goes when it has left and nobody needs it."""
        needed = {link.peer.instance for link in self.machine.links.values()}
        for name in self._views.keys() - self._watches.keys() - needed:
            # Given by the engine, which gives it again.
            del self._views[name]
        needed |= self._views.keys() | self._asked_for.keys()
        for peer in [peer for peer in self._clients if peer.instance not in needed]:
            self._drop(peer)
        for name in self._watches.keys() - needed:
            assert self._directory is not None
            self._directory.unwatch(name, self._watches.pop(name))

    # ------------------------------------------------------------ frames

    def _take_frames(self, ready: set[object]) -> None:
        for peer, (_, client) in list(self._clients.items()):
            if ready.isdisjoint(client.sockets):
                continue
            for message in client.receive():
                self._take_message(message)
            if client.counts.pop("dropped", 0):
                self._ask_after(partial(_is_with, peer))
            if client.counts["refused"] >= SHUT_AFTER:
                client.counts.clear()
                self._step(Barred(peer, f"{peer} has another cluster key; give both the same"))

    def _send(self, action: Send) -> None:
        client = self._client_for(action.peer)
        if client is not None:
            self._outbox.setdefault(client, []).append(encode(action.envelope))

    def _flush(self) -> None:
        for client, frames in self._outbox.items():
            for message in bundle(frames):
                client.send(message)
        self._outbox.clear()

    def _client_for(self, peer: Peer) -> ControlClient | None:
        """The channel to a source, at the address that its instance gave last."""
        view, known = self._views.get(peer.instance), self._clients.get(peer)
        if view is None or peer.rank >= len(view.ranks):
            return known[1] if known else None
        address = view.ranks[peer.rank].control
        if known and known[0] == address:
            return known[1]
        if known:
            self._drop(peer)
        client = ControlClient(address, self._key, self._context)
        self._clients[peer] = address, client
        self._watch(client.sockets)
        return client

    def _drop(self, peer: Peer) -> None:
        _, client = self._clients.pop(peer)
        self._outbox.pop(client, None)
        self._unwatch(client.sockets)
        client.close(0)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        self._expire_unresolved(now)
        self._forget_ended()
        self._mover.expect(bool(self._handles))
        slots = self._ground.slots
        if slots:
            used = slots.pool.num_slots - len(self.machine.credits.free)
            self._meter.staging(used * slots.pool.slot_bytes, self.staging_bytes)

    # ------------------------------------------------------------ status

    def _status(self, room: Room) -> Status | None:
        return self.machine.status(room)

    def _ended(self, handle: Incoming, outcome: Outcome) -> None:
        room = self._rooms.get(handle.room)
        if isinstance(outcome, Done) or room is None:
            return
        tables, unusable = handle.asked.tables, room.unusable()
        handle.bad_pages = bad_pages(self.machine.layout, self.me.rank, tables, unusable)

    def _release(self, room: Room) -> None:
        self._rooms.pop(room, None)
        super()._release(room)

    def _num_quarantined(self) -> int:
        return self.machine.num_quarantined

    # ------------------------------------------------------------ proof

    def _disconnect(self, action: Disconnect) -> None:
        link = self.machine.links.get(action.session)
        address = Card.address_in(link.metadata) if link else None
        if address:
            self._prober.suspect(action.peer, action.incarnation, address)

    def _gone(self, peer: Peer, incarnation: int) -> None:
        self._step(Disconnected(peer, incarnation))

    def _is_suspect(self, suspect: tuple[Peer, int]) -> bool:
        return any(
            link.state is LinkState.LOST and (link.peer, link.incarnation) == suspect
            for link in self.machine.links.values()
        )

    # ------------------------------------------------------------ scatters

    def _move(self, action: Action) -> None:
        assert isinstance(action, Scatter)
        slots, room = self._ground.slots, self.machine.rooms[action.room]
        assert slots is not None
        pair = Pair(action.source.rank, self.me.rank)
        side = self._handles[action.room].side
        make = partial(bind, room.plan, pair, action.request, Image(), side, action.blocks)
        then = partial(self._scattered, action)
        from_ = (slots.address(action.slot),)
        self._copier.submit(CopyJob(make, from_, self._ground.addresses, then))

    def _scattered(self, action: Scatter, scattered: Binding | None, problem: str) -> None:
        """On the copier's thread."""
        if scattered is None:
            log.error("scatter-failed room=%r problem=%r", action.room, problem)
            self._inbox.put(partial(self._step, Cancel(action.room)))
        # Well or not, it is over and touches nothing any more.
        self._inbox.put(partial(self._step, Scattered(action.op)))

    def _shut(self) -> None:
        for peer in list(self._clients):
            self._drop(peer)
        self._context.destroy(LINGER_MS)


def _is_with(peer: Peer, link: Link) -> bool:
    return link.peer == peer
