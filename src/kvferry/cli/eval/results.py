"""The outcome of each question, and the score of all. Pure.

A question without a reply is a failure of the endpoint and not a wrong answer. It is counted
separately; the score is of the answered questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from kvferry.cli.eval.numbers import answered_number
from kvferry.cli.eval.problems import Problem
from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.stats import Spread, spread
from kvferry.cli.parsing import one_line
from kvferry.plan.units import human_seconds


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


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The score and the cost of all questions that have ended.

    ``cut`` answers reached the length limit and ``no_number`` answers have no number; both count
    as answered. ``standard_error`` is sqrt(p (1 - p) / n) with n = ``answered``. ``failures`` has
    the lines of the questions that failed for each reason.
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
    failures: dict[str, list[int]]


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
    score = right / len(answered) if answered else None
    tokens = sum(one.output_tokens for one in answered)
    failures: dict[str, list[int]] = {}
    for one in outcomes:
        if one.error:
            failures.setdefault(one.error, []).append(one.line)
    return Tally(
        asked=len(outcomes),
        answered=len(answered),
        failed=len(outcomes) - len(answered),
        right=right,
        score=score,
        standard_error=None if score is None else math.sqrt(score * (1 - score) / len(answered)),
        no_number=sum(one.got is None for one in answered),
        cut=sum(one.finish == "length" for one in answered),
        latency_s=spread(one.total_s for one in answered),
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        seconds=seconds,
        failures=failures,
    )


def report_lines(totals: Tally) -> Iterator[tuple[str, str]]:
    """Yield the score and the costs for people, as pairs of a name and a text."""
    score = "unknown, because no question was answered"
    if totals.answered:
        score = (
            f"{totals.score:.3f} ± {totals.standard_error:.3f}  ({totals.right} of "
            f"{totals.answered} right; ± is the standard error of the mean, sqrt(p(1-p)/n))"
        )
    yield "score", score
    if totals.latency_s is not None:
        p50, p99 = human_seconds(totals.latency_s.p50), human_seconds(totals.latency_s.p99)
        yield "latency", f"p50 {p50}, p99 {p99}"
    tokens = f"{totals.output_tokens:,} tokens, {totals.output_tokens_per_s:.1f} tokens/s"
    yield "output", f"{tokens}, {human_seconds(totals.seconds)} in all"
    if totals.cut:
        yield "cut", f"{totals.cut} at --max-tokens"
    if totals.no_number:
        yield "no number", f"{totals.no_number}, counted as wrong"
    if totals.failed:
        yield "failed", f"{totals.failed} of {totals.asked}, which the score leaves out"
    for reason, lines in totals.failures.items():
        yield "", f"lines {', '.join(map(str, lines[:10]))}: {one_line(reason)}"
