"""A target's directory: who waits for which instance, and what is kept when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.sides import TargetRoomEnds, TargetSide
from kvferry.ids import Peer, Room
from kvferry.plan.plan import Request
from kvferry.protocol.events import Event, PeerRestarted, Receive, ReceiveRequest
from kvferry.protocol.outcome import FailureCode
from kvferry.telemetry.observer import Observer


def view_of(*lives: int) -> Any:
    """An instance at the discovery service, as far as these look at it."""
    ranks = [SimpleNamespace(rank=rank, incarnation=life) for rank, life in enumerate(lives)]
    return SimpleNamespace(name="prefill", ranks=ranks, fingerprint="m", layout=None)


VIEW = view_of(7, 8)


class Client:
    """A discovery service' client that only remembers who watches what."""

    def __init__(self) -> None:
        self.watched: set[str] = set()

    def watch(self, name: str, _: object, *, eager: bool) -> None:
        assert eager
        self.watched.add(name)

    def unwatch(self, name: str, _: object) -> None:
        self.watched.remove(name)

    def problem(self, name: str) -> str:
        return f"nobody has registered as {name!r}"


class Rooms:
    """How rooms ended."""

    def __init__(self) -> None:
        self.told: list[tuple[Room, FailureCode]] = []
        self.messages: list[str] = []
        self.released: list[Room] = []

    def report(self, room: Room, failure: Any) -> None:
        self.told.append((room, failure.code))
        self.messages.append(failure.message)

    def release(self, room: Room) -> None:
        self.released.append(room)

    def get(self, room: Room) -> None:
        return None

    def __len__(self) -> int:
        return 0


def handle(room: Room, deadline: float = inf) -> Incoming:
    made = Incoming(ReceiveRequest(room, Request(4), (), deadline), "prefill", lambda _: None, dict)
    made.begun = 0.0
    return made


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def directory(client: Client) -> Directory:
    knows: Any = client
    return Directory(knows, lambda *_: None)


def test_an_instance_is_watched_while_somebody_waits_for_it(
    directory: Directory, client: Client
) -> None:
    first, second = handle("1", 5.0), handle("2", 3.0)
    assert directory.find(first) is directory.find(second) is None
    assert (client.watched, directory.wakeup()) == ({"prefill"}, 3.0)
    assert directory.give_up(second)
    assert not directory.give_up(second)
    assert directory.wakeup() == 5.0
    assert directory.forget_ended(set()) == {"prefill"}
    assert directory.give_up(first)
    assert directory.wakeup() == inf
    assert directory.forget_ended(set()) == set()
    assert (client.watched, directory.names) == (set(), set())


def test_who_waits_goes_on_when_the_instance_is_there(directory: Directory) -> None:
    first, second = handle("1"), handle("2")
    directory.find(first)
    directory.find(second)
    assert directory.learn("prefill", None) == []
    assert directory.learn("prefill", VIEW) == [first, second]
    assert directory.learn("prefill", VIEW) == []
    assert directory.find(handle("3")) is VIEW
    assert not directory.give_up(first)


@pytest.mark.parametrize(("now", "overdue"), [(2.9, []), (3.0, ["2"]), (9.0, ["1", "2"])])
def test_a_room_ends_at_its_deadline_if_its_instance_does_not_come(
    directory: Directory, now: float, overdue: list[Room]
) -> None:
    rooms = Rooms()
    role = role_of(directory, rooms)
    for each in (handle("1", 5.0), handle("2", 3.0)):
        directory.find(each)
    role.advance(now)
    role.advance(now)
    assert rooms.told == [(room, FailureCode.UNREACHABLE) for room in overdue]
    assert rooms.released == overdue


def test_a_room_does_not_wait_long_for_what_the_discovery_does_not_know(client: Client) -> None:
    knows: Any = client
    directory, rooms = Directory(knows, lambda *_: None, discovery_timeout_s=2.0), Rooms()
    role, early = role_of(directory, rooms), handle("1", 9.0)
    directory.find(early)
    assert directory.wakeup() == 9.0  # the discovery service has not answered, and may be away
    role.learn("prefill", None)
    late = handle("2", 9.0)
    late.begun = 1.5
    directory.find(late)
    assert directory.wakeup() == 2.0
    role.advance(3.4)
    assert rooms.told == [("1", FailureCode.UNREACHABLE)]
    assert rooms.messages == [
        "the prefill instance is not there: nobody has registered as 'prefill'"
    ]
    assert directory.wakeup() == 3.5
    assert directory.learn("prefill", VIEW) == [late]
    assert directory.learn("prefill", None) == []
    # Who is not waited for is not kept in mind.
    assert directory.forget_ended(set()) == set()
    again = handle("3", 9.0)
    directory.find(again)
    assert directory.wakeup() == 9.0


def test_a_room_can_be_given_up_while_it_waits(directory: Directory) -> None:
    rooms = Rooms()
    role, room = role_of(directory, rooms), handle("1", 5.0)
    directory.find(room)
    assert role.cancel(room)
    assert not role.cancel(room)
    assert rooms.told == [("1", FailureCode.ABORTED)]
    assert (rooms.released, role.wakeup(0.0)) == (["1"], inf)


def test_lives_are_asked_after_only_where_the_discovery_has_spoken_of_their_instance(
    directory: Directory,
) -> None:
    asked: list[Callable[[Any], bool]] = []
    role = role_of(directory, Rooms(), asked)
    links = [
        SimpleNamespace(peer=Peer(name, rank), incarnation=life)
        for name, rank, life in [("prefill", 0, 7), ("prefill", 1, 9), ("other", 0, 7)]
    ]
    role.learn("prefill", VIEW)
    role.learn("prefill", None)
    one_changed, all_left = ([look(link) for link in links] for look in asked)
    assert one_changed == [False, True, False]
    assert all_left == [True, True, False]


def test_the_machine_hears_of_new_lives_before_rooms_that_waited_for_them_begin(
    directory: Directory,
) -> None:
    taken: list[Event] = []
    role = role_of(directory, Rooms(), taken=taken)
    role.receive(handle("1"))
    assert taken == []
    role.learn("prefill", VIEW)
    *news, begun = taken
    assert news == [PeerRestarted(Peer("prefill", 0), 7), PeerRestarted(Peer("prefill", 1), 8)]
    assert isinstance(begun, Receive)


def test_nothing_is_concluded_from_lives_that_are_not_known(directory: Directory) -> None:
    asked: list[Callable[[Any], bool]] = []
    taken: list[Event] = []
    role = role_of(directory, Rooms(), asked, taken)
    unknown: Any = SimpleNamespace(
        name="prefill", ranks=[SimpleNamespace(rank=0, incarnation=None)]
    )
    role.learn("prefill", unknown)
    link = SimpleNamespace(peer=Peer("prefill", 0), incarnation=7)
    assert (taken, [look(link) for look in asked]) == ([], [False])


def role_of(
    directory: Directory,
    rooms: Rooms,
    asked: list[Callable[[Any], bool]] | None = None,
    taken: list[Event] | None = None,
) -> TargetSide:
    runner: Any = SimpleNamespace(
        probe_links=(asked if asked is not None else []).append,
        machine=SimpleNamespace(rooms={}),
    )
    scatters: Any = SimpleNamespace(expect=lambda *_, **__: None)
    held: Any = rooms
    nothing: Any = None
    take = (taken if taken is not None else []).append
    ends = TargetRoomEnds(held, runner.machine, scatters)
    return TargetSide(runner, take, ends, scatters, nothing, directory, Observer())
