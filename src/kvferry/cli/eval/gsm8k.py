"""``kvferry eval gsm8k``: reads what it was told, asks, and shows the score."""

from __future__ import annotations

import argparse
import asyncio
import os

import msgspec

from kvferry.cli.eval.output import AnswerLog, as_document, open_log, report
from kvferry.cli.eval.problems import Quiz, make_quiz, read_problems
from kvferry.cli.eval.results import tally
from kvferry.cli.eval.run import EvalEndpoint, run_quiz
from kvferry.cli.load.client import base_url
from kvferry.cli.parsing import given, number, whole
from kvferry.errors import InputError

EXIT_INCOMPLETE = 1
EXIT_INTERRUPTED = 130
KEY_VARIABLE = "OPENAI_API_KEY"
MOST_S = 86400


def run(args: argparse.Namespace) -> int:
    """Ask everything; show what was answered, also when interrupted."""
    endpoint, quiz = read_endpoint(args), read_quiz(args)
    concurrency = whole("--concurrency")(args.concurrency)
    name = given("--log", args.log)
    _demand_other_file(name, (args.data, args.train))
    interrupted = False
    with AnswerLog(len(quiz.questions), lambda: open_log(name)) as sheet:
        try:
            asyncio.run(run_quiz(quiz, endpoint, concurrency, sheet))
        except KeyboardInterrupt:
            if not sheet.has_begun:
                raise
            interrupted = True
    totals = tally(sheet.outcomes, sheet.seconds)
    setting = {
        "url": args.url,
        "model": sheet.model,
        "data": args.data,
        "shots": len(quiz.shots),
        "num": len(quiz.questions),
        "concurrency": concurrency,
        "chat": endpoint.chat,
        "max_tokens": endpoint.max_tokens,
        "interrupted": interrupted,
        "log": sheet.log_name,
    }
    document = as_document(totals, setting)
    print(msgspec.json.encode(document).decode() if args.json else report(totals, setting))
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_INCOMPLETE if totals.failed else 0


def read_endpoint(args: argparse.Namespace) -> EvalEndpoint:
    """Who is asked, and how."""
    base_url(args.url)
    return EvalEndpoint(
        url=args.url,
        model=given("--model", args.model),
        api_key=_api_key(args),
        chat=args.chat,
        max_tokens=whole("--max-tokens")(args.max_tokens),
        deadline_s=number("--deadline", 0.1, MOST_S)(args.deadline),
    )


def _api_key(args: argparse.Namespace) -> str | None:
    key = given("--api-key", args.api_key) or os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        where = "--api-key" if args.api_key else KEY_VARIABLE
        raise InputError(f"{where} has characters that no key has, such as the end of a line")
    return key


def read_quiz(args: argparse.Namespace) -> Quiz:
    """Which questions, behind which shots."""
    num_shots = whole("--shots", 0)(args.shots)
    num = None if args.num is None else whole("--num")(args.num)
    train = given("--train", args.train)
    return make_quiz(
        read_problems(args.data),
        num_shots=num_shots,
        num=num,
        train=None if train is None else read_problems(train),
    )


def _demand_other_file(log: str | None, inputs: tuple[str | None, ...]) -> None:
    """Writing the log must not replace the data set."""
    for name in inputs:
        if log and name and os.path.exists(log) and os.path.samefile(log, name):
            raise InputError(f"--log would replace {name!r}, which is read; choose another path")
