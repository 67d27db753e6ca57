"""The outcome of each question, and the score of all. Pure.

A question without a reply is a failure of the endpoint and not a wrong answer. It is counted
separately; the score is of the answered questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from kvferry.cli.eval.problems import Problem
from kvferry.cli.eval.score import answered_number, standard_error
from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.stats import Spread, spread


class QuestionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One question's line in the log.

    ``line`` is the question's line in the data, ``right`` is None after a failure, ``got`` is the
    number in the answer, and ``kvferry`` is a kvferry endpoint's report of the transfer.
    """

    line: int
    right: bool | None
    expected: Decimal
    got: Decimal | None
    question: str
    answer: str
    finish: str
    error: str
    prompt_tokens: int | None
    output_tokens: int
    ttft_s: float | None
    total_s: float
    kvferry: dict[str, Any] = {}


class SharedReason(msgspec.Struct, frozen=True):
    """The questions that failed for one reason, by their lines in the data."""

    reason: str
    lines: tuple[int, ...]


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The score and the cost of all questions that have ended.

    ``cut`` answers reached the length limit and ``no_number`` answers have no number; both count
    as answered. ``standard_error`` is sqrt(p (1 - p) / n) with n = ``answered``.
    """

    asked: int
    answered: int
    failed: int
    right: int
    score: float | None
    standard_error: float | None
    no_number: int
    cut: int
    latency_s: Spread | None
    output_tokens: int
    output_tokens_per_s: float
    seconds: float
    failures: tuple[SharedReason, ...]


def judge(problem: Problem, reply: LoadReply) -> QuestionOutcome:
    """Return the outcome of a question with this reply."""
    got = answered_number(reply.text)
    return QuestionOutcome(
        line=problem.line,
        right=None if reply.error else got == problem.expected,
        expected=problem.expected,
        got=got,
        question=problem.question,
        answer=reply.text,
        finish=reply.finish,
        error=reply.error,
        prompt_tokens=reply.prompt_tokens,
        output_tokens=reply.output_tokens,
        ttft_s=reply.ttft_s,
        total_s=reply.total_s,
        kvferry=reply.report,
    )


def tally(outcomes: Sequence[QuestionOutcome], seconds: float) -> Tally:
    """Return the score of all outcomes; ``seconds`` is the duration of the run."""
    answered = [one for one in outcomes if not one.error]
    right = sum(one.right is True for one in answered)
    tokens = sum(one.output_tokens for one in answered)
    return Tally(
        asked=len(outcomes),
        answered=len(answered),
        failed=len(outcomes) - len(answered),
        right=right,
        score=right / len(answered) if answered else None,
        standard_error=standard_error(right, len(answered)) if answered else None,
        no_number=sum(one.got is None for one in answered),
        cut=sum(one.finish == "length" for one in answered),
        latency_s=spread(one.total_s for one in answered),
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        seconds=seconds,
        failures=failures_of(outcomes),
    )


def failures_of(outcomes: Sequence[QuestionOutcome]) -> tuple[SharedReason, ...]:
    """Return the failures by reason, the most frequent first."""
    lines: dict[str, list[int]] = {}
    for one in outcomes:
        if one.error:
            lines.setdefault(one.error, []).append(one.line)
    found = [SharedReason(reason, tuple(sorted(which))) for reason, which in lines.items()]
    return tuple(sorted(found, key=lambda failure: -len(failure.lines)))
