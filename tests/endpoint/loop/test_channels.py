"""Channels: when queued frames are sent, and where a target's frames go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.endpoint.control.bundles import unbundle
from kvferry.endpoint.loop import channels
from kvferry.endpoint.loop.channels import (
    MAX_WAIT_S,
    MAX_WAITING,
    Channel,
    ConnectionLost,
    TargetChannel,
)
from kvferry.ids import Peer, Session
from kvferry.protocol.events import Event
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.telemetry.observer import Observer

ME, PEER = Peer("p", 0), Peer("d", 0)
SESSION = Session(1, 2)


class Mail(Channel[str]):
    """Channel that records the number of frames of each message."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(ME, nobody, Observer(), nobody)
        self.sent: list[int] = []

    def receive(self, ready: Collection[object]) -> Iterator[Event | ConnectionLost]:
        yield from ()

    def _route_to(self, peer: Peer, session: Session) -> str:
        return "way"

    def _last_answered_at(self, way: str, now: float) -> None:
        return None

    def _send(self, way: str, messages: Iterable[bytes]) -> None:
        self.sent += [len(unbundle(message) or ()) for message in messages]

    def close(self) -> None: ...

    def say(self) -> None:
        self.send(PEER, Envelope(ME, 1, SESSION, 0, Heartbeat()))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.usefixtures("clock")
def test_the_frames_of_a_turn_leave_together() -> None:
    mail = Mail()
    for _ in range(3):
        mail.say()
    assert mail.sent == []
    mail.flush()
    mail.flush()
    assert mail.sent == [3]


@pytest.mark.usefixtures("clock")
def test_many_frames_do_not_wait_for_the_end_of_a_turn() -> None:
    mail = Mail()
    for _ in range(MAX_WAITING):
        mail.say()
    assert sum(mail.sent) == MAX_WAITING


def test_waiting_frames_leave_at_intervals_in_a_long_turn(clock: Clock) -> None:
    mail = Mail()
    mail.say()
    mail.flush_if_due()
    assert mail.sent == [1]
    for _ in range(2):
        mail.say()
        mail.flush_if_due()
    assert mail.sent == [1], "frames were sent just before"
    clock.now += 2 * MAX_WAIT_S
    mail.flush_if_due()
    mail.flush_if_due()
    assert mail.sent == [1, 2]


class Watch:
    """A poller that records what it watches."""

    def __init__(self) -> None:
        self.watched: set[object] = set()
        self.watch = self.watched.add
        self.unwatch = self.watched.remove

    def mark_used(self, socket: object) -> None: ...


def test_a_source_that_has_moved_is_reached_at_its_new_address_only() -> None:
    address = "tcp://127.0.0.1:1"
    watch: Any = Watch()
    channel = TargetChannel(ME, watch, Observer(), lambda _: None, None, lambda _: address)
    watched = []
    for address in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"):  # noqa: B007
        channel.send(PEER, Envelope(ME, 1, SESSION, 1, Heartbeat()))
        watched.append(set(watch.watched))
    assert watched[0] == watched[1]
    assert len(watched[2]) == len(watched[0])
    assert not watched[2] & watched[0]
    assert channel.peers == {PEER}
    channel.close()
    assert not watch.watched
