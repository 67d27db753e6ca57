"""A source endpoint: one prefill rank.

``SourceEndpoint`` is what an engine holds and may be used from any thread. The
owner behind it has the machine, and hands writes to the mover: straight from the
engine's pages, or through a slot that the copier fills first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.config import ProtocolConfig
from kvferry.errors import TransportError
from kvferry.ids import Op, Peer, Room, Session
from kvferry.layout.layout import Layout
from kvferry.plan.bind import Binding, Image, Pair, Side, bind
from kvferry.plan.choose import Constants, Path
from kvferry.plan.places import Base, PageTable
from kvferry.protocol.codec import encode
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import (
    Action,
    Disconnect,
    Disconnected,
    Event,
    Fate,
    Open,
    Send,
    SendFailed,
    Sent,
    Write,
)
from kvferry.protocol.outcome import Status
from kvferry.protocol.source import SourceMachine
from kvferry.rendezvous.client import RendezvousClient
from kvferry.rendezvous.records import RankRecord
from kvferry.runtime.bundles import bundle
from kvferry.runtime.card import Card
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.control import ControlServer
from kvferry.runtime.copier import CopyJob, copier_for
from kvferry.runtime.gauge import Gauge
from kvferry.runtime.ground import Ground, Member, first_constants, lay_ground
from kvferry.runtime.inbox import Inbox
from kvferry.runtime.keys import ClusterKey
from kvferry.runtime.memory import Memory, PoolArrays
from kvferry.runtime.metrics import Meter
from kvferry.runtime.mover import Ending, Mover, Posting
from kvferry.runtime.outgoing import Outgoing, Waitable
from kvferry.runtime.owner import CLOSE_S, Owner, Parts
from kvferry.runtime.paths import PathPolicy
from kvferry.runtime.rank import RankEndpoint
from kvferry.runtime.tables import Shelf
from kvferry.transport.base import Transport

log = logging.getLogger("kvferry.runtime")

# How long a push that waits for a GPU lets the owner sleep.
AFTER_POLL_S = 200e-6
# A transport's costs are measured when a peer connects, but not more often than this.
REMEASURE_S = 30.0


class SourceEndpoint(RankEndpoint["_SourceOwner"]):
    """One prefill rank.

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
        most_slots = config.protocol.local_slots
        with ExitStack() as undo:
            control = ControlServer(config.host, config.port, key)
            undo.callback(control.close)
            ground = lay_ground(
                member, pools, transport, config, writable=False, most_slots=most_slots
            )
            undo.callback(ground.close)
            meter = Meter(str(member.peer), ground.transport.name, registry)
            client = RendezvousClient(rendezvous, key) if rendezvous else None
            undo.pop_all()
        super().__init__(_SourceOwner(ground, config, control, meter), client)
        self._deadline_s = config.deadline_s
        self._shelf = Shelf(layout, rank, ground.memory.map)
        self.record = _record(ground, control.address)
        if client:
            client.register(self.record, config.lease_s)

    def open(self, room: Room, *, deadline_s: float | None = None) -> Outgoing:
        """A request begins here. Its pages must stay as they are until it is released."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + seconds
        handle = Outgoing(room, deadline, self._shelf, self._owner.enqueue, self._owner.abort)
        self._owner.open(handle)
        return handle

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Leave the rendezvous, so that nobody comes any more, and end."""
        if self._client:
            self._client.close()
        return super().close(timeout_s)

    @property
    def constants(self) -> Constants:
        """What the transport costs, as far as it is known."""
        return self._owner.policy.constants


def _record(ground: Ground, control: str) -> RankRecord:
    """As the rendezvous shows it to targets."""
    return RankRecord(
        instance=ground.member.name,
        rank=ground.member.rank,
        incarnation=ground.incarnation,
        fingerprint=ground.fingerprint,
        layout=ground.member.layout,
        transport=ground.transport.name,
        control=control,
    )


class _SourceOwner(Owner[Outgoing]):
    """The thread of a source."""

    machine: SourceMachine

    def __init__(
        self, ground: Ground, config: EndpointConfig, control: ControlServer, meter: Meter
    ) -> None:
        self._ground = ground
        self._config = config
        self._control = control
        self.policy = PathPolicy(
            ground.member.rank,
            ground.memory.map,
            self._tables_of,
            first_constants(config, ground),
            config.path,
        )
        name = str(ground.member.peer)
        super().__init__(
            Parts(
                SourceMachine(ground.identity, _with_slots(config, ground), self.policy),
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
        self._routes: dict[Session, bytes] = {}
        self._outbox: dict[bytes, list[bytes]] = {}
        self._cards: dict[Session, tuple[Peer, Card]] = {}
        self._writes: dict[Op, Write] = {}
        self._waiting: dict[Outgoing, None] = {}
        self._measured_at = float("-inf")
        self._watch(control.sockets)
        self._mover.start()
        self._thread.start()

    # ------------------------------------------------------------ from the engine

    def open(self, handle: Outgoing) -> None:
        """On any thread."""
        self._add(handle)
        self.enqueue(handle, None, lambda: None, Open(handle.room, handle.deadline))

    def enqueue(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        """On any thread: take this step for a room when what was asked before it is done."""
        self._inbox.put(partial(self._enqueue, handle, after, learn, event))

    def abort(self, handle: Outgoing) -> None:
        """On any thread."""
        self._abort(handle)

    def _enqueue(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        handle.steps.append((after, learn, event))
        self._advance(handle)

    def _advance(self, handle: Outgoing) -> None:
        """Take the steps that a room was asked for, as far as the GPU has come."""
        while handle.steps:
            after, learn, event = handle.steps[0]
            if after is not None and handle.outcome is None and not after.query():
                self._waiting[handle] = None
                return
            handle.steps.popleft()
            if self._handles.get(handle.room) is handle:
                learn()
                self._step(event)
        self._waiting.pop(handle, None)

    def _turn(self) -> None:
        super()._turn()
        for handle in list(self._waiting):
            self._advance(handle)

    def _pause_until(self) -> float:
        soon = time.monotonic() + AFTER_POLL_S if self._waiting else float("inf")
        return min(soon, super()._pause_until())

    def _tables_of(self, room: Room) -> dict[str, PageTable]:
        handle = self._handles.get(room)
        return handle.tables.tables() if handle else {}

    def _status(self, room: Room) -> Status | None:
        return self.machine.status(room)

    # ------------------------------------------------------------ frames

    def _take_frames(self, ready: set[object]) -> None:
        if ready.isdisjoint(self._control.sockets):
            return
        for route, message in self._control.receive():
            self._take_message(message, route)
        self._meter.total("connection", self._control.counts["refused"])
        if self._control.counts.pop("dropped", 0):
            self._ask_after()

    def _routed(self, session: Session, route: bytes) -> None:
        self._routes[session.greeting] = route

    def _send(self, action: Send) -> None:
        route = self._routes.get(action.envelope.session.greeting)
        if route is not None:
            self._outbox.setdefault(route, []).append(encode(action.envelope))

    def _flush(self) -> None:
        for route, frames in self._outbox.items():
            for message in bundle(frames):
                self._control.send(route, message)
        self._outbox.clear()

    def _step(self, event: Event) -> None:
        super()._step(event)
        for session in [s for s in self.machine.links if s not in self._cards]:
            self._connect(self.machine.links[session])

    def _tick(self, now: float) -> None:
        super()._tick(now)
        known = {session.greeting for session in self.machine.links}
        self._routes = {s: route for s, route in self._routes.items() if s in known}
        slots = self._ground.slots
        if slots:
            used = slots.pool.num_slots - len(self.machine.local_slots)
            self._meter.staging(used * slots.pool.slot_bytes, slots.region.num_bytes)

    # ------------------------------------------------------------ peers

    def _connect(self, link: Link) -> None:
        """A target has greeted us: reach its memory while the engine still computes."""
        try:
            card = Card.decode(link.metadata)
        except TransportError as error:
            self.not_connected(link.session, str(error))
            card = Card("", b"", ("", 0))
        self._cards[link.session] = link.peer, card
        self._mover.connect(link.session, card.payload)
        now = time.monotonic()
        if self._measurable(card) and now >= self._measured_at + REMEASURE_S:
            self._measured_at = now
            self._mover.measure(link.session, self._gauge(card), self.policy.constants)

    def _measurable(self, card: Card) -> bool:
        given = self._config.constants is not None
        return not given and self._ground.slots is not None and card.staging_region is not None

    def _gauge(self, card: Card) -> Gauge:
        slots = self._ground.slots
        assert slots is not None
        assert card.staging_region is not None
        ours = Base(0, len(self._ground.memory.regions), slots.scratch_offset)
        return Gauge(ours, Base(0, card.staging_region, card.scratch_offset))

    def _measured(self, constants: Constants) -> None:
        self.policy.constants = constants

    def _disconnect(self, action: Disconnect) -> None:
        if action.session not in self._cards:
            return
        self._mover.cut(action.session)
        _, card = self._cards[action.session]
        # Where a write's fate is unknown, only the end of that process settles it.
        self._prober.suspect(action.peer, action.incarnation, card.address)

    def _session_cut(self, session: Session) -> None:
        if session in self._cards:
            peer, _ = self._cards.pop(session)
            self._step(Disconnected(peer, session.target, session))

    def _gone(self, peer: Peer, incarnation: int) -> None:
        for session, (other, _) in self._cards.items():
            if (other, session.target) == (peer, incarnation):
                self._mover.bury(session)

    def _is_suspect(self, suspect: tuple[Peer, int]) -> bool:
        return any((peer, s.target) == suspect for s, (peer, _) in self._cards.items())

    def _num_quarantined(self) -> int:
        return self.machine.num_quarantined

    # ------------------------------------------------------------ writes

    def _move(self, action: Action) -> None:
        assert isinstance(action, Write)
        self._writes[action.op] = action
        pair = Pair(self.me.rank, action.peer.rank)
        handle = self._handles[action.room]
        link = self.machine.links[action.note.session]
        ours = Side(self._ground.memory.map, handle.tables.tables())
        to = Image() if action.slot is not None else self._theirs(handle, link, action)
        make = partial(bind, link.plan, pair, action.request, ours, to, action.blocks)
        if action.slot is None:
            note = encode(action.note)
            self._mover.write(Posting(action.op, action.note.session, make, note))
        else:
            self._gather(action, make)

    def _theirs(self, handle: Outgoing, link: Link, action: Write) -> Side:
        """The target's pages, turned into arrays once for all writes of an offer."""
        key = (link.session, action.generation)
        if key not in handle.sides:
            assert link.hello is not None
            tables = {table.group: table.as_page_table() for table in action.tables}
            handle.sides[key] = Side(link.hello.pools, tables)
        return handle.sides[key]

    def _gather(self, action: Write, make: Callable[[], Binding]) -> None:
        """Fill the local slot, then write it in bulk."""
        slots, link = self._ground.slots, self.machine.links[action.note.session]
        _, card = self._cards[link.session]
        assert slots is not None
        assert link.hello is not None
        if card.staging_region is None or action.slot is None or action.local_slot is None:
            problem = f"{action.peer} granted a slot that it does not have"
            self.write_ended(Ending(action.op, Fate.FAILED, problem))
            return
        from_ = Base(0, len(self._ground.memory.regions), slots.pool.offset(action.local_slot))
        to = Base(0, card.staging_region, action.slot * link.hello.staging.slot_bytes)
        into, then = slots.address(action.local_slot), partial(self._gathered, action, from_, to)
        self._copier.submit(CopyJob(make, self._ground.addresses, (into,), then, keep=True))

    def _gathered(
        self, action: Write, from_: Base, to: Base, gathered: Binding | None, problem: str
    ) -> None:
        """On the copier's thread."""
        if gathered is None:
            self.write_ended(Ending(action.op, Fate.FAILED, problem))
            return
        bulk = partial(Binding.bulk, from_, to, gathered.num_bytes)
        note = encode(action.note)
        self._mover.write(Posting(action.op, action.note.session, bulk, note, Path.STAGED))

    def _write_ended(self, ending: Ending) -> None:
        action = self._writes.pop(ending.op)
        self._meter.wrote(ending)
        if ending.fate is None:
            self._count(action, ending)
            if not self._ground.transport.carries_notes:
                self._send_or_fail(Send(action.peer, action.note))
            self._step(Sent(ending.op))
            return
        self._log_failed(action, ending)
        self._step(SendFailed(ending.op, ending.fate))
        if ending.fate is not Fate.BUSY:
            self._ask_after(lambda link: link.peer == action.peer)

    def _count(self, action: Write, ending: Ending) -> None:
        handle = self._handles.get(action.room)
        if handle is not None:
            handle.carried[ending.path] = handle.carried.get(ending.path, 0) + ending.num_bytes

    def _log_failed(self, action: Write, ending: Ending) -> None:
        log.warning(
            "write-failed endpoint=%s room=%r peer=%s fate=%s detail=%r",
            *(self.me, action.room, action.peer, ending.fate, ending.detail),
        )

    def _shut(self) -> None:
        self._unwatch(self._control.sockets)
        self._control.close()


def _with_slots(config: EndpointConfig, ground: Ground) -> ProtocolConfig:
    """The machine hands out the slots that there are."""
    slots = ground.slots
    if slots is None:
        return config.protocol
    return replace(
        config.protocol, local_slots=slots.pool.num_slots, local_slot_bytes=slots.pool.slot_bytes
    )
