"""The frames that a runner sends, drops as redundant, and receives."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from endpoint.runner_bench import (
    LIFE,
    ONE,
    OTHER,
    PEER,
    Bench,
    frame,
    say,
)

from kvferry.endpoint.runner.runner import (
    MAX_WAITING_FRAMES,
    drop_redundant,
    frame_event,
)
from kvferry.ids import Generation, Serial
from kvferry.protocol.codec import BadFrame, FrameFault, Header
from kvferry.protocol.events import (
    Cancel,
    Event,
    Received,
    Send,
    WrongVersion,
)
from kvferry.protocol.messages import (
    Accept,
    Arrived,
    Body,
    Close,
    Complete,
    Envelope,
    Heartbeat,
)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---------------------------------------------------------------- frames


A, B = ("a", Generation(1)), ("b", Generation(1))


def named(frames: list[Send]) -> list[str]:
    def name(body: Body) -> str:
        serial = isinstance(body, Arrived) and body.serial is not None
        return "staged" if serial else type(body).__name__.lower()

    return [f"{name(each.envelope.body)} {each.peer.rank}" for each in frames]


ACCEPT, CLOSE, COMPLETE = Accept(*A), Close(*A, 1, ()), Complete(*A)
DIRECT, STAGED = Arrived(*A, ()), Arrived(*A, (), Serial(0))


@pytest.mark.parametrize(
    ("bodies", "left"),
    [
        ([ACCEPT], "accept 0"),
        ([ACCEPT, CLOSE], "close 0"),
        ([CLOSE, ACCEPT], "close 0, accept 0"),
        ([ACCEPT, STAGED], "staged 0"),
        ([ACCEPT, Heartbeat()], "accept 0, heartbeat 0"),
        ([ACCEPT, Close(*B, 1, ())], "accept 0, close 0"),
        ([ACCEPT, Close("a", Generation(2), 1, ())], "accept 0, close 0"),
        ([ACCEPT, DIRECT, DIRECT, CLOSE], "close 0"),
        ([ACCEPT, STAGED, CLOSE], "staged 0, close 0"),
        ([DIRECT, COMPLETE], "arrived 0, complete 0"),
        ([CLOSE, DIRECT], "close 0, arrived 0"),
        ([DIRECT, Close(*B, 1, ())], "arrived 0, close 0"),
        ([], ""),
    ],
)
def test_only_redundant_frames_are_dropped(bodies: list[Body], left: str) -> None:
    assert ", ".join(named(drop_redundant([say(body) for body in bodies]))) == left


def test_frames_to_other_peers_are_not_redundant() -> None:
    frames = [say(ACCEPT), say(ACCEPT, OTHER), say(CLOSE, OTHER)]
    assert named(drop_redundant(frames)) == ["accept 0", "close 1"]


def test_a_step_sends_no_redundant_frame(bench: Bench) -> None:
    assert bench.do(say(ACCEPT), say(CLOSE)) == [("send", CLOSE)]


def test_a_turn_sends_no_redundant_frame(bench: Bench) -> None:
    push, finish = Cancel("push"), Cancel("finish")
    bench.script.answers = {push: [say(ACCEPT), say(DIRECT)], finish: [say(CLOSE)]}
    bench.runner.turn([push, finish], 0.0)
    assert bench.ports.asked == [("send", CLOSE)]


def test_a_long_turn_sends_frames_before_its_end(bench: Bench) -> None:
    def arrived() -> Iterator[Event]:
        for number in range(2 * MAX_WAITING_FRAMES):
            step = Cancel(number)
            bench.script.answers[step] = [say(Heartbeat())]
            yield step
            said.append(len(bench.ports.asked))

    said: list[int] = []
    bench.runner.turn(arrived(), 0.0)
    assert said == sorted(said)
    assert set(said) == {0, MAX_WAITING_FRAMES, 2 * MAX_WAITING_FRAMES}


def test_frames_are_sent_even_if_a_step_raises(bench: Bench) -> None:
    bench.script.breaks_at = Cancel("r")
    bench.script.answers[Cancel("before")] = [say(Heartbeat())]
    with pytest.raises(ZeroDivisionError):
        bench.runner.turn([Cancel("before"), Cancel("r")], 0.0)
    assert bench.ports.asked == [("send", Heartbeat())]


def header(seq: int) -> Header:
    return Header("kvf", 99, PEER, LIFE, ONE, seq, msgspec.Raw(b"0"))


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (frame(Heartbeat()), Received(frame(Heartbeat()))),
        (BadFrame(FrameFault.VERSION, header(3)), WrongVersion(PEER, ONE, 99, False)),
        (BadFrame(FrameFault.VERSION, header(0)), WrongVersion(PEER, ONE, 99, True)),
        (BadFrame(FrameFault.VERSION), None),
        (BadFrame(FrameFault.MALFORMED, header(3)), None),
    ],
)
def test_the_event_of_a_frame(message: Envelope | BadFrame, event: Event | None) -> None:
    assert frame_event(message) == event
