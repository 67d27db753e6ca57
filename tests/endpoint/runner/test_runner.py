"""The runner with a scripted machine: writes, notes, memory and timers."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec
import pytest
from endpoint.runner_bench import (
    LEAST_S,
    LIFE,
    ONE,
    OTHER,
    PEER,
    REQUEST,
    THREE,
    TWO,
    Bench,
    drop,
    frame,
    note,
    proof,
    say,
    transfer,
    write,
)
from endpoint.scripted_machine import (
    PLAN,
    TIMES,
    ExposedMachine,
    ScriptedMachine,
)
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.runner import (
    MIN_STALL,
    PeerGone,
)
from kvferry.ids import Op, Serial, Session, SlotIndex, Ticket
from kvferry.protocol.events import (
    Action,
    Cancel,
    Choose,
    Connect,
    Discard,
    Event,
    Gather,
    Open,
    OwnStall,
    Post,
    Release,
    Report,
    Scatter,
    Tick,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.messages import (
    Heartbeat,
)
from kvferry.protocol.outcome import Done


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---------------------------------------------------------------- writes and their notes


def test_a_note_is_sent_after_its_write_and_before_dependent_frames(bench: Bench) -> None:
    bench.meet()
    assert bench.do(write(1)) == [("write", 1)]
    assert bench.take(WriteEnded(Op(1)), say(Heartbeat())) == [
        ("send", note(1)),
        ("send", Heartbeat()),
    ]
    assert bench.take(WriteEnded(Op(1))) == []


def test_a_note_may_be_sent_before_the_machine_takes_the_result(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    bench.ports.asked.clear()
    bench.runner.send_note(Op(1))
    assert bench.ports.asked == [("send", note(1))]
    assert WriteEnded(Op(1)) not in bench.script.heard
    assert bench.take(WriteEnded(Op(1)), say(Heartbeat())) == [("send", Heartbeat())], "sent once"


@pytest.mark.parametrize("fate", WriteFate)
def test_a_failed_write_sends_no_note(bench: Bench, fate: WriteFate) -> None:
    bench.meet()
    bench.fly(1)
    heard = bench.take(WriteEnded(Op(1), fate)) + bench.take(WriteEnded(Op(1)))
    assert "send" not in dict(heard)
    assert bench.script.heard[-2:] == [WriteEnded(Op(1), fate), WriteEnded(Op(1))]


def test_every_failed_write_except_a_busy_one_hints_death(bench: Bench) -> None:
    bench.meet()
    for op, fate in enumerate(WriteFate):
        bench.fly(op)
        heard = bench.take(WriteEnded(Op(op), fate))
        assert heard == (
            [] if fate is WriteFate.BUSY else [("hint_death", (PEER, LIFE, b"metadata"))]
        )
    assert bench.take(WriteEnded(Op(9), WriteFate.FAILED)) == []


@pytest.mark.parametrize("cut", [True, False])
def test_no_write_starts_in_a_cut_or_unknown_session(bench: Bench, cut: bool) -> None:
    if cut:
        bench.meet()
        bench.do(drop())
    assert bench.do(write(1)) == []
    assert bench.script.heard[-1] == WriteEnded(Op(1), WriteFate.FAILED)
    assert len(bench.runner.sessions.by_op) == 0


def test_a_ports_immediate_answer_is_the_next_event(bench: Bench) -> None:
    bench.meet()
    bench.ports.on_write = lambda action: bench.runner.take(WriteEnded(action.op), 0.0)
    bench.script.answers[WriteEnded(Op(1))] = [say(Heartbeat())]
    # The machine's second action is performed before the end of the first is taken.
    heard = bench.do(write(1), Report("r", Done(b"")))
    assert heard == [("write", 1), ("report", "r"), ("send", note(1)), ("send", Heartbeat())]


def test_a_step_that_raises_does_not_stop_the_runner(bench: Bench) -> None:
    bench.script.breaks_at = Cancel("r")
    with pytest.raises(ZeroDivisionError):
        bench.take(Cancel("r"))
    assert bench.do(say(Heartbeat())) == [("send", Heartbeat())]


def test_each_action_reaches_its_port(bench: Bench) -> None:
    bench.meet()
    choose = Choose(Ticket(4), transfer(3), ())
    assert bench.do(choose) == [("choose", 4)]
    scatter = Scatter(Op(3), "r", PEER, PLAN, REQUEST, (), SlotIndex(0), Serial(0))
    assert Bench(ExposedMachine()).do(scatter) == [("scatter", 3)]
    assert bench.do(Report("r", Done(b""))) == [("report", "r")]
    assert bench.do(Release("r")) == [("release", "r")]
    assert bench.do(Connect(PEER, LIFE, TWO, b"")) == [("connect", TWO)]
    with pytest.raises(AssertionError, match="no port performs"):
        bench.do(Action())


# ---------------------------------------------------------------- gathers ahead


def gather(op: int, session: Session = ONE) -> Gather:
    return Gather(Op(op), transfer(op, session), (), SlotIndex(1))


def post(op: int, session: Session = ONE) -> Post:
    return Post(Op(op), SlotIndex(5), frame(note(op), session))


def test_a_gather_is_in_flight_before_it_is_posted_and_its_note_leaves_at_its_end(
    bench: Bench,
) -> None:
    bench.meet()
    assert bench.do(gather(1)) == [("gather", 1)]
    assert len(bench.runner.sessions.by_op) == 1
    assert bench.do(post(1)) == [("post", (1, 5))]
    assert len(bench.runner.sessions.by_op) == 1
    assert bench.take(WriteEnded(Op(1))) == [("send", note(1))]
    assert len(bench.runner.sessions.by_op) == 0


def test_a_discarded_gather_is_in_flight_until_it_is_answered(bench: Bench) -> None:
    bench.meet()
    bench.do(gather(1))
    assert bench.do(Discard(Op(1))) == [("discard", 1)]
    assert bench.do(Discard(Op(1)), post(1)) == [], "once"
    assert bench.do(drop()) == [("cut", ONE), ("start_probing", (PEER, LIFE))]
    assert proof() not in bench.script.heard
    bench.take(WriteEnded(Op(1), WriteFate.BUSY))
    assert bench.script.heard[-1] == proof()


def test_a_gather_in_a_cut_session_fails_at_once(bench: Bench) -> None:
    bench.meet()
    bench.do(drop())
    assert bench.do(gather(1)) == []
    assert bench.script.heard[-1] == WriteEnded(Op(1), WriteFate.FAILED)
    assert bench.do(post(1), Discard(Op(1))) == []


@pytest.mark.parametrize("gone", [False, True])
def test_nothing_that_is_gathered_is_posted_in_a_session_that_was_cut(
    bench: Bench, gone: bool
) -> None:
    bench.meet(ONE)
    bench.meet(TWO)
    for op, session in ((1, ONE), (2, ONE), (3, TWO)):
        bench.do(gather(op, session))
    bench.do(post(1))
    if gone:
        bench.meet(THREE, OTHER)
        bench.do(gather(4, THREE))
        heard = bench.take(PeerGone(OTHER, LIFE))
        assert heard == [("cut", THREE), ("discard", 4)]
        assert bench.do(post(4)) == []
        return
    heard = bench.do(drop())
    assert heard == [("cut", ONE), ("discard", 2), ("start_probing", (PEER, LIFE))]
    assert bench.do(post(2), Discard(Op(2))) == []
    assert bench.do(post(3, TWO)) == [("post", (3, 5))]


def test_a_failed_gather_is_not_posted(bench: Bench) -> None:
    bench.meet()
    bench.do(gather(1))
    bench.take(WriteEnded(Op(1), WriteFate.FAILED))
    assert bench.do(post(1), Discard(Op(1))) == []
    assert bench.take(WriteEnded(Op(1))) == []


# ---------------------------------------------------------------- time


def test_events_are_taken_before_time(bench: Bench) -> None:
    bench.take(Open("r", 5.0))
    bench.script.heard.clear()
    bench.runner.turn([Cancel("r"), Cancel("s")], 5.0)
    assert bench.script.heard[-3:] == [Cancel("r"), Cancel("s"), Tick()]


def test_a_late_turn_first_reports_by_how_much(bench: Bench) -> None:
    bench.take(Open("r", 500.0), at=10.0)
    due = bench.runner.wakeup()
    in_time, late = due + TIMES.heartbeat_s * MIN_STALL, due + 30.0
    bench.runner.turn([Cancel("r")], in_time)
    assert OwnStall not in map(type, bench.script.heard)
    bench.take(Open("s", 500.0), at=in_time)
    due = bench.runner.wakeup()
    bench.script.heard.clear()
    bench.runner.turn([Cancel("s")], late)
    assert bench.script.heard == [OwnStall(late - due), Cancel("s"), Tick()]


def test_the_machine_ticks_only_when_a_timer_is_due(bench: Bench) -> None:
    assert bench.runner.wakeup() == inf
    bench.take(Open("r", 50.0), at=10.0)
    assert bench.runner.wakeup() == 10.0 + LEAST_S
    bench.script.timers = [20.0]
    bench.runner.advance_time(10.0 + LEAST_S - 0.01)
    assert Tick() not in bench.script.heard
    bench.runner.advance_time(10.0 + LEAST_S)
    assert bench.script.heard[-1] == Tick()
    assert bench.runner.wakeup() == 20.0
    bench.script.timers = []
    bench.runner.advance_time(20.0)
    assert bench.runner.wakeup() == inf


def test_a_deadline_may_be_sooner_than_any_timer(bench: Bench) -> None:
    bench.take(Open("r", 10.25), at=10.0)
    assert bench.runner.wakeup() == 10.25
    bench.take(Cancel("r"), at=10.1)
    assert bench.runner.wakeup() == 10.25


@pytest.mark.parametrize("shortest", ["status_poll_s", "heartbeat_s", "credit_patience_s"])
def test_the_shortest_timer_sets_the_wakeup(shortest: str) -> None:
    config = ProtocolConfig(**{**msgspec.structs.asdict(TIMES), shortest: 0.5})
    bench = Bench(ScriptedMachine(config))
    bench.take(Cancel("r"), at=1.0)
    assert bench.runner.wakeup() == 1.5


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans(), st.floats(0, 30)), max_size=12))
def test_no_runner_sleeps_past_a_timer(steps: list[tuple[float, bool, float]]) -> None:
    """Each step: seconds that pass, whether an event arrives, seconds of the new timer."""
    bench, now = Bench(), 0.0
    for passes, something, takes in steps:
        # Like the loop, sleep until the announced wakeup at most.
        until = now + passes
        while bench.runner.wakeup() <= until:
            now = max(now, bench.runner.wakeup())
            bench.script.timers = [timer for timer in bench.script.timers if timer > now]
            bench.runner.advance_time(now)
        now = until
        if something:
            bench.script.timers.append(now + LEAST_S + takes)
            bench.runner.turn([Cancel("r")], now)
        assert bench.runner.wakeup() <= min(bench.script.timers, default=inf)


def test_an_answer_is_taken_at_the_time_of_its_turn(bench: Bench) -> None:
    times: list[float] = []
    handle = bench.script.handle

    def timed(event: Event, now: float) -> list[Action]:
        if isinstance(event, WriteEnded):
            times.append(now)
        return handle(event, now)

    bench.script.handle = timed  # type: ignore[method-assign]

    def arrived() -> Iterator[Event]:
        bench.runner.answer(WriteEnded(Op(1)))
        yield from ()

    bench.runner.turn(arrived(), 5.0)
    bench.runner.turn(arrived(), 9.0)
    assert times == [5.0, 9.0]
