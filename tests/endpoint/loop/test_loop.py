"""The loop thread with a scripted machine: the order of a turn, and how it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint.scripted_machine import PLAN, RecordingPorts, ScriptedMachine

from kvferry.config import ProtocolConfig
from kvferry.endpoint.copy_thread import CopyThread
from kvferry.endpoint.liveness.port import Address, Liveness, LivenessPort, probe
from kvferry.endpoint.loop.channels import ConnectionLost
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.loop import EndpointLoop
from kvferry.endpoint.loop.sides import LoopSide
from kvferry.endpoint.runner.runner import SourcePorts, SourceRunner
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.events import Cancel, Connect, Event, Open, Release, Report, Tick
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Envelope, Staging
from kvferry.protocol.outcome import Done
from kvferry.protocol.states import LinkState
from kvferry.telemetry.observer import WaitReason

INCARNATION = 7
PROBE_S, WAIT_S = 0.5, 15.0
# A timer is due in every turn.
HASTY = ProtocolConfig(resend_s=1e-9)
FRAME, ITEM, LATER = Cancel("a frame"), Cancel("an item"), Cancel("a later one")
PEER, OTHER = Peer("decode", 0), Peer("decode", 1)

# Items of other threads, and what the channel receives.
Turn = tuple[list[Event], list[Event | ConnectionLost]]


class Nothing:
    """A part that does nothing and holds nothing."""

    heartbeat = ThreadHeartbeat("another")
    protocol = ProtocolConfig()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[object]:
        return iter(())


class IdleSide(LoopSide):
    """A side that does nothing beside running the machine."""

    urgent = False
    num_free_slots = 0
    num_credits = 0

    def handle_result(self, result: object) -> None: ...
    def _first_wait(self, handle: object) -> WaitReason:
        return WaitReason.OFFER

    def poll(self, now: float) -> None: ...
    def clean_up(self) -> None: ...

    def wakeup(self, now: float) -> float:
        return inf


class Script:
    """A poller and a channel that play a script of turns."""

    def __init__(self, inbox: Inbox, *turns: Turn) -> None:
        self._inbox = inbox
        self._turns = iter(turns)
        self._frames: list[Event | ConnectionLost] = []
        self.played = threading.Event()

    def watch(self, what: object) -> None: ...
    def flush(self) -> None: ...
    def flush_if_due(self) -> None: ...
    def send(self, peer: Peer, envelope: Envelope) -> None: ...

    def close(self) -> None:
        self.played.set()

    def wait(self, timeout_s: float) -> set[object]:
        turn = next(self._turns, None)
        if turn is None:
            self.played.set()
        items, self._frames = turn or ([], [])
        for item in items:
            self._inbox.put(item)
        return set()

    def receive(self, ready: object) -> Iterator[Event | ConnectionLost]:
        yield from self._frames


def played(
    scripted: ScriptedMachine,
    *turns: Turn,
    ports: RecordingPorts | None = None,
    inbox: Inbox | None = None,
) -> Address:
    """Run a loop through these turns, close it, and return its liveness port's address."""
    inbox = Inbox() if inbox is None else inbox
    script = Script(inbox, *turns)
    rest: Any = Nothing()
    port = LivenessPort("127.0.0.1", INCARNATION)
    setup: Any = SimpleNamespace(liveness_port=port, staging=Staging(), staging_bytes=0)
    parts: dict[str, Any] = dict.fromkeys(("observer", "transport_thread"), rest)
    parts["copier"] = CopyThread("copier", inbox.put, lambda _: None)
    channel: Any = script
    machine: Any = scripted
    runner = SourceRunner(machine, SourcePorts(*[ports or RecordingPorts()] * 4))
    side = IdleSide(runner, rest, channel, rest)
    loop = EndpointLoop(side=side, setup=setup, inbox=inbox, poller=channel, **parts)
    loop.start()
    assert script.played.wait(WAIT_S)
    loop.close()
    address: Address = setup.liveness_port.address
    return address


def looks_dead(address: Address) -> bool:
    """Whether peers take the endpoint with that liveness port for dead."""
    # A socket without references is closed.
    gc.collect()
    return probe(address, INCARNATION, PROBE_S) is Liveness.GONE


def test_items_and_frames_are_taken_before_time() -> None:
    scripted = ScriptedMachine(HASTY)
    scripted.timers = [0.0]
    played(scripted, ([Open("r", inf)], []), ([ITEM], [FRAME]))
    taken = scripted.heard[: scripted.heard.index(FRAME) + 2]
    assert taken == [Open("r", inf), ITEM, FRAME, Tick()]


def test_requests_made_at_the_end_of_a_room_are_taken_in_the_same_turn() -> None:
    scripted, ports, inbox = ScriptedMachine(HASTY), RecordingPorts(), Inbox()
    scripted.timers = [0.0]
    scripted.answers[FRAME] = [Report("r", Done())]
    scripted.answers[ITEM] = [Report("next", Done())]
    asked: dict[Room, Event] = {"r": ITEM, "next": LATER}
    ports.on_report = lambda room: inbox.put(asked[room])
    played(scripted, ([Open("r", inf)], []), ([], [FRAME]), ports=ports, inbox=inbox)
    taken = scripted.heard[: scripted.heard.index(LATER) + 1]
    # A request made at the end of the next room waits for the next turn.
    assert taken == [Open("r", inf), FRAME, ITEM, Tick(), LATER]


@pytest.mark.parametrize("free", [True, False])
def test_the_liveness_port_closes_only_if_memory_is_free(free: bool) -> None:
    scripted = ScriptedMachine(HASTY)
    scripted.answers[ITEM] = [Release("r")] if free else []
    address = played(scripted, ([Open("r", inf)], []), ([ITEM], []))
    assert looks_dead(address) == free


def test_the_liveness_port_of_a_failed_loop_stays_open() -> None:
    """Its transport thread may still be writing."""
    scripted = ScriptedMachine(HASTY)
    scripted.breaks_at = ITEM
    assert not looks_dead(played(scripted, ([Open("r", inf)], []), ([ITEM], [])))


@pytest.mark.parametrize(("peer", "concerns"), [(PEER, [PEER]), (None, [PEER, OTHER])])
def test_a_lost_connection_hints_at_the_death_of_its_peers(
    peer: Peer | None, concerns: list[Peer]
) -> None:
    scripted, ports = ScriptedMachine(HASTY), RecordingPorts()
    scripted.answers[ITEM] = []
    for number, each in enumerate((PEER, OTHER)):
        session = Session(INCARNATION, number)
        scripted.links[session] = Link(
            each, session, LinkState.UP, PLAN, INCARNATION, inf, inf, 0.0
        )
        scripted.answers[ITEM].append(Connect(each, INCARNATION, session, b"metadata"))
    played(scripted, ([ITEM], []), ([], [ConnectionLost(peer)]), ports=ports)
    hints = [what for name, what in ports.asked if name == "hint_death"]
    assert hints == [(each, INCARNATION, b"metadata") for each in concerns]
