"""Roles: what a source and a target each do on their owner's thread, beside being driven."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, Protocol

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.incoming import Incoming, bad_pages
from kvferry.endpoint.jobs import ScatterJob, WriteJob
from kvferry.endpoint.loop.channels import SourceChannel, TargetChannel
from kvferry.endpoint.loop.chooser import Chooser
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.scatters import StagedScatters
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing, Waitable
from kvferry.endpoint.runner.runner import SourceRunner, TargetRunner
from kvferry.endpoint.transport_thread import Measured, Reached, Unreached
from kvferry.ids import Peer, Room
from kvferry.protocol.events import (
    Cancel,
    Decline,
    Event,
    Finish,
    Instance,
    Open,
    PeerRestarted,
    Push,
    Receive,
)
from kvferry.protocol.inbound import TargetRoom
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Failure, FailureCode, Outcome
from kvferry.protocol.target import TargetMachine
from kvferry.telemetry.observer import Observer
from kvferry.telemetry.steps import StepKind

# Members of an enumeration are slow to name.
PUSHED = StepKind.PUSHED

# How long a push that waits for a GPU lets the owner sleep.
AFTER_POLL_S = 100e-6


class LoopSide(Protocol):
    """What the loop turns beside the runner."""

    @property
    def urgent(self) -> bool:
        """Whether something that others wait for is about to end."""

    def hear(self, news: Any) -> None:
        """Take news from the transport_thread or the copier."""

    def cancel(self, handle: Any) -> bool:
        """Give up a room that has not come to the machine; False if it has."""

    def advance(self, now: float) -> None:
        """At the end of a turn: what was waiting for something else than an event."""

    def wakeup(self, now: float) -> float:
        """When to look again although nothing came."""

    def tidy(self) -> None:
        """Now and then: let go of what nobody needs."""

    @property
    def num_free_slots(self) -> int:
        """Staging slots that are not in use."""


class SourceRoomEnds:
    """To a source's runner, how rooms end: what was bound for one is let go of with it."""

    def __init__(self, rooms: RoomTable[Outgoing], chooser: Chooser) -> None:
        self._rooms = rooms
        self._chooser = chooser

    def report(self, room: Room, outcome: Outcome) -> None:
        """A room has ended for its caller."""
        self._rooms.report(room, outcome)

    def release(self, room: Room) -> None:
        """A room's memory is the caller's again."""
        self._chooser.forget(room)
        self._rooms.release(room)


class TargetRoomEnds:
    """To a target's runner, how rooms end: a failed one tells which of its pages are no use."""

    def __init__(
        self, rooms: RoomTable[Incoming], machine: TargetMachine, scatters: StagedScatters
    ) -> None:
        self.table = rooms
        self._machine = machine
        self._scatters = scatters
        # As the machine has them, for a last look after it has forgotten one.
        self._received: dict[Room, TargetRoom] = {}

    def begun(self, room: Room) -> None:
        """The machine has heard of a room."""
        received = self._machine.rooms.get(room)
        if received is not None:
            self._received[room] = received

    def report(self, room: Room, outcome: Outcome) -> None:
        """A room has ended for its caller."""
        handle, received = self.table.get(room), self._received.get(room)
        if handle is not None and received is not None and isinstance(outcome, Failure):
            layout, rank = self._machine.layout, self._machine.me.rank
            handle.know_bad(bad_pages(layout, rank, handle.wanted.tables, received.unusable()))
        self.table.report(room, outcome)

    def release(self, room: Room) -> None:
        """A room's memory is the caller's again."""
        self._received.pop(room, None)
        self._scatters.release(room)
        self.table.release(room)


class SourceSide:
    """A prefill rank."""

    def __init__(
        self,
        runner: SourceRunner,
        step: Callable[[Event], None],
        rooms: RoomTable[Outgoing],
        links: TargetLinkTable,
        writes: TransportWrites,
        channel: SourceChannel,
        observer: Observer,
    ) -> None:
        self._runner = runner
        self._step = step
        self._rooms = rooms
        self._links = links
        self._writes = writes
        self._channel = channel
        self._observer = observer
        self._waiting: dict[Outgoing, None] = {}

    def hear(self, news: WriteJob | Reached | Unreached | Measured) -> None:
        """Take news from the transport_thread or the copier."""
        if isinstance(news, WriteJob):
            self._writes.go_on(news)
        else:
            self._links.hear(news)

    def ask(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        """An engine asks for a step of a room: after ``after``, with what is learnt first."""
        handle.steps.append((after, learn, event))
        self._advance(handle)

    def cancel(self, handle: Outgoing) -> bool:
        """Every room of a source comes to the machine."""
        return False

    def _advance(self, handle: Outgoing) -> None:
        """Take the steps that a room was asked for, as far as the GPU has come."""
        while handle.steps:
            after, learn, event = handle.steps[0]
            if after is not None and handle.outcome is None and not self._is_past(after, handle):
                self._waiting[handle] = None
                return
            handle.steps.popleft()
            if self._rooms.holds(handle):
                learn()
                if isinstance(event, Push):
                    self._observer.step(event.room, PUSHED, event.tokens)
                elif isinstance(event, Finish):
                    handle.finished = monotonic()
                elif isinstance(event, Open):
                    self._observer.room_opened(handle)
                self._step(event)
        self._waiting.pop(handle, None)

    def _is_past(self, after: Waitable, handle: Outgoing) -> bool:
        try:
            return bool(after.query())
        except Exception as error:
            why = f"what a push waited for has failed: {error!r:.500}"
            self._step(Cancel(handle.room, Failure.of(FailureCode.INTERNAL, why)))
            # Nothing more can come of the room, so nothing need wait.
            return True

    def advance(self, now: float) -> None:
        """Look at the pushes that wait for a GPU, and at writes that go on."""
        for handle in list(self._waiting):
            self._advance(handle)
        for _ in self._writes.ends(now):
            self._channel.let_out()

    @property
    def urgent(self) -> bool:
        """Whether a write has just begun: its end is news for a target that waits."""
        return self._writes.has_fresh

    def wakeup(self, now: float) -> float:
        """Soon, while a push waits."""
        return min(now + AFTER_POLL_S if self._waiting else inf, self._writes.wakeup())

    def tidy(self) -> None:
        """Routes."""
        self._channel.keep(self._runner.machine.links)

    @property
    def num_free_slots(self) -> int:
        """Slots that no gather has."""
        return len(self._runner.machine.local_slots)


class TargetSide:
    """A decode rank."""

    def __init__(
        self,
        runner: TargetRunner,
        step: Callable[[Event], None],
        ends: TargetRoomEnds,
        scatters: StagedScatters,
        channel: TargetChannel,
        directory: Directory,
        observer: Observer,
    ) -> None:
        self._runner = runner
        self._step = step
        self._rooms = ends.table
        self._ends = ends
        self._scatters = scatters
        self._channel = channel
        self._directory = directory
        self._observer = observer

    def hear(self, news: ScatterJob) -> None:
        """Take news from the copier."""
        self._scatters.copied(news)

    def receive(self, handle: Incoming) -> None:
        """An engine wants a room's cache."""
        self._observer.room_opened(handle)
        self._scatters.expect(True, soon=True)
        view = self._directory.find(handle)
        if view is not None:
            self._begin(handle, view)

    def decline(self, room: Room, prefill: str | InstanceView, until: float) -> None:
        """An engine will not receive a room: tell its prefill instance, until then at most."""
        if self._rooms.get(room) is not None:
            # The engine has asked for it meanwhile.
            return
        view: InstanceView | None
        if isinstance(prefill, str):
            view = self._directory.find_for_unwanted(room, prefill, until)
        else:
            view = prefill
            self._directory.keep(view)
        if view is not None:
            self._step(Decline(room, self._instance(view)))

    def _begin(self, handle: Incoming, view: InstanceView) -> None:
        self._step(Receive(self._instance(view), handle.wanted))
        self._ends.begun(handle.room)

    def learn(self, name: str, view: InstanceView | None) -> None:
        """Take the view of an instance from discovery: None if it is not complete."""
        lives = {Peer(view.name, one.rank): one.incarnation for one in view.ranks} if view else {}
        # Ask after ranks that the discovery service no longer has in the life that we know.
        self._runner.ask_after(lambda link: link.peer.instance == name and _differs(link, lives))
        # Before any room begins: an offer to a life that has ended would fail it.
        for peer, incarnation in lives.items():
            if incarnation is not None:
                self._step(PeerRestarted(peer, incarnation))
        for handle in self._directory.learn(name, view):
            assert view is not None
            self._begin(handle, view)
        if view is not None:
            for room in self._directory.unwanted_at(view.name):
                self.decline(room, view, 0.0)

    def _instance(self, view: InstanceView) -> Instance:
        fingerprint = view.fingerprint
        if fingerprint is None:
            # The handshake alone compares it.
            fingerprint = self._runner.machine.peers.identity.fingerprint
        return Instance(view.name, fingerprint, view.layout)

    # ------------------------------------------------------------ rooms that never began

    def cancel(self, handle: Incoming) -> bool:
        """Give up a room that still waits for its instance."""
        waited = self._directory.give_up(handle)
        if waited:
            self._never_began(handle, FailureCode.ABORTED, "given up at decode")
            self.decline(handle.room, handle.prefill, handle.deadline)
        return waited

    def _never_began(self, handle: Incoming, code: FailureCode, text: str) -> None:
        self._rooms.report(handle.room, Failure.of(code, text))
        self._rooms.release(handle.room)

    def advance(self, now: float) -> None:
        """End the rooms whose instance did not come."""
        for handle in self._directory.overdue(now):
            self._directory.give_up(handle)
            why = self._directory.problem(str(handle.prefill))
            text = f"the prefill instance is not there: {why}"
            self._never_began(handle, FailureCode.UNREACHABLE, text)

    @property
    def urgent(self) -> bool:
        """A target launches only what its sources wait for."""
        return False

    def wakeup(self, now: float) -> float:
        """When the first of these has to end."""
        return max(self._directory.wakeup(), now + AFTER_POLL_S)

    def tidy(self) -> None:
        """Instances and connections."""
        machine = self._runner.machine
        linked = {link.peer.instance for link in machine.links.values()}
        needed = self._directory.forget_ended(linked)
        for peer in self._channel.peers:
            if peer.instance not in needed:
                self._channel.drop(peer)
        self._scatters.expect(len(self._rooms) > 0)

    @property
    def num_free_slots(self) -> int:
        """Slots that no source may write into."""
        return len(self._runner.machine.credits.free)


def _differs(link: Link, lives: dict[Peer, int | None]) -> bool:
    """Whether a peer is gone, or in another life; a life that is not known says nothing."""
    return link.peer not in lives or lives[link.peer] not in (None, link.incarnation)
