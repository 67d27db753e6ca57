"""The source side: steps that wait for GPU events, and frames between the ends of writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

from kvferry.endpoint.loop.sides import EVENT_POLL_S, SourceSide
from kvferry.endpoint.outgoing import PendingStep
from kvferry.protocol.events import Event, Open
from kvferry.telemetry.observer import Observer

FIRST, SECOND = Open("first", inf), Open("second", inf)


class GpuEvent:
    """A GPU event that happens when a test says so."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


def side_and_taken(*, held: bool = True) -> tuple[SourceSide, list[Event]]:
    taken: list[Event] = []
    runner: Any = SimpleNamespace(answer=taken.append, machine=SimpleNamespace(status=None))
    rooms: Any = SimpleNamespace(holds=lambda handle: held, refresh=lambda *_: None)
    inline = SimpleNamespace(wakeup=lambda: inf)
    writes: Any = SimpleNamespace(poll=lambda now: (), inline=inline)
    nothing: Any = None
    return SourceSide(runner, rooms, nothing, Observer(), nothing, writes), taken


class RoomHandle:
    """The part of a handle that a side uses."""

    def __init__(self) -> None:
        self.steps: deque[Any] = deque()
        self.outcome: object = None


def handle() -> Any:
    return RoomHandle()


def test_steps_keep_their_order_and_the_loop_polls_only_while_one_waits() -> None:
    side, taken = side_and_taken()
    room, event = handle(), GpuEvent()
    side.submit(room, PendingStep(FIRST, event))
    side.submit(room, PendingStep(SECOND))
    side.poll(0.0)
    assert (taken, side.wakeup(5.0)) == ([], 5.0 + EVENT_POLL_S)
    event.happened = True
    side.poll(0.0)
    assert (taken, side.wakeup(5.0)) == ([FIRST, SECOND], inf)


def test_a_room_that_is_over_waits_for_no_event() -> None:
    side, taken = side_and_taken(held=False)
    room = handle()
    side.submit(room, PendingStep(FIRST, GpuEvent()))
    room.outcome = "failed"
    side.poll(0.0)
    assert (taken, side.wakeup(5.0)) == ([], inf)


def test_frames_about_a_write_may_leave_before_the_next_end_is_taken() -> None:
    seen: list[object] = []

    def poll(now: float) -> Iterator[int]:
        for op in (1, 2):
            seen.append(op)
            yield op

    nothing: Any = None
    writes: Any = SimpleNamespace(poll=poll)
    channel: Any = SimpleNamespace(flush_if_due=lambda: seen.append("flush"))
    SourceSide(nothing, nothing, channel, Observer(), nothing, writes).poll(0.0)
    assert seen == [1, "flush", 2, "flush"]
