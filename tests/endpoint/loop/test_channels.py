"""What a channel keeps until a turn is over, and what it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.endpoint.control.bundles import unbundle
from kvferry.endpoint.loop import channels
from kvferry.endpoint.loop.channels import MOST_S, MOST_WAITING, Channel, Dropped
from kvferry.ids import Peer, Session
from kvferry.protocol.events import Event
from kvferry.protocol.messages import Envelope, Heartbeat
from kvferry.telemetry.observer import Observer

ME, PEER = Peer("p", 0), Peer("d", 0)
SESSION = Session(1, 2)


class Mail(Channel[str]):
    """Sends into a list: how many frames each message had."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(ME, nobody, Observer(), nobody)
        self.sent: list[int] = []

    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        yield from ()

    def _way_to(self, peer: Peer, session: Session) -> str:
        return "way"

    def _answered_at(self, way: str, now: float) -> None:
        return None

    def _send(self, way: str, messages: Iterable[bytes]) -> None:
        self.sent += [len(unbundle(message) or ()) for message in messages]

    def close(self) -> None: ...

    def say(self) -> None:
        self.send(PEER, Envelope(ME, 1, SESSION, 0, Heartbeat()))


class Clock:
    """Time as a test has it."""

    def __init__(self) -> None:
        self.now = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.usefixtures("clock")
def test_what_a_turn_says_leaves_together() -> None:
    mail = Mail()
    for _ in range(3):
        mail.say()
    assert mail.sent == []
    mail.flush()
    mail.flush()
    assert mail.sent == [3]


@pytest.mark.usefixtures("clock")
def test_much_does_not_wait_for_the_end() -> None:
    mail = Mail()
    for _ in range(MOST_WAITING):
        mail.say()
    assert sum(mail.sent) == MOST_WAITING


def test_in_a_long_turn_what_waits_is_let_out_now_and_then(clock: Clock) -> None:
    mail = Mail()
    mail.say()
    mail.let_out()
    assert mail.sent == [1]
    for _ in range(2):
        mail.say()
        mail.let_out()
    assert mail.sent == [1], "it was but a moment ago"
    clock.now += 2 * MOST_S
    mail.let_out()
    mail.let_out()
    assert mail.sent == [1, 2]
