"""Outcomes of questions, and the score of all."""

from __future__ import annotations

import json
import math
from decimal import Decimal

import msgspec
import pytest

from kvferry.cli.eval.problems import Problem
from kvferry.cli.eval.results import QuestionOutcome, judge, tally
from kvferry.cli.load.client import LoadReply


def outcome(line: int, text: str = "#### 7", **fields: object) -> QuestionOutcome:
    reply = LoadReply(text=text, finish="stop", usage={"completion_tokens": 10}, total_s=1.0)
    for name, value in fields.items():
        setattr(reply, name, value)
    return judge(Problem(line, "q", "#### 7", Decimal(7)), reply)


def test_a_reply_is_right_wrong_or_failed() -> None:
    assert outcome(1).right is True
    assert outcome(1, "#### 7.00").right is True
    assert outcome(1, "#### 8").right is False
    assert outcome(1, "seven").right is False
    # Text before a lost connection is no answer.
    assert outcome(1, error="gone").right is None


def test_a_line_of_the_log() -> None:
    told = outcome(
        3, "so #### 1,000", stamps=[0.5, 0.9], report={"room": 1}, usage={"prompt_tokens": 4}
    )
    assert json.loads(msgspec.json.encode(told)) == {
        "line": 3,
        "right": False,
        "expected": "7",
        "got": "1000",
        "question": "q",
        "answer": "so #### 1,000",
        "finish": "stop",
        "error": "",
        "prompt_tokens": 4,
        "output_tokens": 2,
        "ttft_s": 0.5,
        "total_s": 1.0,
        "kvferry": {"room": 1},
    }


def test_failures_are_counted_separately() -> None:
    outcomes = [
        outcome(1),
        outcome(2, "8", total_s=3.0),
        outcome(9, error="full", total_s=99.0),
        outcome(3, "none", finish="length"),
        outcome(4, error="gone"),
        outcome(5, error="full"),
        outcome(6),
    ]
    totals = tally(outcomes, 2.0)
    assert (totals.asked, totals.answered, totals.failed, totals.right) == (7, 4, 3, 2)
    assert totals.score == 0.5
    assert totals.standard_error == pytest.approx(math.sqrt(0.25 / 4))
    assert (totals.no_number, totals.cut) == (1, 1)
    assert totals.failures == {"full": [9, 5], "gone": [4]}
    assert (totals.output_tokens, totals.output_tokens_per_s) == (40, 20.0)
    assert totals.latency_s is not None
    assert totals.latency_s.p50 == 1.0
    assert totals.latency_s.p99 == pytest.approx(3.0 - 0.03 * 2)


@pytest.mark.parametrize("outcomes", [[], [outcome(1, error="gone")]])
def test_without_an_answer_there_is_no_score(outcomes: list[QuestionOutcome]) -> None:
    totals = tally(outcomes, 0.0)
    assert (totals.score, totals.standard_error, totals.latency_s) == (None, None, None)
    assert totals.output_tokens_per_s == 0
