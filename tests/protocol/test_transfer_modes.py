"""Answers about transfer modes may be late or wrong."""

from __future__ import annotations

import pytest
from wire import DENSE, ROOM, World, dense

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer, Ticket
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import (
    Action,
    Cancel,
    Choose,
    Chosen,
    Finish,
    Open,
    Prepare,
    Push,
    Write,
)
from kvferry.protocol.messages import Staging, Want
from kvferry.testing.sim import run_seed
from kvferry.testing.sim.engines import EnginePolicy

S0 = Peer("prefill", 0)
TOKENS = Span(0, 8)


@pytest.mark.parametrize("mode", ["all", "none", "mixed", "random"])
@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
def test_any_answer_keeps_the_guarantees(mode: str, late: float) -> None:
    """Late and random answers cost time only."""
    for seed in range(9000, 9025):
        result = run_seed(seed, emphasis={"late_choice": late}, policy=EnginePolicy(mode))
        assert not result.violations, result.violations[0][1]
        assert result.done >= 2, "the rooms after the faults must be done"


class Asked(World):
    """A world in which the test answers ``Choose`` itself."""

    def ask(self, *events: Open | Prepare | Push | Finish | Cancel) -> list[Choose]:
        """Send an event to the source; return its questions."""
        actions = [one for event in events for one in self.source().handle(event, self.now)]
        for action in actions:
            if not isinstance(action, Choose):
                self._carry_out(S0, action)
        return [one for one in actions if isinstance(one, Choose)]

    def answer(self, *questions: Choose, staged: bool = False) -> list[Action]:
        """Answer the source; return its actions."""
        done: list[Action] = []
        for one in questions:
            chosen = Chosen(one.ticket, (staged,) * len(one.blocks))
            done += self.source().handle(chosen, self.now)
        for action in done:
            self._carry_out(S0, action)
        return done


@pytest.fixture
def w() -> Asked:
    w = Asked(dense(), (dense(),), ProtocolConfig(), Staging(64, 2))
    w.ask(Open(ROOM, w.now + 60))
    w.receive(ROOM, Request(8))
    w.run()
    return w


def test_blocks_wait_for_the_answer(w: Asked) -> None:
    (question,) = w.ask(Push(ROOM, TOKENS))
    assert question.transfer.peer == Peer("decode0", 0)
    assert {block.group for block in question.blocks} == {group.name for group in DENSE.groups}
    w.ask(Finish(ROOM, 8))
    assert not w.outcomes(ROOM)
    assert any(isinstance(one, Write) for one in w.answer(question))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize("staged", [True, False])
def test_late_answer_is_ignored(w: Asked, staged: bool) -> None:
    (question,) = w.ask(Push(ROOM, TOKENS))
    w.ask(Cancel(ROOM))
    w.run()
    assert w.answer(question, staged=staged) == []
    assert w.source().counts["late"] == 1
    w.wait(w.config.unclaimed_offer_ttl_s)
    w.finish()


def test_second_answer_is_ignored(w: Asked) -> None:
    (question,) = w.ask(Push(ROOM, TOKENS))
    w.answer(question)
    assert w.answer(question, staged=True) == []
    w.ask(Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_unknown_answer_is_ignored(w: Asked) -> None:
    assert w.source().handle(Chosen(Ticket(99), (True,)), w.now) == []


def test_answers_may_come_in_any_order(w: Asked) -> None:
    (first,) = w.ask(Push(ROOM, Span(0, 4)))
    (second,) = w.ask(Push(ROOM, Span(4, 8)))
    w.ask(Finish(ROOM, 8))
    w.answer(second, staged=True)
    w.answer(first)
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_answer_to_prepare_may_arrive_after_the_push(w: Asked) -> None:
    (announced,) = w.ask(Prepare(ROOM, TOKENS))
    (pushed,) = w.ask(Push(ROOM, TOKENS))
    w.answer(pushed)
    w.answer(announced, staged=True)
    assert not w.where(Want), "nothing of it is still to be pushed"
    w.ask(Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_staging_without_slots_is_ignored() -> None:
    w = Asked(dense(), (dense(),), ProtocolConfig(), Staging())
    w.ask(Open(ROOM, w.now + 60))
    w.receive(ROOM, Request(8))
    w.run()
    (question,) = w.ask(Push(ROOM, TOKENS))
    writes = [one for one in w.answer(question, staged=True) if isinstance(one, Write)]
    assert [write.slot for write in writes] == [None]
    w.ask(Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()
