"""An owner's thread with a puppet for a machine: the order of a turn, and how it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint.puppet import ME, PLAN, Desk, Puppet

from kvferry.config import ProtocolConfig
from kvferry.endpoint.copy_thread import CopyThread
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.liveness.port import Address, Liveness, LivenessPort, probe
from kvferry.endpoint.loop.channels import Dropped, TargetChannel
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.loop import EndpointLoop
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.sides import SourceRoomEnds
from kvferry.endpoint.runner.runner import SourcePorts, SourceRunner
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import Misuse
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.events import Cancel, Connect, Event, Open, Release, Report, Tick
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.states import LinkState

LIFE = 7
PROBE_S, WAIT_S = 0.5, 15.0
# So that a timer is due in every turn.
HASTY = ProtocolConfig(resend_s=1e-9)
FRAME, ITEM, LATER = Cancel("a frame"), Cancel("an item"), Cancel("a later one")
PEER, OTHER = Peer("decode", 0), Peer("decode", 1)

# What comes from other threads, and from peers.
Turn = tuple[list[Event], list[Event | Dropped]]


class Nothing:
    """A part of an owner that these tests do not look at: it does nothing and holds nothing."""

    heartbeat = ThreadHeartbeat("another")
    protocol = ProtocolConfig()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[object]:
        return iter(())


class Sleepy(Nothing):
    """A role that never wants to be woken."""

    urgent = False

    def wakeup(self, now: float) -> float:
        return inf


class Script:
    """A poller, and a channel: in each turn there is what the script says, and then the end."""

    def __init__(self, inbox: Inbox[object], *turns: Turn) -> None:
        self._inbox = inbox
        self._turns = iter(turns)
        self._frames: list[Event | Dropped] = []
        self.played = threading.Event()

    def watch(self, what: object) -> None: ...
    def flush(self) -> None: ...
    def let_out(self) -> None: ...
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

    def receive(self, ready: object) -> Iterator[Event | Dropped]:
        yield from self._frames


def played(
    puppet: Puppet, *turns: Turn, desk: Desk | None = None, inbox: Inbox[object] | None = None
) -> Address:
    """Have an owner play these turns, close it, and forget it: where its liveness_port was."""
    inbox = Inbox[object]() if inbox is None else inbox
    script, rest = Script(inbox, *turns), Nothing()
    setup: Any = SimpleNamespace(liveness_port=LivenessPort("127.0.0.1", LIFE), slots=None)
    parts: dict[str, Any] = dict.fromkeys(("observer", "rooms", "transport_thread"), rest)
    parts["copier"] = CopyThread("copier", inbox.put, lambda _: None)
    channel: Any = script
    machine: Any = puppet
    runner = SourceRunner(machine, SourcePorts(*[desk or Desk()] * 4))
    owner = EndpointLoop(
        runner, Sleepy(), channel, setup=setup, inbox=inbox, poller=channel, **parts
    )
    owner.start()
    assert script.played.wait(WAIT_S)
    owner.close()
    address: Address = setup.liveness_port.address
    return address


def is_told_of(address: Address) -> bool:
    """Whether others take the endpoint with that liveness_port for gone."""
    # What nobody refers to any more is closed.
    gc.collect()
    return probe(address, LIFE, PROBE_S) is Liveness.GONE


def test_what_has_come_is_taken_before_time() -> None:
    puppet = Puppet(HASTY)
    puppet.timers = [0.0]
    played(puppet, ([Open("r", inf)], []), ([ITEM], [FRAME]))
    taken = puppet.heard[: puppet.heard.index(FRAME) + 2]
    assert taken == [Open("r", inf), ITEM, FRAME, Tick()]


def test_what_an_engine_asks_for_at_an_end_is_taken_in_the_same_turn() -> None:
    puppet, desk, inbox = Puppet(HASTY), Desk(), Inbox[object]()
    puppet.timers = [0.0]
    puppet.answers[FRAME] = [Report("r", Done())]
    puppet.answers[ITEM] = [Report("next", Done())]
    asked: dict[Room, Event] = {"r": ITEM, "next": LATER}
    desk.on_report = lambda room: inbox.put(asked[room])
    played(puppet, ([Open("r", inf)], []), ([], [FRAME]), desk=desk, inbox=inbox)
    taken = puppet.heard[: puppet.heard.index(LATER) + 1]
    # What is asked for at the end of that waits: others have something to say too.
    assert taken == [Open("r", inf), FRAME, ITEM, Tick(), LATER]


@pytest.mark.parametrize("free", [True, False])
def test_others_are_told_of_an_end_only_when_memory_is_free(free: bool) -> None:
    puppet = Puppet(HASTY)
    puppet.answers[ITEM] = [Release("r")] if free else []
    address = played(puppet, ([Open("r", inf)], []), ([ITEM], []))
    assert is_told_of(address) == free


def test_a_broken_owner_tells_nobody_of_its_end() -> None:
    """Its transport_thread may still be writing."""
    puppet = Puppet(HASTY)
    puppet.breaks_at = ITEM
    assert not is_told_of(played(puppet, ([Open("r", inf)], []), ([ITEM], [])))


@pytest.mark.parametrize(("peer", "concerns"), [(PEER, [PEER]), (None, [PEER, OTHER])])
def test_a_connection_that_ends_is_a_sign_for_those_it_concerns(
    peer: Peer | None, concerns: list[Peer]
) -> None:
    puppet, desk = Puppet(HASTY), Desk()
    puppet.answers[ITEM] = []
    for number, each in enumerate((PEER, OTHER)):
        session = Session(LIFE, number)
        puppet.links[session] = Link(each, session, LinkState.UP, PLAN, LIFE, inf, inf, 0.0)
        puppet.answers[ITEM].append(Connect(each, LIFE, session, b"card"))
    played(puppet, ([ITEM], []), ([], [Dropped(peer)]), desk=desk)
    signs = [what for name, what in desk.asked if name == "sign"]
    assert signs == [(each, LIFE, b"card") for each in concerns]


def test_a_room_that_is_released_is_forgotten_by_all_who_kept_something_of_it() -> None:
    nothing: Any = Nothing()
    rooms = RoomTable[Any](ME, nothing)
    forgotten: list[object] = []
    chooser: Any = SimpleNamespace(forget=forgotten.append)
    handles = [Handle(name) for name in ("a", "b")]
    for handle in handles:
        rooms.add(handle)
    ends = SourceRoomEnds(rooms, chooser)
    for handle in handles:
        ends.release(handle.room)
    assert forgotten == ["a", "b"]
    assert [handle.released for handle in handles] == [True, True]
    assert len(rooms) == 0


def test_after_a_bug_of_ours_nobody_waits_and_nobody_begins() -> None:
    meter: Any = Nothing()
    rooms = RoomTable[Handle](ME, meter)
    handles = [Handle(name) for name in ("a", "b")]
    for handle in handles:
        rooms.add(handle)
    rooms.break_all("a bug")
    assert [handle.failure for handle in handles] == [Failure.of(FailureCode.INTERNAL, "a bug")] * 2
    # What the broken thread had in hand may still be written.
    assert [handle.released for handle in handles] == [False, False]
    with pytest.raises(Misuse, match="a bug"):
        rooms.add(Handle("c"))


class Watch(Nothing):
    """A poller that knows what it watches."""

    def __init__(self) -> None:
        self.watched: set[object] = set()
        self.watch = self.watched.add
        self.unwatch = self.watched.remove


def test_a_source_that_has_moved_is_reached_where_it_is_and_nowhere_else() -> None:
    address = "tcp://127.0.0.1:1"
    watch: Any = Watch()
    rest: Any = Nothing()
    channel = TargetChannel(ME, watch, rest, rest, None, lambda _: address)
    frame = Envelope(ME, LIFE, Session(LIFE, 1), 1, Heartbeat())
    watched = []
    for address in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"):  # noqa: B007
        channel.send(PEER, frame)
        watched.append(set(watch.watched))
    assert watched[0] == watched[1]
    assert len(watched[2]) == len(watched[0])
    assert not watched[2] & watched[0]
    assert channel.peers == {PEER}
    channel.close()
    assert not watch.watched
