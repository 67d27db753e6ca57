"""``kvferry eval gsm8k``: asks all questions, a few at once, logs the answers, prints the score."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from kvferry.cli.eval.problems import Problem, Quiz, make_quiz, read_problems, request_body
from kvferry.cli.eval.results import QuestionOutcome, SharedReason, Tally, judge, tally
from kvferry.cli.eval.score import standard_error
from kvferry.cli.load.client import CHAT, COMPLETIONS, ask, find_model, session_for
from kvferry.cli.parsing import given, number, one_line, show_path, whole
from kvferry.cli.printing import counting_bar, print_document
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds

EXIT_INCOMPLETE = 1
EXIT_INTERRUPTED = 130
MAX_DEADLINE_S = 86400
SHOWN_LINES = 10
SHOWN_FAILURES = 5


class EvalEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint to ask; without ``model`` it is the first one that the endpoint lists."""

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    max_tokens: int = 512
    deadline_s: float = 600.0


def run(args: argparse.Namespace) -> int:
    """Ask every question and print the score, also after an interrupt."""
    endpoint, quiz = read_endpoint(args), read_quiz(args)
    concurrency = whole("--concurrency")(args.concurrency)
    name = given("--log", args.log)
    for data in (args.data, args.train):
        if name and data and os.path.exists(name) and os.path.samefile(name, data):
            raise InputError(f"--log would replace {data!r}, which is read; choose another path")
    interrupted = False
    with AnswerLog(len(quiz.questions), name) as log:
        try:
            asyncio.run(run_quiz(quiz, endpoint, concurrency, log))
        except KeyboardInterrupt:
            if not log.name:
                raise
            interrupted = True
    totals = tally(log.outcomes, log.seconds)
    settings = {
        "url": args.url,
        "model": log.model,
        "data": args.data,
        "shots": len(quiz.shots),
        "num": len(quiz.questions),
        "concurrency": concurrency,
        "chat": endpoint.chat,
        "max_tokens": endpoint.max_tokens,
        "interrupted": interrupted,
        "log": log.name,
    }
    if args.json:
        print_document({"eval": "gsm8k", **settings, **msgspec.to_builtins(totals)})
    else:
        print(report(totals, settings))
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_INCOMPLETE if totals.failed else 0


def read_endpoint(args: argparse.Namespace) -> EvalEndpoint:
    """Return the endpoint that the flags describe."""
    return EvalEndpoint(
        url=args.url,
        model=given("--model", args.model),
        api_key=given("--api-key", args.api_key) or os.environ.get("OPENAI_API_KEY"),
        chat=args.chat,
        max_tokens=whole("--max-tokens")(args.max_tokens),
        deadline_s=number("--deadline", 0.1, MAX_DEADLINE_S)(args.deadline),
    )


def read_quiz(args: argparse.Namespace) -> Quiz:
    """Return the questions and the shots that the flags describe."""
    num_shots = whole("--shots", 0)(args.shots)
    num = None if args.num is None else whole("--num")(args.num)
    train = given("--train", args.train)
    return make_quiz(
        read_problems(args.data),
        num_shots=num_shots,
        num=num,
        train=None if train is None else read_problems(train),
    )


# ---------------------------------------------------------------- asking


async def run_quiz(quiz: Quiz, endpoint: EvalEndpoint, concurrency: int, log: AnswerLog) -> None:
    """Ask every question; the log keeps the outcomes if this is cancelled.

    Raises ``InputError`` if the endpoint refuses a first request of one token, because it would
    refuse all others too.
    """
    async with session_for(endpoint.url, api_key=endpoint.api_key) as session:
        model = endpoint.model or await find_model(session)

        async def ask_one(problem: Problem, max_tokens: int) -> QuestionOutcome:
            body = request_body(
                quiz.shots, problem.question, chat=endpoint.chat, model=model, max_tokens=max_tokens
            )
            path = CHAT if endpoint.chat else COMPLETIONS
            reply = await ask(session, body, path=path, deadline_s=endpoint.deadline_s)
            return judge(problem, reply)

        outcome = await ask_one(quiz.questions[0], 1)
        if outcome.error:
            raise InputError(
                f"{endpoint.url} does not answer a first request for the model "
                f"{model!r}: {outcome.error}; check --url, --model and --api-key"
            )
        log.begin(model)
        # The workers share one iterator, so questions begin in order.
        questions = iter(quiz.questions)

        async def worker() -> None:
            for problem in questions:
                log.add(await ask_one(problem, endpoint.max_tokens))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(quiz.questions))):
                    group.create_task(worker())
        except ExceptionGroup as errors:
            # Only the log raises, for instance on a full disk; the first reason is enough.
            raise errors.exceptions[0] from None


class AnswerLog:
    """All outcomes so far: in memory, in the log file, and on a progress bar.

    ``name`` is empty until the file is open.
    """

    def __init__(self, num_questions: int, wanted_name: str | None) -> None:
        self.outcomes: list[QuestionOutcome] = []
        self.model = ""
        self.name = ""
        self._wanted_name = wanted_name
        self._file: IO[bytes] | None = None
        self._num_questions = num_questions
        self._began = self._ended = time.monotonic()
        self._bar = counting_bar()
        self._task = self._bar.add_task("waiting for the endpoint", total=None, result="")

    def __enter__(self) -> AnswerLog:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
        if self._file is not None:
            # ``add`` has reported a failed write; closing tries it once more.
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds from the first question to the last answer."""
        return self._ended - self._began

    def begin(self, model: str) -> None:
        """Open the log when the endpoint has answered its first request."""
        self.model = model
        self._file = open_log(self._wanted_name)
        self.name = self._file.name
        self._began = self._ended = time.monotonic()
        self._bar.update(self._task, description="gsm8k", total=self._num_questions)

    def add(self, outcome: QuestionOutcome) -> None:
        """Write an outcome to the log first, so that an interrupt loses no answer."""
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(outcome) + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"cannot write the log {show_path(self.name)}: {error.strerror}; "
                f"it has the first {len(self.outcomes)} answers, choose another with --log"
            ) from None
        self.outcomes.append(outcome)
        self._ended = time.monotonic()
        num_failed = sum(one.right is None for one in self.outcomes)
        num_right = sum(one.right is True for one in self.outcomes)
        failed = f", {num_failed} failed" if num_failed else ""
        score = f"score {_score(num_right, len(self.outcomes) - num_failed)}{failed}"
        self._bar.update(self._task, advance=1, result=score)


def open_log(name: str | None) -> IO[bytes]:
    """Open the named file, replacing it, or a new file in this folder."""
    path = Path(name or time.strftime("gsm8k-%Y%m%d-%H%M%S.jsonl"))
    try:
        return path.open("wb" if name else "xb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot write the log {show_path(path)}: {reason}; name another with --log"
        ) from None


# ---------------------------------------------------------------- output


def report(totals: Tally, settings: Mapping[str, Any]) -> str:
    """Return the score and the costs as a text for people."""
    return "\n".join(_printable(line) for line in _report_lines(totals, settings))


def _report_lines(totals: Tally, settings: Mapping[str, Any]) -> Iterator[str]:
    def row(name: str, text: str) -> str:
        return f"  {name:12}{text}"

    shots = _count(settings["shots"], "shot")
    yield f"gsm8k, {shots}: {settings['model']} at {settings['url']}"
    meaning = ", because no question was answered"
    if totals.answered:
        right = f"{totals.right} of {totals.answered} right"
        meaning = f"  ({right}; ± is the standard error of the mean, sqrt(p(1-p)/n))"
    yield row("score", _score(totals.right, totals.answered) + meaning)
    if totals.latency_s is not None:
        p50, p99 = human_seconds(totals.latency_s.p50), human_seconds(totals.latency_s.p99)
        yield row("latency", f"p50 {p50}, p99 {p99}")
    tokens = f"{totals.output_tokens:,} tokens, {totals.output_tokens_per_s:.1f} tokens/s"
    took = f"{human_seconds(totals.seconds)} in all, {settings['concurrency']} at once"
    yield row("output", f"{tokens}, {took}")
    if totals.cut:
        yield row("cut", f"{_count(totals.cut, 'answer')} at {settings['max_tokens']} tokens")
    if totals.no_number:
        yield row("no number", f"{_count(totals.no_number, 'answer')}, counted as wrong")
    if totals.failed:
        yield row("failed", f"{totals.failed} of {totals.asked}, which the score leaves out")
        yield from (row("", _failure(one)) for one in totals.failures[:SHOWN_FAILURES])
    yield row("log", settings["log"])
    if settings["interrupted"]:
        yield row("interrupted", f"{totals.asked} of {settings['num']} questions have ended")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _score(num_right: int, num_answered: int) -> str:
    if not num_answered:
        return "unknown"
    p, error = num_right / num_answered, standard_error(num_right, num_answered)
    return f"{p:.3f} ± {error:.3f}"


def _failure(failure: SharedReason) -> str:
    shown = ", ".join(str(line) for line in failure.lines[:SHOWN_LINES])
    more = ", …" if len(failure.lines) > SHOWN_LINES else ""
    word = "line" if len(failure.lines) == 1 else "lines"
    return f"{word} {shown}{more}: {one_line(failure.reason)}"


def _printable(line: str) -> str:
    """Return the line without control characters, which a server's error may have."""
    return "".join(sign if sign.isprintable() else "·" for sign in line)
