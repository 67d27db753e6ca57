"""The runner with a scripted machine and ports that record their calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
import pytest
from endpoint.scripted_machine import (
    LAYOUT,
    ME,
    PLAN,
    TIMES,
    ExposedMachine,
    RecordingPorts,
    ScriptedMachine,
)
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.runner import (
    MAX_WAITING_FRAMES,
    MIN_STALL,
    PeerGone,
    SourcePorts,
    SourceRunner,
    TargetPorts,
    TargetRunner,
    drop_redundant,
    frame_event,
)
from kvferry.endpoint.runner.sessions import Sessions
from kvferry.ids import Generation, Op, Peer, Serial, Session, SlotIndex, Ticket
from kvferry.plan import Request
from kvferry.protocol.codec import BadFrame, FrameFault, Header
from kvferry.protocol.events import (
    Action,
    Cancel,
    Choose,
    Connect,
    Discard,
    Disconnect,
    Disconnected,
    Event,
    Forget,
    Gather,
    Instance,
    Open,
    OwnStall,
    Post,
    Receive,
    Received,
    ReceiveRequest,
    Release,
    Report,
    Scatter,
    Send,
    SendFailed,
    Sent,
    Tick,
    TransferRequest,
    Write,
    WriteFate,
    WrongVersion,
)
from kvferry.protocol.links import Link
from kvferry.protocol.messages import (
    Accept,
    Arrived,
    Body,
    Close,
    Complete,
    Envelope,
    Heartbeat,
)
from kvferry.protocol.outcome import Done
from kvferry.protocol.states import LinkState

PEER, OTHER = Peer("decode", 0), Peer("decode", 1)
LIFE, NEXT_LIFE = 7, 8
ONE, TWO, THREE = (Session(LIFE, number) for number in (1, 2, 3))
REQUEST = Request(1)
LEAST_S = 1.0


# ---------------------------------------------------------------- set-up


class Bench:
    """A runner with its scripted machine and recording ports."""

    def __init__(self, script: ScriptedMachine | None = None) -> None:
        self.script = script or ScriptedMachine()
        self.ports = RecordingPorts()
        machine: Any = self.script
        self.runner: Any = (
            TargetRunner(machine, TargetPorts(*[self.ports] * 4))
            if machine.exposed
            else SourceRunner(machine, SourcePorts(*[self.ports] * 4))
        )

    def do(self, *actions: Action, at: float = 0.0) -> list[tuple[str, object]]:
        """Let the machine perform these actions. Return the calls of the ports."""
        return self.take(Tick(), *actions, at=at)

    def take(self, event: Event, *answer: Action, at: float = 0.0) -> list[tuple[str, object]]:
        self.script.answers[event] = list(answer)
        self.ports.asked.clear()
        self.runner.take(event, at)
        return list(self.ports.asked)

    def meet(self, session: Session = ONE, peer: Peer = PEER, life: int = LIFE) -> None:
        self.do(Connect(peer, life, session, b"metadata"))

    def fly(self, op: int, session: Session = ONE) -> None:
        self.do(write(op, session))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def frame(body: Body, session: Session = ONE) -> Envelope:
    return Envelope(ME, 1, session, 1, body)


def say(body: Body, peer: Peer = PEER) -> Send:
    return Send(peer, frame(body))


def note(op: int) -> Arrived:
    return Arrived(f"room-{op}", Generation(1), ())


def write(op: int, session: Session = ONE) -> Write:
    return Write(Op(op), transfer(op, session), (), frame(note(op), session))


def transfer(op: int, session: Session = ONE) -> TransferRequest:
    return TransferRequest(f"room-{op}", session, Generation(1), 0, PEER, PLAN, REQUEST, ())


def drop(session: Session = ONE, peer: Peer = PEER, life: int = LIFE) -> Disconnect:
    return Disconnect(peer, life, session)


def proof(session: Session = ONE, peer: Peer = PEER, life: int = LIFE) -> Disconnected:
    return Disconnected(peer, life, session)


# ---------------------------------------------------------------- writes and their notes


def test_a_note_is_sent_after_its_write_and_before_dependent_frames(bench: Bench) -> None:
    bench.meet()
    assert bench.do(write(1)) == [("write", 1)]
    assert bench.take(Sent(Op(1)), say(Heartbeat())) == [("send", note(1)), ("send", Heartbeat())]
    assert bench.take(Sent(Op(1))) == []


def test_a_note_may_be_sent_before_the_machine_takes_the_result(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    bench.ports.asked.clear()
    bench.runner.send_note(Op(1))
    assert bench.ports.asked == [("send", note(1))]
    assert Sent(Op(1)) not in bench.script.heard
    assert bench.take(Sent(Op(1)), say(Heartbeat())) == [("send", Heartbeat())], "sent once"


@pytest.mark.parametrize("fate", WriteFate)
def test_a_failed_write_sends_no_note(bench: Bench, fate: WriteFate) -> None:
    bench.meet()
    bench.fly(1)
    heard = bench.take(SendFailed(Op(1), fate)) + bench.take(Sent(Op(1)))
    assert "send" not in dict(heard)
    assert bench.script.heard[-2:] == [SendFailed(Op(1), fate), Sent(Op(1))]


def test_every_failed_write_except_a_busy_one_hints_death(bench: Bench) -> None:
    bench.meet()
    for op, fate in enumerate(WriteFate):
        bench.fly(op)
        heard = bench.take(SendFailed(Op(op), fate))
        assert heard == (
            [] if fate is WriteFate.BUSY else [("hint_death", (PEER, LIFE, b"metadata"))]
        )
    assert bench.take(SendFailed(Op(9), WriteFate.FAILED)) == []


@pytest.mark.parametrize("cut", [True, False])
def test_no_write_starts_in_a_cut_or_unknown_session(bench: Bench, cut: bool) -> None:
    if cut:
        bench.meet()
        bench.do(drop())
    assert bench.do(write(1)) == []
    assert bench.script.heard[-1] == SendFailed(Op(1), WriteFate.FAILED)
    assert bench.runner.sessions.num_in_flight == 0


def test_a_ports_immediate_answer_is_the_next_event(bench: Bench) -> None:
    bench.meet()
    bench.ports.on_write = lambda action: bench.runner.take(Sent(action.op), 0.0)
    bench.script.answers[Sent(Op(1))] = [say(Heartbeat())]
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
    assert bench.runner.sessions.num_in_flight == 1
    assert bench.do(post(1)) == [("post", (1, 5))]
    assert bench.runner.sessions.num_in_flight == 1
    assert bench.take(Sent(Op(1))) == [("send", note(1))]
    assert bench.runner.sessions.num_in_flight == 0


def test_a_discarded_gather_is_in_flight_until_it_is_answered(bench: Bench) -> None:
    bench.meet()
    bench.do(gather(1))
    assert bench.do(Discard(Op(1))) == [("discard", 1)]
    assert bench.do(Discard(Op(1)), post(1)) == [], "once"
    assert bench.do(drop()) == [("cut", ONE), ("start_probing", (PEER, LIFE))]
    assert proof() not in bench.script.heard
    bench.take(SendFailed(Op(1), WriteFate.BUSY))
    assert bench.script.heard[-1] == proof()


def test_a_gather_in_a_cut_session_fails_at_once(bench: Bench) -> None:
    bench.meet()
    bench.do(drop())
    assert bench.do(gather(1)) == []
    assert bench.script.heard[-1] == SendFailed(Op(1), WriteFate.FAILED)
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
    bench.take(SendFailed(Op(1), WriteFate.FAILED))
    assert bench.do(post(1), Discard(Op(1))) == []
    assert bench.take(Sent(Op(1))) == []


# ---------------------------------------------------------------- proof


def test_an_idle_session_is_proven_over_without_a_probe(bench: Bench) -> None:
    bench.meet()
    assert bench.do(drop()) == [("cut", ONE), ("stop_probing", (PEER, LIFE))]
    assert bench.script.heard[-1] == proof()
    assert bench.take(Cancel("r")) == []
    assert bench.script.heard.count(proof()) == 1


def test_a_session_with_a_write_in_flight_waits_for_its_end(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    assert bench.do(drop()) == [("cut", ONE), ("start_probing", (PEER, LIFE))]
    assert proof() not in bench.script.heard
    assert ("stop_probing", (PEER, LIFE)) in bench.take(Sent(Op(1)))
    # The end of the write is taken before the proof that depends on it.
    assert bench.script.heard[-2:] == [Sent(Op(1)), proof()]


def test_doubt_ends_only_with_that_incarnation_of_the_peer(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    bench.take(SendFailed(Op(1), WriteFate.UNKNOWN))
    assert bench.do(drop()) == [("cut", ONE), ("start_probing", (PEER, LIFE))]
    assert bench.take(PeerGone(PEER, NEXT_LIFE)) == []
    assert bench.take(PeerGone(OTHER, LIFE)) == []
    assert proof() not in bench.script.heard
    assert bench.take(PeerGone(PEER, LIFE)) == [("cut", ONE), ("stop_probing", (PEER, LIFE))]
    assert bench.script.heard[-1] == proof()
    assert not any(isinstance(event, PeerGone) for event in bench.script.heard)


def test_an_exposed_session_waits_for_the_peers_death() -> None:
    bench = Bench(ExposedMachine())
    bench.meet()
    assert bench.do(drop()) == [("start_probing", (PEER, LIFE))]
    bench.take(PeerGone(PEER, LIFE))
    assert bench.script.heard[-1] == proof()


def test_a_peers_death_cuts_its_sessions(bench: Bench) -> None:
    bench.meet()
    bench.meet(TWO, PEER, NEXT_LIFE)
    assert ("cut", ONE) in bench.take(PeerGone(PEER, LIFE))
    assert bench.script.heard[-1] == proof()
    assert bench.do(write(1, TWO)) == [("write", 1)]


def test_probing_stops_when_the_last_session_is_proven(bench: Bench) -> None:
    for session in (ONE, TWO):
        bench.meet(session)
        bench.fly(session.number, session)
        bench.do(drop(session))
    assert "stop_probing" not in dict(bench.take(Sent(Op(1))))
    assert "stop_probing" in dict(bench.take(Sent(Op(2))))


def test_a_session_is_kept_until_it_is_abandoned_and_idle(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    assert bench.do(Forget(ONE)) == []
    assert len(bench.runner.sessions) == 1
    assert ("forget", ONE) in bench.take(Sent(Op(1)))
    assert len(bench.runner.sessions) == 0
    assert bench.do(drop()) == []


def test_death_hints_reach_the_matching_links(bench: Bench) -> None:
    for session, peer in ((ONE, PEER), (TWO, OTHER)):
        bench.meet(session, peer)
    for session, peer in ((ONE, PEER), (TWO, OTHER), (THREE, OTHER)):
        bench.script.links[session] = Link(peer, session, LinkState.UP, PLAN, LIFE, 0.0, 0.0, 0.0)
    bench.ports.asked.clear()
    bench.runner.probe_links(lambda link: link.peer == OTHER)
    assert bench.ports.asked == [("hint_death", (OTHER, LIFE, b"metadata"))]
    bench.runner.probe_links()
    assert [name for name, _ in bench.ports.asked] == ["hint_death"] * 3


@pytest.mark.parametrize(
    "event",
    [
        Open("r", 9.0),
        Receive(Instance("p", "model", LAYOUT), ReceiveRequest("r", REQUEST, (), 9.0)),
    ],
    ids=["source", "target"],
)
def test_memory_is_held_until_every_room_is_released(bench: Bench, event: Event) -> None:
    holds_no_memory = [bench.runner.holds_no_memory]
    bench.take(event)
    bench.do(Report("r", Done(b"")))
    holds_no_memory.append(bench.runner.holds_no_memory)
    bench.do(Release("r"))
    holds_no_memory.append(bench.runner.holds_no_memory)
    assert holds_no_memory == [True, False, True]


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
        (BadFrame(FrameFault.VERSION, "", header(3)), WrongVersion(PEER, ONE, 99, False)),
        (BadFrame(FrameFault.VERSION, "", header(0)), WrongVersion(PEER, ONE, 99, True)),
        (BadFrame(FrameFault.VERSION, ""), None),
        (BadFrame(FrameFault.MALFORMED, "", header(3)), None),
    ],
)
def test_the_event_of_a_frame(message: Envelope | BadFrame, event: Event | None) -> None:
    assert frame_event(message) == event


# ---------------------------------------------------------------- the sessions table


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([ONE, TWO, THREE])),
        st.tuples(st.sampled_from(["end", "doubt"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["cut", "abandon"]), st.sampled_from([ONE, TWO, THREE])),
        st.tuples(st.just("confirm_dead"), st.sampled_from([LIFE, NEXT_LIFE])),
    ),
    max_size=25,
)
LIVES = {ONE: LIFE, TWO: LIFE, THREE: NEXT_LIFE}


class Truth:
    """Model of the sessions: sets of what has happened."""

    def __init__(self, exposed: bool) -> None:
        self.in_flight: dict[Op, Session] = {}
        self.doubtful: set[Session] = set()
        self.exposed = set(LIVES) if exposed else set[Session]()
        self.cut: set[Session] = set()
        self.unwanted: set[Session] = set()
        self.proven: set[Session] = set()
        self.dropped: set[Session] = set()

    def is_over(self, session: Session) -> bool:
        waits = session in self.in_flight.values() or session in self.doubtful | self.exposed
        return session in self.cut and not waits

    def settle(self) -> tuple[set[Session], set[Session]]:
        here = set(LIVES) - self.dropped
        proven = {each for each in here - self.proven if self.is_over(each)}
        dropped = {each for each in here & self.unwanted if each not in self.in_flight.values()}
        self.proven |= proven
        self.dropped |= dropped
        return proven, dropped


@given(STEPS, st.booleans())
def test_sessions_against_a_model(steps: list[tuple[str, Session | int]], exposed: bool) -> None:
    sessions, truth = Sessions(exposed=exposed), Truth(exposed)
    for session, life in LIVES.items():
        sessions.add(PEER, life, session, b"")
    for number, (step, what) in enumerate(steps):
        _take(sessions, truth, number, step, what)
        proven, dropped = sessions.settle()
        expected = truth.settle()
        assert ({each.session for each in proven}, {each.session for each in dropped}) == expected
        assert len(sessions) == len(LIVES) - len(truth.dropped)
        assert sessions.num_in_flight == len(truth.in_flight)
        assert {each.session for each in sessions.doubtful()} == truth.doubtful - truth.dropped
        kept = truth.cut - truth.dropped
        assert {each.session for each in sessions.ending.values()} == kept
        for life in (LIFE, NEXT_LIFE):
            waiting = [x for x in kept if LIVES[x] == life and not truth.is_over(x)]
            assert sessions.needs_proof(PEER, life) == bool(waiting)


def _take(sessions: Sessions, truth: Truth, number: int, step: str, what: Session | int) -> None:
    match step, what:
        case "start", Session() as session:
            may = session not in truth.cut | truth.dropped
            assert sessions.start(Op(number), session) == may
            if may:
                truth.in_flight[Op(number)] = session
        case (("end" | "doubt"), int(nth)):
            op = [*truth.in_flight, Op(99)][min(nth, len(truth.in_flight))]
            found = truth.in_flight.pop(op, None)
            record = sessions.end(op, doubtful=step == "doubt")
            assert (record and record.session) == found
            if found and step == "doubt":
                truth.doubtful.add(found)
        case (("cut" | "abandon"), Session() as session) if session not in truth.dropped:
            (sessions.cut if step == "cut" else sessions.abandon)(session)
            truth.cut.add(session)
            truth.unwanted |= {session} if step == "abandon" else set()
        case "confirm_dead", int(life):
            lost = {each for each in LIVES if LIVES[each] == life} - truth.dropped
            assert {each.session for each in sessions.confirm_dead(PEER, life)} == lost
            truth.cut |= lost
            truth.doubtful -= lost
            truth.exposed -= lost


def test_an_answer_is_taken_at_the_time_of_its_turn(bench: Bench) -> None:
    times: list[float] = []
    handle = bench.script.handle

    def timed(event: Event, now: float) -> list[Action]:
        if isinstance(event, Sent):
            times.append(now)
        return handle(event, now)

    bench.script.handle = timed  # type: ignore[method-assign]

    def arrived() -> Iterator[Event]:
        bench.runner.answer(Sent(Op(1)))
        yield from ()

    bench.runner.turn(arrived(), 5.0)
    bench.runner.turn(arrived(), 9.0)
    assert times == [5.0, 9.0]
