"""``kvferry eval gsm8k``: asks all questions, a few at once, logs the answers, prints the score."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable

import aiohttp
import msgspec
from msgspec.structs import replace

from kvferry.cli.eval.problems import Problem, Quiz, make_quiz, prompt_of, read_problems
from kvferry.cli.eval.results import QuestionOutcome, judge, report_lines, tally
from kvferry.cli.load.client import CHAT, COMPLETIONS, ask, find_model, session_for
from kvferry.cli.load.prompts import streamed
from kvferry.cli.load.sweep import for_each
from kvferry.cli.parsing import given, number, one_line, show_path, whole
from kvferry.cli.printing import counting_bar, print_document
from kvferry.errors import InputError

EXIT_INCOMPLETE = 1
EXIT_INTERRUPTED = 130
MAX_DEADLINE_S = 86400


class QuizRun(msgspec.Struct, frozen=True, kw_only=True):
    """The questions and how to ask them; without ``model`` it is the endpoint's first one."""

    quiz: Quiz
    url: str
    model: str | None
    api_key: str | None
    chat: bool
    max_tokens: int
    deadline_s: float
    concurrency: int


def run(args: argparse.Namespace) -> int:
    """Ask every question and print the score, also after an interrupt."""
    settings, is_interrupted = read_flags(args), False
    num, outcomes = len(settings.quiz.questions), list[QuestionOutcome]()
    name = given("--log", args.log) or time.strftime("gsm8k-%Y%m%d-%H%M%S.jsonl")
    settings = replace(settings, model=asyncio.run(probe(settings)))
    began = time.monotonic()
    try:
        # A new file, unbuffered: an interrupt loses no answer.
        with open(name, "xb", buffering=0) as log, counting_bar() as bar:
            task = bar.add_task("gsm8k", total=num, result="")

            def record(outcome: QuestionOutcome) -> None:
                log.write(msgspec.json.encode(outcome) + b"\n")
                outcomes.append(outcome)
                right = sum(one.right is True for one in outcomes)
                bar.update(task, advance=1, result=f"{right} right")

            asyncio.run(ask_all(settings, record))
    except KeyboardInterrupt:
        is_interrupted = True
    except OSError as error:
        raise InputError(
            f"cannot write the log {show_path(name)}: {error.strerror}; name another with --log"
        ) from None
    totals = tally(outcomes, time.monotonic() - began)
    facts = {
        "url": args.url,
        "model": settings.model,
        "data": args.data,
        "shots": len(settings.quiz.shots),
        "num": num,
        "concurrency": settings.concurrency,
        "chat": settings.chat,
        "max_tokens": settings.max_tokens,
        "interrupted": is_interrupted,
        "log": name,
    }
    if args.json:
        print_document({"eval": "gsm8k", **facts, **msgspec.to_builtins(totals)})
    else:
        print(f"gsm8k, {facts['shots']} shots: {one_line(settings.model or '')} at {args.url}")
        for what, text in (*report_lines(totals), ("log", name)):
            print(f"  {what:12}{text}")
        if is_interrupted:
            print(f"  interrupted {totals.asked} of {num} questions have ended")
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_INCOMPLETE if totals.failed else 0


def read_flags(args: argparse.Namespace) -> QuizRun:
    """Return the questions and the endpoint that the flags describe."""
    train = given("--train", args.train)
    quiz = make_quiz(
        read_problems(args.data),
        num_shots=whole("--shots", 0)(args.shots),
        num=None if args.num is None else whole("--num")(args.num),
        train=None if train is None else read_problems(train),
    )
    return QuizRun(
        quiz=quiz,
        url=args.url,
        model=given("--model", args.model),
        api_key=given("--api-key", args.api_key) or os.environ.get("OPENAI_API_KEY"),
        chat=args.chat,
        max_tokens=whole("--max-tokens")(args.max_tokens),
        deadline_s=number("--deadline", 0.1, MAX_DEADLINE_S)(args.deadline),
        concurrency=whole("--concurrency")(args.concurrency),
    )


async def probe(settings: QuizRun) -> str:
    """Send a first request of one token, and return the model that answered it.

    Raises ``InputError`` if the endpoint refuses it, because it would refuse all others too.
    """
    async with session_for(settings.url, api_key=settings.api_key) as session:
        model = settings.model or await find_model(session)
        first = replace(settings, model=model, max_tokens=1)
        error = (await ask_one(session, first, settings.quiz.questions[0])).error
    if error:
        raise InputError(
            f"{settings.url} does not answer a first request for the model {model!r}: {error}; "
            f"check --url, --model and --api-key"
        )
    return model


async def ask_all(settings: QuizRun, record: Callable[[QuestionOutcome], None]) -> None:
    """Ask every question, and record each outcome as soon as it is known."""
    async with session_for(settings.url, api_key=settings.api_key) as session:

        async def ask_and_record(problem: Problem) -> None:
            record(await ask_one(session, settings, problem))

        try:
            await for_each(settings.quiz.questions, settings.concurrency, ask_and_record)
        except ExceptionGroup as errors:
            # Only ``record`` raises, for instance on a full disk; the first reason is enough.
            raise errors.exceptions[0] from None


async def ask_one(
    session: aiohttp.ClientSession, settings: QuizRun, problem: Problem
) -> QuestionOutcome:
    """Ask one question."""
    prompt = prompt_of(settings.quiz.shots, problem.question, chat=settings.chat)
    body = streamed(settings.model or "", settings.max_tokens) | prompt
    path = CHAT if settings.chat else COMPLETIONS
    return judge(problem, await ask(session, body, path=path, deadline_s=settings.deadline_s))
