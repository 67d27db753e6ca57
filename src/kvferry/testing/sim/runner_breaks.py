"""Broken rules of the runner, its sessions and ports, and of the events that machines receive."""

# The methods are documented where they are overridden from.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.endpoint.runner.runner import MachineRunner, SourcePorts, SourceRunner, TargetRunner
from kvferry.endpoint.runner.sessions import SessionRecord, Sessions
from kvferry.ids import Op, Peer
from kvferry.protocol.events import Action, Event, OwnStall, Write, WriteEnded, WriteFate
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.target import TargetMachine
from kvferry.testing.sim.breaks import broken_rule, machine
from kvferry.testing.sim.cluster import Machines

# ---------------------------------------------------------------- sessions


@broken_rule(machine("sessions"), write_unknown=0.3)
class ForgetUnknownWrites(Sessions):
    """A write of unknown fate counts as ended."""

    def end(self, op: Op, *, doubtful: bool) -> SessionRecord | None:
        return super().end(op, doubtful=False)


@broken_rule(machine("sessions"), kills=4, slow_write=0.7)
class ConfirmEveryIncarnationDead(Sessions):
    """The death of one incarnation of a peer counts for all of them."""

    def confirm_dead(self, peer: Peer, incarnation: int) -> list[SessionRecord]:
        lives = {one.incarnation for one in self.records.values() if one.peer == peer}
        confirm_dead = super().confirm_dead
        return [one for life in lives | {incarnation} for one in confirm_dead(peer, life)]


@broken_rule(machine("sessions"), slow_write=0.7, cuts=4, stalls=2)
class ProofWithWritesInFlight(Sessions):
    """A closed session counts as quiet while its writes are in flight."""

    def settle(self) -> tuple[list[SessionRecord], list[SessionRecord]]:
        for record in self.ending.values():
            record.in_flight.clear()
        return super().settle()


# ---------------------------------------------------------------- ports


class PortWrapper:
    """A port that forwards every call to the real one."""

    def __init__(self, port: Any) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class _NoProbes(PortWrapper):
    def start_probing(self, record: SessionRecord) -> None:
        pass


@broken_rule(machine("ports"), kills=2, write_unknown=0.1)
def never_probe(ports: Any) -> Any:
    """Peers of lost sessions are never probed."""
    return ports._replace(peers=_NoProbes(ports.peers))


class _EarlyNotes(PortWrapper):
    def __init__(self, ports: SourcePorts) -> None:
        super().__init__(ports.data)
        self._control = ports.control

    def write(self, action: Write) -> None:
        self._control.send(action.transfer.peer, action.note)
        self.port.write(action)


@broken_rule(machine("ports"), slow_write=0.3)
def note_before_data(ports: Any) -> Any:
    """A write's arrival note is sent before its data."""
    return ports._replace(data=_EarlyNotes(ports))


# ---------------------------------------------------------------- runners


def _both_runners(mixin: type[MachineRunner[Any, Any]]) -> Machines:
    """Apply one rule to both kinds of runner."""
    source = type(f"Source{mixin.__name__}", (mixin, SourceRunner), {})
    target = type(f"Target{mixin.__name__}", (mixin, TargetRunner), {})
    return Machines(source_runner=source, target_runner=target)


@broken_rule(_both_runners, leaves=2, slow_write=0.3)
class LeaveWithMemoryHeld(MachineRunner[Any, Any]):
    """An endpoint announces its end while it still holds memory for others."""

    @property
    def holds_no_memory(self) -> bool:
        return True


@broken_rule(_both_runners, stalls=2)
class TickBeforeFrames(MachineRunner[Any, Any]):
    """Timers are handled before received frames."""

    def turn(self, arrived: Iterable[Event], now: float) -> None:
        self.advance_time(now)
        super().turn(arrived, now)


@broken_rule(_both_runners)
class Oversleep(MachineRunner[Any, Any]):
    """A runner wakes half a second late."""

    def wakeup(self) -> float:
        return super().wakeup() + 0.5


@broken_rule(machine("source_runner"), busy=0.3)
class ProbeOnBackpressure(SourceRunner):
    """A full transport counts as a hint of death."""

    def take(self, event: Event, now: float) -> None:
        super().take(event, now)
        if isinstance(event, WriteEnded) and event.fate is WriteFate.BUSY:
            self.probe_links()


# ---------------------------------------------------------------- events


@broken_rule(machine("source"))
class LoseWriteResult(SourceMachine):
    """Every tenth write's result never reaches the machine."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, WriteEnded) and event.fate is None and event.op % 10 == 0:
            return []
        return super().handle(event, now)


class _TargetIgnoringStalls(TargetMachine):
    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if isinstance(event, OwnStall) else super().handle(event, now)


@broken_rule(
    lambda rule: Machines(source=rule, target=_TargetIgnoringStalls),
    stalls=6,
    one_sided=0.5,
    drop=0.1,
)
class CountOwnStall(SourceMachine):
    """Peers count as silent for the time in which this process was stopped."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return [] if isinstance(event, OwnStall) else super().handle(event, now)
