"""Sessions: when one is proven over, and the table against a model."""

from __future__ import annotations

import pytest
from endpoint.runner_bench import (
    LIFE,
    NEXT_LIFE,
    ONE,
    OTHER,
    PEER,
    REQUEST,
    THREE,
    TWO,
    Bench,
    drop,
    proof,
    write,
)
from endpoint.scripted_machine import (
    LAYOUT,
    PLAN,
    ExposedMachine,
)
from hypothesis import given
from hypothesis import strategies as st

from kvferry.endpoint.runner.runner import (
    PeerGone,
)
from kvferry.endpoint.runner.sessions import Sessions
from kvferry.ids import Op, Session
from kvferry.protocol.events import (
    Cancel,
    Event,
    Forget,
    Instance,
    Open,
    Receive,
    ReceiveRequest,
    Release,
    Report,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Done
from kvferry.protocol.states import LinkState


@pytest.fixture
def bench() -> Bench:
    return Bench()


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
    assert ("stop_probing", (PEER, LIFE)) in bench.take(WriteEnded(Op(1)))
    # The end of the write is taken before the proof that depends on it.
    assert bench.script.heard[-2:] == [WriteEnded(Op(1)), proof()]


def test_doubt_ends_only_with_that_incarnation_of_the_peer(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    bench.take(WriteEnded(Op(1), WriteFate.UNKNOWN))
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
    assert "stop_probing" not in dict(bench.take(WriteEnded(Op(1))))
    assert "stop_probing" in dict(bench.take(WriteEnded(Op(2))))


def test_a_session_is_kept_until_it_is_abandoned_and_idle(bench: Bench) -> None:
    bench.meet()
    bench.fly(1)
    assert bench.do(Forget(ONE)) == []
    assert len(bench.runner.sessions.records) == 1
    assert ("forget", ONE) in bench.take(WriteEnded(Op(1)))
    assert len(bench.runner.sessions.records) == 0
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
        assert len(sessions.records) == len(LIVES) - len(truth.dropped)
        assert len(sessions.by_op) == len(truth.in_flight)
        assert {
            each.session for each in sessions.records.values() if each.doubtful
        } == truth.doubtful - truth.dropped
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
