"""The loop's work for a source and for a target, apart from running the machine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.jobs import ProofJob, ScatterJob, WriteJob
from kvferry.endpoint.loop.channels import Channel, SourceChannel, TargetChannel
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.scatters import StagedScatters
from kvferry.endpoint.loop.writes import TransportWrites
from kvferry.endpoint.outgoing import Outgoing, PendingStep, Waitable
from kvferry.endpoint.runner.runner import MachineRunner, SourceRunner, TargetRunner
from kvferry.endpoint.transport_thread import Measured, Reached, TransportThread
from kvferry.errors import Misuse
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
    Report,
)
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.telemetry.observer import Observer, WaitReason
from kvferry.telemetry.steps import StepKind

# Poll interval for the GPU events that pushes wait for.
EVENT_POLL_S = 100e-6


@dataclass(eq=False)
class LoopSide(ABC):
    """Source or target half of an endpoint. For the loop thread."""

    runner: MachineRunner[Any, Any]
    rooms: RoomTable[Any]
    channel: Channel[Any]
    observer: Observer

    def step(self, event: Event) -> None:
        """Let the machine handle an event. ``Misuse`` fails the event's room and nothing else."""
        try:
            self.runner.answer(event)
        except Misuse as error:
            room = getattr(event, "room", None)
            if room is None:
                raise
            self.runner.answer(Cancel(room, Failure.of(FailureCode.INTERNAL, str(error))))
        self.rooms.refresh(event, self.runner.machine.status)

    @property
    def urgent(self) -> bool:
        """Whether a result that a peer waits for is about to come."""
        return False

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """Number of staging slots that are not in use."""

    @property
    @abstractmethod
    def num_credits(self) -> int:
        """Number of staging credits that were granted and not used."""

    def waits_for(self, handle: Any) -> WaitReason:
        """Return what an open room waits for."""
        if handle.failure is not None:
            room = self.runner.machine.rooms.get(handle.room)
            is_quarantined = room is not None and room.is_quarantined
            return WaitReason.QUARANTINE if is_quarantined else WaitReason.RELEASE
        match handle.status:
            case Status.CONNECTING:
                return self._first_wait(handle)
            case Status.WAITING:
                return WaitReason.PUSH
            case _:
                return self._last_wait(handle)

    @abstractmethod
    def _first_wait(self, handle: Any) -> WaitReason:
        """Return what a room waits for while source and target have not met."""

    def _last_wait(self, handle: Any) -> WaitReason:
        """Return what a room waits for once bytes are on their way."""
        return WaitReason.WRITES

    @abstractmethod
    def handle_result(self, result: Any) -> None:
        """Handle a result of the transport thread or the copier."""

    def cancel_waiting(self, handle: Any) -> bool:
        """Cancel a room that has not reached the machine yet. Return False if it has."""
        return False

    @abstractmethod
    def poll(self, now: float) -> None:
        """Poll what sends no event by itself. Called at the end of a turn."""

    @abstractmethod
    def wakeup(self, now: float) -> float:
        """Return when ``poll`` must be called again."""

    @abstractmethod
    def clean_up(self) -> None:
        """Drop what is not needed any more. Called a few times a second at most."""


@dataclass(eq=False)
class SourceSide(LoopSide):
    """Source half: steps that wait for GPU events, writes, and links to targets."""

    runner: SourceRunner
    rooms: RoomTable[Outgoing]
    channel: SourceChannel
    links: TargetLinkTable
    writes: TransportWrites
    # Rooms whose next step waits for a GPU event.
    _waiting: dict[Outgoing, None] = field(default_factory=dict)

    def handle_result(self, result: WriteJob | ProofJob | Reached | Measured) -> None:
        """Handle a result of the transport thread or the copier."""
        if isinstance(result, ProofJob):
            self.writes.proofs.proven(result)
        elif isinstance(result, WriteJob):
            self.writes.resume(result)
        elif isinstance(result, Reached):
            self.links.reached(result)
        else:
            self.links.costs.record(result.session, result.link_cost)

    def submit(self, handle: Outgoing, step: PendingStep) -> None:
        """Run a step of a room, after the steps submitted before it and after its event."""
        handle.steps.append(step)
        self._run_steps(handle)

    def _run_steps(self, handle: Outgoing) -> None:
        """Run the steps of a room whose GPU events have happened."""
        while handle.steps:
            step = handle.steps[0]
            after = step.after
            if after is not None and handle.outcome is None and not self._happened(after, handle):
                self._waiting[handle] = None
                return
            handle.steps.popleft()
            if self.rooms.holds(handle):
                self._run_step(handle, step)
        self._waiting.pop(handle, None)

    def _run_step(self, handle: Outgoing, step: PendingStep) -> None:
        if step.chunk is not None:
            handle.tables.add(step.chunk)
        if step.rows:
            handle.tables.add_rows(step.rows)
        event = step.event
        if isinstance(event, Push):
            handle.held_tokens = max(handle.held_tokens, event.tokens.end)
            self.observer.step(event.room, StepKind.PUSHED, event.tokens)
        elif isinstance(event, Finish):
            handle.finished = time.monotonic()
        elif isinstance(event, Open):
            self.observer.room_opened(handle)
        self.step(event)

    def _happened(self, after: Waitable, handle: Outgoing) -> bool:
        try:
            return bool(after.query())
        except Exception as error:
            message = f"the event that a push waits for has failed: {error!r:.500}"
            self.step(Cancel(handle.room, Failure.of(FailureCode.INTERNAL, message)))
            # The room has failed, so its steps do not wait.
            return True

    def poll(self, now: float) -> None:
        """Poll GPU events that steps wait for, and writes that the loop has made."""
        for handle in list(self._waiting):
            self._run_steps(handle)
        for _ in self.writes.poll(now):
            self.channel.flush_if_due()

    @property
    def urgent(self) -> bool:
        """Whether a write has just started: a target waits for its end."""
        return self.writes.inline.has_recent(time.monotonic())

    def wakeup(self, now: float) -> float:
        """Return when ``poll`` must be called again: soon, while a step waits."""
        return min(now + EVENT_POLL_S if self._waiting else inf, self.writes.inline.wakeup())

    def clean_up(self) -> None:
        """Forget the routes of ended sessions."""
        self.channel.keep_routes(self.runner.machine.links)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no gather uses."""
        return len(self.runner.machine.inflight.slots)

    @property
    def num_credits(self) -> int:
        """Number of credits that targets have granted and no write has used."""
        rooms = self.runner.machine.rooms.values()
        return sum(len(one.credit) for room in rooms for one in room.outbounds.values())

    def _first_wait(self, handle: Outgoing) -> WaitReason:
        return WaitReason.OFFER

    def _last_wait(self, handle: Outgoing) -> WaitReason:
        room = self.runner.machine.rooms.get(handle.room)
        outbounds = room.outbounds.values() if room else ()
        lacks_credit = any(one.awaits_credit and not one.credit for one in outbounds)
        return WaitReason.CREDIT if lacks_credit else WaitReason.WRITES


@dataclass(eq=False)
class TargetSide(LoopSide):
    """Target half: scatters, and rooms that wait for their prefill instance."""

    runner: TargetRunner
    rooms: RoomTable[Incoming]
    channel: TargetChannel
    transport_thread: TransportThread
    scatters: StagedScatters
    directory: Directory

    def handle_result(self, result: ScatterJob | ProofJob) -> None:
        """Handle a result of the copier."""
        if isinstance(result, ProofJob):
            self.scatters.proofs.proven(result)
        else:
            self.scatters.copied(result)

    def receive(self, handle: Incoming) -> None:
        """Open a room, when its instance is known."""
        self.observer.room_opened(handle)
        self.transport_thread.expect_writes(True, soon=True)
        self._compare_given(handle.prefill)
        view = self.directory.find(handle)
        if view is not None:
            self._open(handle, view)

    def decline(self, room: Room, prefill: str | InstanceView, until: float) -> None:
        """Tell an instance that a room will not be received, once it is known, before ``until``."""
        if self.rooms.get(room) is not None:
            return  # The engine has asked for the room meanwhile.
        self._compare_given(prefill)
        view = self.directory.find_for_declined(room, prefill, until)
        if view is not None:
            self.step(Decline(room, self._instance(view)))

    def _open(self, handle: Incoming, view: InstanceView) -> None:
        self.step(Receive(self._instance(view), handle.request))

    def update_instance(self, name: str, view: InstanceView | None) -> None:
        """Handle an instance's view from discovery; None if the instance is not complete."""
        self._compare_links(name, view)
        waiting, declined = self.directory.update(name, view)
        if view is not None:
            for handle in waiting:
                self._open(handle, view)
            for room in declined:
                self.decline(room, view, 0.0)

    def _compare_given(self, prefill: str | InstanceView) -> None:
        """Compare the links with a view that the engine gave, once for each view."""
        if isinstance(prefill, InstanceView) and not self.directory.has(prefill):
            self._compare_links(prefill.name, prefill)

    def _compare_links(self, name: str, view: InstanceView | None) -> None:
        """End the links to other incarnations than a view has.

        This comes before any room opens, because an offer to a dead incarnation would fail it.
        """
        lives = {Peer(view.name, one.rank): one.incarnation for one in view.ranks} if view else {}

        def is_unlisted(link: Link) -> bool:
            former = link.peer not in lives or lives[link.peer] not in (None, link.incarnation)
            return link.peer.instance == name and former

        # Discovery no longer lists these incarnations, so they may be dead.
        self.runner.probe_links(is_unlisted)
        for peer, incarnation in lives.items():
            if incarnation is not None:
                self.step(PeerRestarted(peer, incarnation))

    def _instance(self, view: InstanceView) -> Instance:
        fingerprint = view.fingerprint
        if fingerprint is None:
            # Unknown here. The handshake compares it.
            fingerprint = self.runner.machine.peers.identity.fingerprint
        return Instance(view.name, fingerprint, view.layout)

    def cancel_waiting(self, handle: Incoming) -> bool:
        """Cancel a room that still waits for its instance. Return False if it does not."""
        waited = self.directory.remove_waiting(handle)
        if waited:
            self._fail_unopened(handle, FailureCode.ABORTED, "given up at decode")
            self.decline(handle.room, handle.prefill, handle.deadline)
        return waited

    def _fail_unopened(self, handle: Incoming, code: FailureCode, message: str) -> None:
        self.rooms.report(Report(handle.room, Failure.of(code, message)))
        self.rooms.release(handle.room)

    def poll(self, now: float) -> None:
        """Fail the rooms whose instance was not found in time."""
        for handle in self.directory.overdue(now):
            self.directory.remove_waiting(handle)
            assert self.directory.client is not None
            problem = self.directory.client.problem(str(handle.prefill))
            message = f"the prefill instance is not there: {problem}"
            self._fail_unopened(handle, FailureCode.UNREACHABLE, message)

    def wakeup(self, now: float) -> float:
        """Return when the first waiting room becomes overdue."""
        return max(self.directory.wakeup(), now + EVENT_POLL_S)

    def clean_up(self) -> None:
        """Drop instances and connections that no room needs."""
        machine = self.runner.machine
        linked = {link.peer.instance for link in machine.links.values()}
        needed = self.directory.drop_unused(linked)
        for peer in self.channel.peers:
            if peer.instance not in needed:
                self.channel.drop(peer)
        self.transport_thread.expect_writes(len(self.rooms) > 0)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no source may write into."""
        return len(self.runner.machine.credits.free)

    @property
    def num_credits(self) -> int:
        """Number of credits that sources have and did not use."""
        return self.runner.machine.credits.num_outstanding

    def _first_wait(self, handle: Incoming) -> WaitReason:
        known = handle.room in self.runner.machine.rooms
        return WaitReason.LINK if known else WaitReason.INSTANCE
