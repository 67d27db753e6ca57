"""What a source's owner does for its rooms: steps that wait for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

from kvferry.endpoint.loop.sides import AFTER_POLL_S, SourceSide
from kvferry.protocol.events import Event, Open
from kvferry.telemetry.observer import Observer

FIRST, SECOND = Open("first", inf), Open("second", inf)


class Happening:
    """A GPU's event."""

    def __init__(self, happened: bool = False) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


def role_and_taken(*, held: bool = True) -> tuple[SourceSide, list[Event]]:
    taken: list[Event] = []
    rooms: Any = SimpleNamespace(holds=lambda handle: held)
    nothing: Any = None
    no_writes: Any = SimpleNamespace(ends=lambda now: (), wakeup=lambda: inf)
    return SourceSide(nothing, taken.append, rooms, nothing, no_writes, nothing, Observer()), taken


class RoomHandle:
    """A handle as far as a role looks at it."""

    def __init__(self) -> None:
        self.steps: deque[Any] = deque()
        self.outcome: object = None


def handle() -> Any:
    return RoomHandle()


def nothing_to_learn() -> None: ...


def test_steps_keep_their_order_and_nobody_is_woken_when_none_waits() -> None:
    role, taken = role_and_taken()
    room, gpu = handle(), Happening()
    role.ask(room, gpu, nothing_to_learn, FIRST)
    role.ask(room, None, nothing_to_learn, SECOND)
    role.advance(0.0)
    assert (taken, role.wakeup(5.0)) == ([], 5.0 + AFTER_POLL_S)
    gpu.happened = True
    role.advance(0.0)
    assert (taken, role.wakeup(5.0)) == ([FIRST, SECOND], inf)


def test_a_room_that_is_over_waits_for_no_gpu() -> None:
    role, taken = role_and_taken(held=False)
    room = handle()
    role.ask(room, Happening(), nothing_to_learn, FIRST)
    room.outcome = "failed"
    role.advance(0.0)
    assert (taken, role.wakeup(5.0)) == ([], inf)


def test_a_target_hears_of_each_write_before_the_next_end_is_looked_at() -> None:
    told: list[object] = []

    def ends(now: float) -> Iterator[int]:
        for op in (1, 2):
            told.append(op)
            yield op

    nothing: Any = None
    writes: Any = SimpleNamespace(ends=ends)
    channel: Any = SimpleNamespace(let_out=lambda: told.append("let out"))
    SourceSide(nothing, told.append, nothing, nothing, writes, channel, Observer()).advance(0.0)
    assert told == [1, "let out", 2, "let out"]
