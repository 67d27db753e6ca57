"""A target's directory: rooms that wait for an instance, and when instances are dropped."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.sides import TargetSide
from kvferry.ids import Peer, Room
from kvferry.plan.plan import Request
from kvferry.protocol.events import Event, PeerRestarted, Receive, ReceiveRequest, Report
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.telemetry.observer import Observer


def view_of(*lives: int) -> Any:
    """An instance's view with one incarnation per rank."""
    ranks = [SimpleNamespace(rank=rank, incarnation=life) for rank, life in enumerate(lives)]
    return SimpleNamespace(name="prefill", ranks=ranks, fingerprint="m", layout=None)


VIEW = view_of(7, 8)


class Client:
    """A discovery client that records its watches."""

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
    """A room table that records how rooms end."""

    def __init__(self) -> None:
        self.told: list[tuple[Room, FailureCode]] = []
        self.messages: list[str] = []
        self.released: list[Room] = []

    def report(self, action: Report) -> None:
        failure = action.outcome
        assert isinstance(failure, Failure)
        self.told.append((action.room, failure.code))
        self.messages.append(failure.message)

    def release(self, room: Room) -> None:
        self.released.append(room)

    def get(self, room: Room) -> None:
        return None

    def refresh(self, event: Event, status: object) -> None: ...

    def __len__(self) -> int:
        return 0


def handle(room: Room, deadline: float = inf) -> Incoming:
    request = ReceiveRequest(room, Request(4), (), deadline)
    layout: Any = None
    handle = Incoming(request, "prefill", layout, 0, lambda _: None)
    handle.begun = 0.0
    return handle


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def directory(client: Client) -> Directory:
    any_client: Any = client
    return Directory(any_client, lambda *_: None)


def test_an_instance_is_watched_while_a_room_waits_for_it(
    directory: Directory, client: Client
) -> None:
    first, second = handle("1", 5.0), handle("2", 3.0)
    assert directory.find(first) is directory.find(second) is None
    assert (client.watched, directory.wakeup()) == ({"prefill"}, 3.0)
    assert directory.remove_waiting(second)
    assert not directory.remove_waiting(second)
    assert directory.wakeup() == 5.0
    assert directory.drop_unused(set()) == {"prefill"}
    assert directory.remove_waiting(first)
    assert directory.wakeup() == inf
    assert directory.drop_unused(set()) == set()
    assert client.watched == set()
    assert directory.address_of(Peer("prefill", 0)) is None


def test_rooms_open_when_their_instance_is_known(directory: Directory) -> None:
    first, second = handle("1"), handle("2")
    directory.find(first)
    directory.find(second)
    assert directory.update("prefill", None) == ([], [])
    assert directory.update("prefill", VIEW) == ([first, second], [])
    assert directory.update("prefill", VIEW) == ([], [])
    assert directory.find(handle("3")) is VIEW
    assert not directory.remove_waiting(first)


def test_an_instance_without_a_link_is_not_watched(directory: Directory, client: Client) -> None:
    directory.find(handle("1"))
    directory.update("prefill", VIEW)
    assert directory.drop_unused({"prefill"}) == {"prefill"}
    assert client.watched == {"prefill"}
    assert directory.drop_unused(set()) == set()
    assert client.watched == set()
    # A later room does not use the old view, which may be stale.
    assert directory.find(handle("2")) is None
    assert client.watched == {"prefill"}


@pytest.mark.parametrize(("now", "overdue"), [(2.9, []), (3.0, ["2"]), (9.0, ["1", "2"])])
def test_a_room_fails_at_its_deadline_without_its_instance(
    directory: Directory, now: float, overdue: list[Room]
) -> None:
    rooms = Rooms()
    side = side_of(directory, rooms)
    for each in (handle("1", 5.0), handle("2", 3.0)):
        directory.find(each)
    side.poll(now)
    side.poll(now)
    assert rooms.told == [(room, FailureCode.UNREACHABLE) for room in overdue]
    assert rooms.released == overdue


def test_a_room_waits_briefly_for_an_instance_that_does_not_exist(client: Client) -> None:
    any_client: Any = client
    directory, rooms = Directory(any_client, lambda *_: None, discovery_timeout_s=2.0), Rooms()
    side, early = side_of(directory, rooms), handle("1", 9.0)
    directory.find(early)
    assert directory.wakeup() == 9.0  # The discovery service has not answered.
    side.update_instance("prefill", None)
    late = handle("2", 9.0)
    late.begun = 1.5
    directory.find(late)
    assert directory.wakeup() == 2.0
    side.poll(3.4)
    assert rooms.told == [("1", FailureCode.UNREACHABLE)]
    assert rooms.messages == [
        "the prefill instance is not there: nobody has registered as 'prefill'"
    ]
    assert directory.wakeup() == 3.5
    assert directory.update("prefill", VIEW) == ([late], [])
    assert directory.update("prefill", None) == ([], [])
    # An instance that no room waits for is forgotten.
    assert directory.drop_unused(set()) == set()
    again = handle("3", 9.0)
    directory.find(again)
    assert directory.wakeup() == 9.0


def test_a_waiting_room_can_be_aborted(directory: Directory) -> None:
    rooms = Rooms()
    side, room = side_of(directory, rooms), handle("1", 5.0)
    directory.find(room)
    assert side.cancel_waiting(room)
    assert not side.cancel_waiting(room)
    assert rooms.told == [("1", FailureCode.ABORTED)]
    assert (rooms.released, side.wakeup(0.0)) == (["1"], inf)


def test_only_incarnations_missing_from_the_updated_instance_are_probed(
    directory: Directory,
) -> None:
    asked: list[Callable[[Any], bool]] = []
    side = side_of(directory, Rooms(), asked)
    links = [
        SimpleNamespace(peer=Peer(name, rank), incarnation=life)
        for name, rank, life in [("prefill", 0, 7), ("prefill", 1, 9), ("other", 0, 7)]
    ]
    side.update_instance("prefill", VIEW)
    side.update_instance("prefill", None)
    one_changed, all_left = ([look(link) for link in links] for look in asked)
    assert one_changed == [False, True, False]
    assert all_left == [True, True, False]


def test_restarts_reach_the_machine_before_waiting_rooms_open(
    directory: Directory,
) -> None:
    taken: list[Event] = []
    side = side_of(directory, Rooms(), taken=taken)
    side.receive(handle("1"))
    assert taken == []
    side.update_instance("prefill", VIEW)
    *news, begun = taken
    assert news == [PeerRestarted(Peer("prefill", 0), 7), PeerRestarted(Peer("prefill", 1), 8)]
    assert isinstance(begun, Receive)


def test_an_unknown_incarnation_proves_nothing(directory: Directory) -> None:
    asked: list[Callable[[Any], bool]] = []
    taken: list[Event] = []
    side = side_of(directory, Rooms(), asked, taken)
    unknown: Any = SimpleNamespace(
        name="prefill", ranks=[SimpleNamespace(rank=0, incarnation=None)]
    )
    side.update_instance("prefill", unknown)
    link = SimpleNamespace(peer=Peer("prefill", 0), incarnation=7)
    assert (taken, [look(link) for look in asked]) == ([], [False])


def side_of(
    directory: Directory,
    rooms: Rooms,
    asked: list[Callable[[Any], bool]] | None = None,
    taken: list[Event] | None = None,
) -> TargetSide:
    runner: Any = SimpleNamespace(
        answer=(taken if taken is not None else []).append,
        probe_links=(asked if asked is not None else []).append,
        machine=SimpleNamespace(rooms={}, status=None),
    )
    transport_thread: Any = SimpleNamespace(expect_writes=lambda *_, **__: None)
    table: Any = rooms
    nothing: Any = None
    return TargetSide(runner, table, nothing, Observer(), transport_thread, nothing, directory)
