"""The flags of ``kvferry eval``: the score of an endpoint's answers."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLE = """example:
  kvferry eval gsm8k --url http://127.0.0.1:8000 --data test.jsonl --num 100 --concurrency 8
  kvferry eval gsm8k --url http://127.0.0.1:8000/v1 --data test.jsonl --train train.jsonl --chat

FILE has one problem per line, in the data set's public form:
  {"question": "Tom has 3 boats and buys 4. How many has he?", "answer": "3 + 4 = 7\\n#### 7"}
Without --train its first --shots lines are worked examples in every prompt and are not asked.

The number after "####" counts, else the last number of an answer. "±" is the standard error of
the mean, sqrt(p (1 - p) / n). Failed requests are counted separately, not as wrong answers.

exit status: 0 every question was answered, 1 some were not, 2 bad input, 130 interrupted (the
log and the output have the answers so far).
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "eval",
        help="score an endpoint's answers",
        description="Score any endpoint with OpenAI's API: kvferry's own, vLLM, SGLang, others.",
    )
    kinds = parser.add_subparsers(
        title="evaluations", metavar="WHAT", required=True, parser_class=type(parser)
    )
    _add_gsm8k(kinds)


def _add_gsm8k(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "gsm8k",
        help="grade-school problems with one number as their answer",
        description="Ask grade-school problems, and compare the numbers in the answers.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--url", required=True, help="the endpoint, with or without /v1")
    add("--data", required=True, metavar="FILE", help="the problems, one JSON object a line")
    add("--train", metavar="FILE", help="take the shots from here (from --data)")
    add("--shots", default="8", metavar="N", help="worked examples in every prompt (8)")
    add("--num", metavar="N", help="how many questions are asked (all)")
    add("--concurrency", default="8", metavar="N", help="questions in flight (8)")
    add("--chat", action="store_true", help="as a conversation, not as a text to continue")
    add("--model", metavar="NAME", help="its name there (the first that the endpoint lists)")
    add("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY, or none)")
    add("--max-tokens", default="512", metavar="N", help="longest answer (512)")
    add("--deadline", default="600", metavar="S", help="seconds for a question (600)")
    add("--log", metavar="FILE", help="a new file, a line a question (gsm8k-DATE-TIME.jsonl)")
    add("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run_gsm8k)


def run_gsm8k(args: argparse.Namespace) -> int:
    """Ask the questions and print the score."""
    # The HTTP client imports slowly, and other commands do not need it.
    from kvferry.cli.eval import gsm8k as eval_gsm8k  # noqa: PLC0415

    return eval_gsm8k.run(args)
